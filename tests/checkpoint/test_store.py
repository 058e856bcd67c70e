"""Locks the one commit point: what is chosen after a kill inside a save or after damage, and what a restore refuses."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.checkpoint import store
from burnish.checkpoint.store import CheckpointError, DamagedCheckpoint

SAVES_TWICE = """
import sys
from pathlib import Path
import numpy as np
from burnish.checkpoint import store
for step in (1, 2):
    store.write(Path(sys.argv[1]), step, {"w": np.full((3,), step, np.float32)}, {"step": step})
"""
"""Each test of a kill runs this."""


def state(value: float) -> dict[str, Any]:
    return {"trainable": {"q": {"a": jnp.full((2, 3), value), "b": jnp.full((3,), value, jnp.bfloat16)}}, "updates": jnp.int32(value)}


def save(folder: Path, step: int, tree: Any = None, extra: dict[str, Any] | None = None) -> None:
    store.write(folder, step, store.snapshot(state(float(step)) if tree is None else tree), {"step": step} if extra is None else extra)


def value(folder: Path, step: int) -> int:
    restored, extra = store.read(folder, step, state(0.0))
    assert extra == {"step": step}
    return int(restored["updates"])


def test_what_was_saved_comes_back_bitwise_with_its_blob(tmp_path: Path) -> None:
    original = state(0.1)
    save(tmp_path, 3, original, {"cursor": {"row": 7}, "version": 4})
    restored, extra = store.read(tmp_path, 3, state(0.0))
    assert extra == {"cursor": {"row": 7}, "version": 4}
    assert jax.tree.structure(restored) == jax.tree.structure(original)
    jax.tree.map(np.testing.assert_array_equal, restored, original)
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, original)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pickle")]


def test_a_snapshot_stays_as_it_was_when_its_arrays_are_donated(tmp_path: Path) -> None:
    tree = state(1.0)
    kept = store.snapshot(tree)
    bump = jax.jit(lambda t: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), t), donate_argnums=0)
    bump(bump(tree))
    store.write(tmp_path, 1, kept, {"step": 1})
    assert value(tmp_path, 1) == 1


def test_b101_only_what_is_committed_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert store.newest_intact(tmp_path / "absent") is None
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "11").mkdir()  # a copy that was cut
    (tmp_path / "12.partial").mkdir()
    (tmp_path / "notes").mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.newest_intact(tmp_path) == 10
    assert [record.message.split("/")[-1] for record in caplog.records] == [
        "11 was never finished: it is ignored",
        "12.partial was never finished: it is ignored",
    ]
    assert store.committed(tmp_path) == [2, 9, 10]
    with pytest.raises(CheckpointError, match="11 is no finished checkpoint: the newest .* is 10"):
        store.read(tmp_path, 11, state(0.0))


@pytest.mark.parametrize("point", ["save.before_arrays", "save.after_arrays", "save.before_commit", "save.after_commit"])
def test_r02_kill_inside_a_save(tmp_path: Path, point: str) -> None:
    environment = {**os.environ, "BURNISH_FAULTS": f"{point}@step=2:kill"}
    killed = subprocess.run([sys.executable, "-c", SAVES_TWICE, str(tmp_path)], env=environment, timeout=60, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = 2 if point == "save.after_commit" else 1
    assert store.newest_intact(tmp_path) == newest
    restored, extra = store.read(tmp_path, newest, {"w": jnp.zeros(3)})
    np.testing.assert_array_equal(restored["w"], float(newest))
    assert extra == {"step": newest}
    if newest == 1:
        store.write(tmp_path, 2, {"w": np.full(3, 2.0, np.float32)}, {"step": 2})
    assert store.newest_intact(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"], "the partial one was replaced"


@pytest.mark.parametrize("share", [0.0, "one", 0.5, 1.0])
def test_r02_a_part_of_the_array_files(tmp_path: Path, share: float | str) -> None:
    """What a kill between two files leaves: some of them, under the name of an unfinished save."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    arrays = sorted(path.relative_to(tmp_path / "2") for path in (tmp_path / "2" / "arrays").rglob("*") if path.is_file())
    assert len(arrays) >= 3
    count = 1 if share == "one" else int(float(share) * len(arrays))
    for path in arrays[:count]:
        (tmp_path / "2.partial" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "2" / path, tmp_path / "2.partial" / path)
    (tmp_path / "2.partial").mkdir(exist_ok=True)
    shutil.rmtree(tmp_path / "2")
    assert store.newest_intact(tmp_path) == 1
    save(tmp_path, 2)
    assert (value(tmp_path, 2), sorted(p.name for p in tmp_path.iterdir())) == (2, ["1", "2"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_r05_damage_to_any_file_is_found(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every file of the newest checkpoint in turn: the one before is taken and the file is named."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    whole = tmp_path.parent / f"{tmp_path.name}-whole"
    shutil.copytree(tmp_path / "2", whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.stat().st_size)
    assert {"COMMITTED", "extra.json"} < {str(file) for file in files} and len(files) > 5
    for file in files:
        DAMAGE[damage](tmp_path / "2" / file)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert store.newest_intact(tmp_path) == 1, file
        named = "2 was never finished" if damage == "deleted" and file.name == "COMMITTED" else f"2/{file}"
        marker = file.name == "COMMITTED"  # a flipped byte of it may look like a changed file
        assert named in caplog.text or marker, (file, caplog.text)
        with pytest.raises(CheckpointError):
            store.read(tmp_path, 2, state(0.0))
        shutil.rmtree(tmp_path / "2")
        shutil.copytree(whole, tmp_path / "2")
    assert store.newest_intact(tmp_path) == 2


def test_r05_an_emptied_folder_and_no_whole_one_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "2").mkdir()
    assert store.newest_intact(tmp_path) == 1
    flip(tmp_path / "1" / "extra.json")
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint in .* can be used; the newest: .*1/extra.json is not what was written"):
        store.newest_intact(tmp_path)


def test_another_format_and_a_renamed_one_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    marker = tmp_path / "1" / "COMMITTED"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="is of format 2, this version of burnish reads 1"):
        store.newest_intact(tmp_path)
    save(tmp_path, 3)
    (tmp_path / "3").rename(tmp_path / "4")
    with pytest.raises(DamagedCheckpoint, match="4 holds the checkpoint of step 3"):
        store.verify(tmp_path, 4)


def test_a_restore_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    tree = {"same": jnp.zeros(2), "old": jnp.zeros(2), "shape": jnp.zeros(2), "dtype": jnp.zeros(2)}
    save(tmp_path, 1, tree, {"facts": {"seed": 3, "scale": 2.0}})
    like = {"same": jnp.zeros(2), "new": jnp.zeros(3), "shape": jnp.zeros(4), "dtype": jnp.zeros(2, jnp.int32)}
    with pytest.raises(CheckpointError) as caught:
        store.read(tmp_path, 1, like, facts={"seed": 3, "scale": 4.0, "size": 8})
    lines = str(caught.value).splitlines()
    assert "6 differences" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "scale: the checkpoint has 2.0, this run 4.0",
        "size: the checkpoint has None, this run 8",
        "missing from the checkpoint: new float32[3]",
        "only in the checkpoint: old float32[2]",
        "dtype: the checkpoint has float32[2], this run int32[2]",
        "shape: the checkpoint has float32[2], this run float32[4]",
    ]


def test_a_committed_step_is_never_written_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        store.write(tmp_path, 1, store.snapshot(state(2.0)), {})
    assert value(tmp_path, 1) == 1


def test_later_ones_lose_their_names_until_they_are_made_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    store.set_aside_after(tmp_path, 1)
    assert store.committed(tmp_path) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2.set-aside", "3.set-aside"]
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3.set-aside"]


def test_what_was_deleted_halfway_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "2").rename(tmp_path / "2.deleting")
    (tmp_path / "3.partial").mkdir()
    assert store.newest_intact(tmp_path) == 1
    store.clean(tmp_path)
    store.delete(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
