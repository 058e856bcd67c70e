"""R01: kill -9 at uniformly random times, restart, and compare with the run that nothing happened to. `make soak`."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from burnish.checkpoint import store
from tests.cli.runs import LORA, finish, outcome, start_train, write_task

pytestmark = [pytest.mark.soak, pytest.mark.slow]

STEPS, KILLS, RUNS, SEED = 20, 20, 10, 1
SLOW_GRADE = """
import time

def hits(completions, answer):
    time.sleep(1.0)
    return [text.count(gold) + 0.01 * len(text) for text, gold in zip(completions, answer)]
"""
"""A step takes about a second, so that twenty kills find a run that is still going on."""


def start(task: Path, run: str, *more: str) -> subprocess.Popen[str]:
    folder = task.parent / "runs"
    resume = ["--resume"] if (folder / run).is_dir() else []
    return start_train(task, *LORA, f"training.max_steps={STEPS}", "checkpoint.every=1", f"run.folder={folder}", f"run.name={run}", *resume)


def checkpoints(task: Path, run: str) -> Path:
    return task.parent / "runs" / run / "checkpoints"


def outlives(child: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it has ended by itself within the time; else it is killed."""
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        assert finish(child)[0] == -signal.SIGKILL
        return False
    code, _, err = finish(child)
    assert code == 0, err
    return True


BUILDING = ("text", "data", "rewards", "algorithm", "model", "cluster")
"""What a run says it has built before its first step, a line each."""


def wait_for_lines(child: subprocess.Popen[str], count: int) -> None:
    """Until it has said so much."""
    assert child.stdout is not None
    for name in BUILDING[:count]:
        line = child.stdout.readline()
        assert line.startswith(name), (line, finish(child))


def wait_for_progress(task: Path, run: str, child: subprocess.Popen[str]) -> None:
    """Until another step is committed than were when it started. However busy the machine is, a kill after that costs few steps."""
    before, deadline = max(store.committed(checkpoints(task, run)), default=0), time.monotonic() + 100
    while max(store.committed(checkpoints(task, run)), default=0) == before:
        assert child.poll() is None and time.monotonic() < deadline, finish(child)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    task = write_task(tmp_path_factory.mktemp("kills"), model_folder)
    (task.parent / "grade.py").write_text(SLOW_GRADE)
    return task


@pytest.fixture(scope="module")
def unbroken(task: Path) -> tuple[Mapping[str, Any], float]:
    """Its outcome, and how many seconds it takes with programs compiled."""
    assert outlives(start(task, "compiles"), 100)
    begun = time.monotonic()
    assert outlives(start(task, "unbroken"), 100)
    return outcome(task.parent / "runs" / "unbroken"), time.monotonic() - begun


@pytest.mark.timeout(1200)
def test_r01_one_run_killed_twenty_times(task: Path, unbroken: tuple[Mapping[str, Any], float]) -> None:
    whole, _ = unbroken
    moments = random.Random(SEED)
    early = 0
    for kill in range(KILLS):
        child = start(task, "killed")
        if moments.random() < 0.6:
            early += 1
            wait_for_lines(child, moments.randint(0, len(BUILDING)))
            pause = moments.uniform(0.0, 0.5)
        else:
            wait_for_progress(task, "killed", child)
            pause = moments.uniform(0.0, 0.9)
        assert not outlives(child, pause), f"finished before kill {kill + 1}: take another SEED"
    print(f"killed {early} times before a step, {KILLS - early} after one; then at step {store.committed(checkpoints(task, 'killed'))}")
    assert outlives(start(task, "killed"), 100)
    assert outcome(task.parent / "runs" / "killed") == whole


@pytest.mark.timeout(1200)
def test_r01_ten_runs_killed_once(task: Path, unbroken: tuple[Mapping[str, Any], float]) -> None:
    whole, seconds = unbroken
    moments = random.Random(SEED + 1)
    killed = 0
    for number in range(RUNS):
        run = f"once-{number}"
        if not outlives(start(task, run), moments.uniform(0.0, seconds)):
            killed += 1
            assert outlives(start(task, run), 100)
        assert outcome(task.parent / "runs" / run) == whole, f"{run} of seed {SEED + 1}"
    assert killed >= RUNS // 2
