"""Locks the one commit point: what is chosen after a kill inside a save, and what a restore refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish import checkpoint
from burnish.checkpoint import CheckpointError

SAVES_TWICE = """
import sys
from pathlib import Path
import jax.numpy as jnp
from burnish import checkpoint
for step in (1, 2):
    checkpoint.save(Path(sys.argv[1]), step, {"w": jnp.full((3,), float(step))}, {"step": step})
"""


def state(value: float) -> dict:
    return {"trainable": {"q": {"a": jnp.full((2, 3), value), "b": jnp.full((3,), value, jnp.bfloat16)}}, "updates": jnp.int32(value)}


def test_what_was_saved_comes_back_bitwise_with_its_blob(tmp_path):
    original = state(0.1)
    checkpoint.save(tmp_path, 3, original, {"cursor": {"row": 7}, "version": 4})
    restored, extra = checkpoint.restore(tmp_path, 3, state(0.0))
    assert extra == {"cursor": {"row": 7}, "version": 4}
    assert jax.tree.structure(restored) == jax.tree.structure(original)
    jax.tree.map(np.testing.assert_array_equal, restored, original)
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, original)


def test_latest_is_the_highest_committed_number_not_the_last_name(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, step, state(1.0), {})
    (tmp_path / "11").mkdir()  # a copy that was cut
    (tmp_path / "12.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path) == 10
    with pytest.raises(CheckpointError, match="11 is no finished checkpoint: the newest .* is 10"):
        checkpoint.restore(tmp_path, 11, state(0.0))


@pytest.mark.parametrize("point", ["save.after_arrays", "save.before_commit"])
def test_kill_inside_a_save_leaves_the_previous_one_chosen_r02(tmp_path, point):
    environment = {**os.environ, "BURNISH_FAULTS": f"{point}@step=2:kill"}
    killed = subprocess.run([sys.executable, "-c", SAVES_TWICE, str(tmp_path)], env=environment, timeout=60, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint.latest(tmp_path) == 1
    restored, extra = checkpoint.restore(tmp_path, 1, {"w": jnp.zeros(3)})
    np.testing.assert_array_equal(restored["w"], 1.0)
    assert extra == {"step": 1}
    checkpoint.save(tmp_path, 2, {"w": jnp.full(3, 2.0)}, {"step": 2})
    assert checkpoint.latest(tmp_path) == 2
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["1", "2"]


def test_restore_names_every_leaf_that_does_not_fit(tmp_path):
    checkpoint.save(tmp_path, 1, {"same": jnp.zeros(2), "old": jnp.zeros(2), "shape": jnp.zeros(2), "dtype": jnp.zeros(2)}, {})
    like = {"same": jnp.zeros(2), "new": jnp.zeros(3), "shape": jnp.zeros(4), "dtype": jnp.zeros(2, jnp.int32)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path, 1, like)
    lines = str(caught.value).splitlines()
    assert "4 leaves differ" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "missing from the checkpoint: new float32[3]",
        "only in the checkpoint: old float32[2]",
        "dtype: the checkpoint has float32[2], this run int32[2]",
        "shape: the checkpoint has float32[2], this run float32[4]",
    ]


def test_a_committed_step_is_never_written_again(tmp_path):
    checkpoint.save(tmp_path, 1, state(1.0), {})
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path, 1, state(2.0), {})
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, 1, state(0.0))[0]["updates"], 1)
