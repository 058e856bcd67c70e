"""`burnish train` in two processes: who writes, how a signal, a failure or a death in one of them ends both, and what goes on then."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.checkpoint import store
from burnish.observe.run_folder import read_status
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import write_task
from tests.distributed.processes import LIMIT_S, finish, free_port, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLOW_GRADE = """
import time

def hits(completions, answer):
    time.sleep(0.3)
    return [text.count(gold) + 0.01 * len(text) for text, gold in zip(completions, answer)]
"""
PPO = ["algorithm.name=ppo", "algorithm.num_generations=2", "training.compare=false", "checkpoint.every=1", "reward_model.weight=0.5"]
ENDLESS = ["model.lora={rank: 2, targets: [q, v]}", "training.compare=false", "training.max_steps=1000"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(model, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    task = write_task(tmp_path_factory.mktemp("task"), model)
    (task.parent / "grade.py").write_text(SLOW_GRADE)
    write_tiny_model(task.parent / "judge", config=tiny_config(width=16), alphabet="0123456789", classifier=True, seed=1)
    return task


def command(task: Path, run: str, *more: str) -> list[str]:
    judge = [f"reward_model.path={task.parent / 'judge'}"] if "algorithm.name=ppo" in more else []
    return ["-m", "burnish", "train", str(task), f"run.folder={task.parent / 'runs'}", f"run.name={run}", *judge, *more]


def start_both(task: Path, run: str, *more: str, faults: tuple[str, str] = ("", "")) -> list[subprocess.Popen[str]]:
    whole = [
        "cluster.actor.axes={data: 4}",
        f"cluster.distributed.coordinator=127.0.0.1:{free_port()}",
        "cluster.distributed.num_processes=2",
    ]
    whole += [f"cluster.distributed.heartbeat_timeout_s={LIMIT_S}", *more]
    return [start(command(task, run, *whole, f"cluster.distributed.process_id={i}"), faults=faults[i]) for i in (0, 1)]


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert all(process.poll() is None for process in processes), finish(processes)
        assert time.monotonic() < deadline, "nothing has happened for 100 s"
        time.sleep(0.05)


def has_made(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: (folder / "metrics.jsonl").is_file() and len((folder / "metrics.jsonl").read_text().splitlines()) >= step


def rows(folder: Path) -> dict[str, list[Any]]:
    """Of each step the prompts, in order, and what was sampled and paid for them."""
    found = {}
    for path in sorted((folder / "transcripts").glob("step_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name] = [(line["prompt_id"], line["messages"], line["reward"]) for line in lines]
    return found


def measured(folder: Path) -> list[list[float]]:
    names = ("policy/loss", "critic/loss", "reward/mean", "reward_model/scored", "stop/length", "length/sampled_mean")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in names] for line in lines]


def test_ppo_stopped_in_two_processes_goes_on_in_one(task: Path) -> None:
    """SIGTERM comes to the second process only: both end at the same step, saved, and one process makes the steps that are left."""
    runs = task.parent / "runs"
    processes = start_both(task, "broken", *PPO, "training.max_steps=6")
    wait_until(has_made(runs / "broken", 2), processes)
    processes[1].send_signal(signal.SIGTERM)
    (code, out, err), (other_code, other_out, other_err) = finish(processes)
    assert (code, other_code) == (75, 75), (err, other_err)
    assert "stopped by SIGTERM after step" in err and "stopped by" not in other_err.replace("SIGTERM: stopping", "")
    assert "steps" not in other_out and "algorithm" in out, "the display is the first process's"
    done = store.committed(runs / "broken" / "checkpoints")[-1]
    assert 2 <= done < 6
    assert read_status(runs / "broken")["exit_code"] == 75
    kept = yaml.safe_load((runs / "broken" / "config.yaml").read_text())["cluster"]["distributed"]
    assert (kept["num_processes"], kept["process_id"]) == (2, None), "which process has written it is no part of the run"
    [(code, _, err)] = finish([start(command(task, "broken", *PPO, "training.max_steps=6", "--resume"), devices=1)])
    assert code == 0, err
    [(code, _, err)] = finish([start(command(task, "whole", *PPO, "training.max_steps=6"), devices=1)])
    assert code == 0, err
    assert rows(runs / "broken") == rows(runs / "whole") and len(rows(runs / "whole")) == 6
    for found, expected in zip(measured(runs / "broken"), measured(runs / "whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_death_ends_the_others_within_the_limit(task: Path) -> None:
    folder = task.parent / "runs" / "second"
    processes = start_both(task, "second", *ENDLESS)
    wait_until(has_made(folder, 1), processes)
    processes[1].kill()
    killed = time.monotonic()
    (code, _, err), _ = finish(processes)
    print(f"process 0 ended {time.monotonic() - killed:.1f} s after the death of process 1")
    assert time.monotonic() - killed < LIMIT_S + 1
    assert code == 1 and "error: process 1 of 2 is gone (no word for" in err
    assert "process 1 of 2 is gone" in read_status(folder)["cause"]


def test_the_death_of_the_first_ends_the_others_at_once(task: Path) -> None:
    folder = task.parent / "runs" / "first"
    processes = start_both(task, "first", *ENDLESS)
    wait_until(has_made(folder, 1), processes)
    processes[0].kill()
    killed = time.monotonic()
    _, (code, _, err) = finish(processes)
    print(f"process 1 ended {time.monotonic() - killed:.1f} s after the death of process 0")
    assert time.monotonic() - killed < LIMIT_S + 1
    assert code != 0 and ("process 0 of 2 is gone" in err or "another task died" in err), err
    assert "was killed" in read_status(folder)["cause"]


def test_a_failure_in_one_process_is_named_by_the_other(task: Path) -> None:
    processes = start_both(task, "failing", *ENDLESS, faults=("", "engine.commit@version=2:raise"))
    (code, _, err), (other_code, _, other_err) = finish(processes)
    assert (code, other_code) == (1, 1), (err, other_err)
    assert "error: process 1 of 2 has failed, so this one ends: " in err and "engine.commit" in err
    assert "process 1 of 2 has failed" in read_status(task.parent / "runs" / "failing")["cause"]
