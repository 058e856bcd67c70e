"""Runs killed and stopped at uniformly random times, again and again, against the run that nothing happened to. `make soak`."""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from burnish.checkpoint import store
from tests.cli.runs import LORA, finish, outcome, start_train, write_task
from tests.soak.settings import KILLS, RUNS, SIGTERMS, record

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(7200)]

STEPS, SEED = 20, 1
LONG = max(STEPS, KILLS + KILLS // 5, 3 * SIGTERMS)
"""Steps of a run that is ended again and again: at most two are made between two ends, and most early ends come before any."""
SLOW_GRADE = """
import time

def hits(completions, answer):
    time.sleep(1.0)
    return [text.count(gold) + 0.01 * len(text) for text, gold in zip(completions, answer)]
"""
"""A step takes about a second, so that every kill finds a run that is still going on."""


def start(task: Path, run: str, steps: int = STEPS) -> subprocess.Popen[str]:
    folder = task.parent / "runs"
    resume = ["--resume"] if (folder / run).is_dir() else []
    return start_train(task, *LORA, f"training.max_steps={steps}", "checkpoint.every=1", f"run.folder={folder}", f"run.name={run}", *resume)


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
    """Until another step is committed than were when it started. However busy the machine is, an end after that costs few steps."""
    before, deadline = newest(task, run), time.monotonic() + 200
    while newest(task, run) == before:
        assert child.poll() is None and time.monotonic() < deadline, finish(child)
        time.sleep(0.02)


def newest(task: Path, run: str) -> int:
    return max(store.committed(checkpoints(task, run)), default=0)


def steps_made(task: Path, run: str) -> int:
    """Of which there is a row of metrics."""
    metrics = task.parent / "runs" / run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    task = write_task(tmp_path_factory.mktemp("kills"), model_folder)
    (task.parent / "grade.py").write_text(SLOW_GRADE)
    return task


Unbroken = Callable[[int], tuple[Mapping[str, Any], float]]


@pytest.fixture(scope="module")
def unbroken(task: Path) -> Unbroken:
    """Of so many steps: its outcome, and how many seconds it takes with programs compiled."""
    assert outlives(start(task, "compiles", 1), 300)
    made: dict[int, tuple[Mapping[str, Any], float]] = {}

    def run(steps: int) -> tuple[Mapping[str, Any], float]:
        if steps not in made:
            begun = time.monotonic()
            assert outlives(start(task, f"unbroken-{steps}", steps), 120 + 5 * steps)
            made[steps] = outcome(task.parent / "runs" / f"unbroken-{steps}"), time.monotonic() - begun
        return made[steps]

    return run


def test_r01_one_run_killed_again_and_again(task: Path, unbroken: Unbroken) -> None:
    whole, _ = unbroken(LONG)
    moments = random.Random(SEED)
    early, redone, until_a_step = 0, list[int](), list[float]()
    for kill in range(KILLS):
        child, begun = start(task, "killed", LONG), time.monotonic()
        if moments.random() < 0.6:
            early += 1
            wait_for_lines(child, moments.randint(0, len(BUILDING)))
            pause = moments.uniform(0.0, 0.5)
        else:
            wait_for_progress(task, "killed", child)
            until_a_step.append(time.monotonic() - begun)
            pause = moments.uniform(0.0, 0.9)
        assert not outlives(child, pause), f"finished before kill {kill + 1}: take another SEED"
        redone.append(max(0, steps_made(task, "killed") - newest(task, "killed")))
    assert outlives(start(task, "killed", LONG), 120 + 5 * LONG)
    assert outcome(task.parent / "runs" / "killed") == whole
    assert max(redone) <= 1, "a checkpoint is due after each step, and the next is begun while it is written"
    ended = f"bitwise equal; {sum(redone)} steps redone, at most {max(redone)} a kill"
    if until_a_step:
        ended += f"; {statistics.median(until_a_step):.1f} s from a restart to its first step on disk (median)"
    record("R01", f"{KILLS} kills of one run, {early} of them before its first step since the start; {LONG} steps", ended)


def test_r01_runs_killed_once(task: Path, unbroken: Unbroken) -> None:
    whole, seconds = unbroken(STEPS)
    moments = random.Random(SEED + 1)
    killed = 0
    for number in range(RUNS):
        run = f"once-{number}"
        if not outlives(start(task, run), moments.uniform(0.0, seconds)):
            killed += 1
            assert outlives(start(task, run), 120 + 5 * STEPS)
        assert outcome(task.parent / "runs" / run) == whole, f"{run} of seed {SEED + 1}"
    assert killed >= RUNS // 2
    record("R01", f"{RUNS} runs, each killed once, at a time uniform over its length; {STEPS} steps", f"{RUNS} of {RUNS} bitwise equal")


def test_a_run_stopped_by_sigterm_again_and_again(task: Path, unbroken: Unbroken) -> None:
    """The exit code that asks to be started again, the last whole step saved, and the same run in the end."""
    whole, _ = unbroken(LONG)
    moments = random.Random(SEED + 2)
    leaving = list[float]()
    for number in range(SIGTERMS):
        child = start(task, "stopped", LONG)
        wait_for_progress(task, "stopped", child)
        time.sleep(moments.uniform(0.0, 0.9))
        begun = time.monotonic()
        child.send_signal(signal.SIGTERM)
        code, _, err = finish(child)
        leaving.append(time.monotonic() - begun)
        assert code == 75, (number, err)
        assert steps_made(task, "stopped") == newest(task, "stopped"), "nothing is redone after a stop"
    assert outlives(start(task, "stopped", LONG), 120 + 5 * LONG)
    assert outcome(task.parent / "runs" / "stopped") == whole
    ended = f"bitwise equal; exit code 75 each time, no step redone; {statistics.median(leaving):.1f} s from signal to exit (median)"
    record("R01", f"{SIGTERMS} SIGTERMs to one run, {LONG} steps", ended)
