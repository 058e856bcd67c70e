"""R64: half an hour in which everything goes wrong at five percent, and all of it is in the counters."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.runs import LORA, start_train, write_task
from tests.soak.settings import MINUTES, record

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

WORLD = """
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult

class World(BaseTaskEnv):
    def _initial_observation(self):
        return list(self.task["prompt"])

    def _step_impl(self, action):
        return EnvStepResult("", None, True)

    def close(self):
        pass
"""
GRADE = """
def hits(completions, answer):
    return [sum(map(ord, text)) / 100 + text.count(gold) for text, gold in zip(completions, answer)]
"""
"""Of a random model's answers hardly any two are alike, so that no update is skipped for want of a signal."""
FAULTS = (
    "update.nonfinite@p=.05:flag,reward@p=.05:hang,env.step@p=.05:raise,env.reset@p=.05:kill,episode.lost@p=.05:flag,"
    "engine.push@leaf=adapter.q.a@p=.05:raise"
)
SETTINGS = [
    *LORA,
    "environment.env=./world.py:World",
    "environment.limits={lost_after_s: 8, step_timeout_s: 60, max_worker_deaths: null}",
    "algorithm.num_generations=4",
    "training.batch_size=8",
    "training.max_nonfinite_updates=10",
    "rewards=[{fn: './grade.py:hits', timeout_s: 5}]",
    "checkpoint.every=5",
]
SHARE = 0.8


def run(task: Path, name: str, steps: int, faults: str = "") -> tuple[list[dict[str, float]], str, float]:
    """Metrics of every step, what was said on standard error, seconds."""
    folder, begun = task.parent / "runs", time.monotonic()
    child = start_train(task, *SETTINGS, f"training.max_steps={steps}", f"run.folder={folder}", f"run.name={name}", faults=faults)
    try:
        out, err = child.communicate(timeout=3 * 3600)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    assert child.returncode == 0, err[-5000:]
    assert not left_behind(child.pid), "processes of the run outlive it"
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return rows, err, time.monotonic() - begun


def left_behind(pid: int) -> list[str]:
    """Processes that name the run's process as their parent; one that has ended has none."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == pid]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1


def total(rows: list[dict[str, float]], name: str) -> int:
    return round(math.fsum(row.get(name, 0.0) for row in rows))


def test_r64_mixed_faults_at_five_percent(tmp_path: Path, model_folder: Path) -> None:
    task = write_task(tmp_path / "task", model_folder)
    (task.parent / "world.py").write_text(WORLD)
    (task.parent / "grade.py").write_text(GRADE)
    steps, rows, said, seconds = 8, list[dict[str, float]](), "", 0.0
    clean = statistics.median(row["perf/step_seconds"] for row in run(task, "clean", steps)[0])
    for part in range(1000):  # each is as long as what is left, as far as is known
        more, err, took = run(task, f"faulty-{part}", steps, FAULTS)
        rows, said, seconds = rows + more, said + err, seconds + took
        left = MINUTES * 60 - seconds
        if left <= 0:
            break
        steps = max(8, int(left / (took / steps)))
    injected = Counter(re.findall(r"burnish fault: \w+ at ([\w.]+)", said))
    assert set(injected) == {rule.partition("@")[0] for rule in FAULTS.split(",")}, injected
    # Each strike is in a counter or a warning, and nothing else is.
    assert total(rows, "optim/skipped_updates") == injected["update.nonfinite"]
    assert said.count("failed and is made again") == injected["engine.push"]
    alone = said.count("each of its samples is graded alone")
    assert alone + total(rows, "status/grader_error") == injected["reward"]
    episodes = sum(injected[point] for point in ("env.step", "env.reset", "episode.lost"))
    assert total(rows, "episode/lost") + total(rows, "status/env_error") == episodes
    played = sum(total(rows, f"status/{status}") for status in ("ok", "truncated", "env_error", "env_timeout", "grader_error", "aborted"))
    # What of the work was worth something: samples that were drawn and trained on, in an update that was applied.
    trained = sum((row.get("status/ok", 0) + row.get("status/truncated", 0)) for row in rows if not row.get("optim/skipped_updates"))
    goodput = trained / played
    struck = ", ".join(f"{point} {count}" for point, count in sorted(injected.items()))
    slower = statistics.fmean(row["perf/step_seconds"] for row in rows) / clean
    ended = f"complete; injected = reported ({struck}); goodput {goodput:.0%} of {played} samples; steps {slower:.1f} × as long"
    assert goodput >= SHARE or MINUTES < 5, ended
    record("R64", f"{seconds / 60:.0f} minutes of mixed faults at 5 % each, {len(rows)} steps", ended)
