"""Warnings: each rule fires on its own trouble and nowhere else, the cause stands before what follows from it, words match numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.observe.health import HealthSink, diagnose
from burnish.observe.run_folder import RunFolder
from burnish.observe.sinks import StepReport

WELL = {
    "reward/mean": 0.4,
    "group/zero_std_fraction": 0.3,
    "policy/entropy": 1.2,
    "policy/kl": 0.01,
    "stop/length": 6.0,
    "stop/stop_id": 58.0,
    "status/ok": 64.0,
    "mismatch/mean": 0.004,
    "mismatch/max": 0.1,
    "mismatch/ess": 0.99,
    "staleness/mean": 0.0,
    "policy/clip_low_fraction": 0.0,
    "policy/clip_high_fraction": 0.01,
    "optim/grad_norm": 0.3,
    "perf/step_seconds": 10.0,
    "length/sampled_mean": 20.0,
}


def history(steps: int = 12, **changes: Any) -> list[dict[str, float]]:
    """A run that goes well but for `changes`: values, or functions of the step from 0 to 1. `__` stands for `/`."""
    rows = []
    for i in range(steps):
        x = i / (steps - 1)
        moved = {k.replace("__", "/"): v(x) if callable(v) else v for k, v in changes.items()}
        rows.append({**WELL, "reward/mean": 0.2 + 0.5 * x + 0.01 * (i % 3), **moved})
    return rows


def test_a_run_that_goes_well_has_no_warning() -> None:
    assert diagnose(history()) == [] and diagnose(history(40)) == [] and diagnose([]) == []


@pytest.mark.parametrize(
    ("name", "severity", "changes"),
    [
        ("no signal", 3, {"group__zero_std_fraction": 0.93}),
        ("no signal", 2, {"group__zero_std_fraction": 0.75}),
        ("entropy collapses", 3, {"policy__entropy": lambda x: 1.2 * 0.001**x}),
        ("sampler is stale", 2, {"staleness__mean": 3.0, "mismatch__ess": 0.4, "mismatch__mean": 0.3}),
        ("sampler is stale", 3, {"staleness__mean": 3.0, "mismatch__ess": 0.1, "mismatch__mean": 0.9}),
        ("cut at the limit", 3, {"stop__length": 64.0, "stop__stop_id": 0.0}),
        ("cut at the limit", 2, {"stop__length": 34.0, "stop__stop_id": 30.0}),
        ("graders fail", 3, {"status__grader_error": 64.0, "status__ok": 0.0}),
        ("graders fail", 2, {"status__grader_error": 16.0, "status__ok": 48.0}),
        ("environments fail", 2, {"status__env_error": 8.0, "status__env_timeout": 8.0, "status__ok": 48.0}),
        ("KL diverges", 3, {"policy__kl": lambda x: 0.01 + 4 * x}),
        ("mismatch", 2, {"mismatch__mean": 0.06}),
        ("clipped", 2, {"policy__clip_high_fraction": 0.4}),
        ("not finite", 3, {"optim__grad_norm": math.nan, "optim__skipped_updates": 1.0}),
    ],
)
def test_each_trouble_is_named(name: str, severity: int, changes: dict[str, Any]) -> None:
    found = diagnose(history(**changes))
    assert [(w.name, w.severity) for w in found] == [(name, severity)]
    assert found[0].evidence and found[0].advice and not found[0].text.endswith(".")


def test_slow_troubles_need_a_long_run() -> None:
    flat = {"reward__mean": lambda x: 0.3 + 0.02 * math.sin(50 * x)}
    assert diagnose(history(12, **flat)) == []
    assert [w.name for w in diagnose(history(30, **flat))] == ["reward is flat"]
    assert [w.name for w in diagnose(history(30, reward__mean=lambda x: 0.6 - 0.5 * x))] == ["reward falls"]
    slower = {"perf__step_seconds": lambda x: 10 + 10 * x}
    assert [w.name for w in diagnose(history(30, **slower))] == ["slower"]
    longer = {"length__sampled_mean": lambda x: 20 + 30 * x}
    assert diagnose(history(30, **slower, **longer)) == [], "longer answers take longer"


def test_the_words_hold_the_numbers_and_the_worst_comes_first() -> None:
    found = diagnose(history(group__zero_std_fraction=0.93, stop__length=40.0, stop__stop_id=24.0, reward__mean=1.0))
    assert [(w.name, w.severity) for w in found] == [("no signal", 3), ("cut at the limit", 2)]
    assert "in 93 % of the groups all rewards are equal" in found[0].text and "62 % of the completions" in found[1].text
    assert found[0].evidence == {"group/zero_std_fraction": pytest.approx(0.93), "reward/mean": 1.0}


def test_what_follows_from_another_never_stands_before_it() -> None:
    stale = {"staleness__mean": 3.0, "mismatch__ess": 0.4, "mismatch__mean": 0.3}
    collapse, divergence = {"policy__entropy": lambda x: 1.2 * 0.001**x}, {"policy__kl": lambda x: 0.01 + 4 * x}
    found = diagnose(history(**stale, **collapse, **divergence))
    assert [(w.name, w.severity) for w in found] == [("sampler is stale", 2), ("KL diverges", 3), ("entropy collapses", 3)]
    mild = {"policy__entropy": lambda x: 1.2 - 1.1 * min(1.0, 2 * x), "group__zero_std_fraction": 0.95}
    assert [(w.name, w.severity) for w in diagnose(history(**mild))] == [("entropy collapses", 2), ("no signal", 3)]
    names = [w.name for w in diagnose(history(**stale, group__zero_std_fraction=0.95))]
    assert names == ["no signal", "sampler is stale"], "equal rewards don't come of stale tokens"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path, "a") as opened:
        yield opened


def said(folder: RunFolder) -> list[tuple[int, str, str]]:
    lines = folder.health_path.read_text().splitlines() if folder.health_path.is_file() else []
    return [(line["step"], line["state"], line["name"]) for line in map(json.loads, lines)]


def test_a_warning_is_written_once_and_so_is_its_end_also_after_going_on(folder: RunFolder) -> None:
    rows = [*history(6), *history(8, group__zero_std_fraction=1.0), *history(5)]
    rows = [row | {"reward/mean": 0.1 * i} for i, row in enumerate(rows)]
    sink = HealthSink(folder)
    with folder.metrics_path.open("w") as file:
        for step, row in enumerate(rows, start=1):
            sink.step(StepReport(step, len(rows), row))
            file.write(json.dumps({"step": step, **row}) + "\n")
    whole = said(folder)
    assert [entry[1:] for entry in whole] == [("begins", "no signal"), ("is over", "no signal")]
    again = HealthSink(folder)
    again.rewind(12)
    assert said(folder) == whole[:1]
    for step, row in enumerate(rows[12:], start=13):
        again.step(StepReport(step, len(rows), row))
    assert said(folder) == whole
