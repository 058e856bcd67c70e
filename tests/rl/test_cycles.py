"""Learners begun and ended, one after the other in one process, leave nothing behind."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest

from burnish import GRPOLearner, RolloutConfig, TrainingConfig
from burnish.agentic.processes import descendants
from burnish.config.schema import RunSection
from burnish.models.model import Model
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.agentic.worlds import exact_and_pid
from tests.soak.settings import CYCLES, record

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(4)]


def cycle(model: Model, seed: int) -> None:
    """A whole run of one step, its rewards in a worker process."""
    training = TrainingConfig(max_steps=1, batch_size=2, compare=False, head_chunk=64)
    rollout = RolloutConfig(max_prompt_tokens=12, slots=4, sampling={"max_tokens": 4})  # type: ignore[arg-type]
    learner = GRPOLearner(model, reward_fns=[exact_and_pid], train_ds=ROWS, training=training, rollout=rollout, run=RunSection(seed=seed))
    assert learner.train().steps == 1


def held() -> tuple[int, int, int]:
    """Threads, open files and descendants of this process, once what was let go is gone."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(descendants(os.getpid()))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cycles", [2, pytest.param(CYCLES, marks=pytest.mark.soak, id="soak")])
def test_r35_learners_leave_no_file_thread_child_or_memory(tmp_path: Path, cycles: int) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    model, warm, begun = Model.load(tmp_path), max(2, cycles // 10), time.monotonic()
    for index in range(warm):
        cycle(model, index)
    before, memory = held(), resident_mib()
    for index in range(cycles):
        cycle(model, warm + index)
    deadline = time.monotonic() + 60
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)  # threads of a pool end by themselves
    after, grown = held(), resident_mib() - memory
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    if cycles > 20:
        assert grown < 50
        ended = f"threads, files, children {before} → {after}; memory {grown:+.0f} MiB; {time.monotonic() - begun:.0f} s"
        record("R35", f"{cycles} learners begun, trained a step and ended in one process, after {warm} others", ended)
