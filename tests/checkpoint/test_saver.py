"""When is saved, what is kept, and what a save that fails or is slow does to the run: nothing it shouldn't."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish import faults
from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.checkpoint.store import CheckpointError
from burnish.config.errors import UserError
from burnish.config.schema import CheckpointSection


def tree(step: int) -> dict[str, Any]:
    return {"w": jnp.full((3,), float(step))}


def saved(folder: Path, step: int) -> float:
    return float(store.read(folder, step, tree(0))[0]["w"][0])


def run(saver: Saver, steps: range, metric: dict[int, float] | None = None) -> None:
    for step in steps:
        if saver.is_due(step):
            saver.save(step, tree(step), {"metrics": {} if metric is None or step not in metric else {"reward/mean": metric[step]}})
    saver.finish()


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"every": 1}, [10, 11, 12]),
        ({"every": 5, "keep_last": None}, [5, 10]),
        ({"every": 1, "keep_last": 1}, [12]),
        ({"every": 1, "keep_last": 1, "keep_every": 5}, [5, 10, 12]),
        ({"every": 1, "keep_last": 1, "keep_best": {"metric": "reward/mean"}}, [4, 12]),
        ({"every": 1, "keep_last": 1, "keep_best": {"metric": "reward/mean", "mode": "min", "count": 2}}, [2, 3, 12]),
        ({"every": 1, "keep_last": 2, "keep_best": {"metric": "no/such"}}, [11, 12]),
        ({}, []),
    ],
)
def test_what_is_kept(tmp_path: Path, config: dict[str, Any], kept: list[int]) -> None:
    run(Saver(tmp_path, CheckpointSection(**config)), range(1, 13), {2: -1.0, 3: 0.0, 4: 2.0, 5: 1.0, 6: float("nan")} | {12: 0.5})
    assert store.committed(tmp_path) == kept


def test_a_misspelt_metric_to_keep_the_best_by_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(tmp_path, CheckpointSection.model_validate({"every": 1, "keep_best": {"metric": "reward/men"}}))
    with caplog.at_level(logging.WARNING):
        run(saver, range(1, 5), {step: 0.0 for step in range(1, 5)})
    assert [record.message for record in caplog.records if "keep_best" in record.message] == [
        "checkpoint.keep_best.metric: no checkpoint has a metric `reward/men`, so none is kept for it; did you mean `reward/mean`?"
    ]
    saver = Saver(tmp_path, CheckpointSection.model_validate({"keep_best": {"metric": "eval/gredy/accuracy"}}))
    with pytest.raises(UserError, match="don't measure; did you mean `eval/greedy/accuracy`"):
        saver.check_metrics(["eval/greedy/accuracy", "eval/greedy/count"])
    with pytest.raises(UserError, match="it makes none"):
        saver.check_metrics([])


def test_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    saver = Saver(tmp_path, CheckpointSection(every_minutes=2.0))
    due = []
    for step in range(1, 8):
        clock[0] += 50.0
        if saver.is_due(step):
            due.append(step)
            saver.save(step, tree(step), {})
    saver.finish()
    assert due == [3, 6]


def test_a_slow_save_holds_nobody_up_and_saves_what_was_there(tmp_path: Path) -> None:
    """The arrays are donated and the tree changed while the save is stuck: what is written is what they were."""
    release = threading.Event()
    original = store.write

    def slow(*args: Any) -> Path:
        assert release.wait(30)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", slow)
        saver, state, counts = Saver(tmp_path), tree(1), np.ones(3, np.int32)
        saver.save(1, {**state, "counts": counts}, {})
        counts += 1
        jax.block_until_ready(jax.jit(lambda t: {"w": t["w"] + 1.0}, donate_argnums=0)(state))
        assert (store.committed(tmp_path), saver.newest_step, saver.committed_step) == ([], 1, 0)
        release.set()
        saver.finish()
    kept = store.read(tmp_path, 1, {"w": jnp.zeros(3), "counts": jnp.zeros(3, jnp.int32)})[0]
    assert {name: leaf.tolist() for name, leaf in kept.items()} == {"w": [1.0] * 3, "counts": [1] * 3}


def test_b103_a_failed_save_is_reported_counted_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(tmp_path, CheckpointSection(every=2))
    with caplog.at_level(logging.WARNING), faults.armed("save.after_arrays@step=4:raise"):
        run(saver, range(1, 4))
        saver.save(4, tree(4), {})
        saver._wait()
        assert store.committed(tmp_path) == [2] and saved(tmp_path, 2) == 2.0, "the old one is intact"
        assert saver.is_due(5), "not only at the next multiple"
        run(saver, range(5, 6))
    assert "step 4 could not be saved (try 1): InjectedFault" in caplog.text
    assert store.committed(tmp_path) == [2, 5]
    metrics = saver.take_metrics()
    assert (metrics["checkpoint/failed_saves"].total, metrics["checkpoint/saves"].total) == (1.0, 2.0)
    assert saver.take_metrics() == {}


def test_the_last_save_is_tried_again_by_itself(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    with faults.armed("save.after_arrays@step=7@p=.5:raise", seed=6):
        saver.save(7, tree(7), {})
        saver.finish()
        assert faults.fired() == {"save.after_arrays": 1}
    assert saved(tmp_path, 7) == 7.0


def test_b133_a_last_save_that_fails_is_no_success(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    run(saver, range(0))
    saver.save(1, tree(1), {})
    saver.finish()
    with faults.armed("save.after_arrays@step=2:raise"):
        saver.save(2, tree(2), {})
        with pytest.raises(CheckpointError, match="step 2 could not be saved.*injected.*step 1 is the last that is"):
            saver.finish()


def test_b103_a_run_that_cant_save_ends(tmp_path: Path) -> None:
    saver = Saver(tmp_path, CheckpointSection(every=1))
    with faults.armed("save.before_arrays:raise"), pytest.raises(CheckpointError, match="3 saves to .* failed in a row"):
        run(saver, range(1, 5))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a file system isn't allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_b103_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noise, which no compression makes smaller: 3 MiB fit once, not twice; with room again it goes on."""
    noise = {"w": jax.random.normal(jax.random.key(0), (768, 1024))}
    saver = Saver(small_disk, CheckpointSection(every=1))
    saver.save(1, noise, {})
    saver._wait()
    with caplog.at_level(logging.WARNING):
        saver.save(2, noise, {})
        saver._wait()
    assert "step 2 could not be saved (try 1)" in caplog.text and "space" in caplog.text.lower()
    assert store.newest_intact(small_disk) == 1
    store.delete(small_disk, 1)
    assert saver.is_due(3)
    saver.save(3, noise, {})
    saver.finish()
    assert store.committed(small_disk) == [3]


def test_r07_where_nothing_can_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "checkpoints", tmp_path / ("n" * 300), Path("/proc/checkpoints")):
        with pytest.raises(UserError, match="checkpoints can't be written to"):
            Saver(bad)


def test_leftovers_of_a_killed_process_go(tmp_path: Path) -> None:
    for name in ("3.partial", "1.deleting", "9.set-aside"):
        (tmp_path / name).mkdir(parents=True)
    Saver(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["9.set-aside"]
