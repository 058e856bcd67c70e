"""Durations and deadlines are measured by a clock that nobody sets."""

import ast
import time
from pathlib import Path

import pytest

from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import make_learner

ROOT = Path(__file__).resolve().parents[1]
DATED = {
    "observe/run_folder.py",
    "observe/telemetry.py",
    "observe/trace_writer.py",
    "observe/trackers.py",
    "rollout/server/openai_api.py",
    "text/chat.py",
}
"""Where the wall clock is asked, because what is written, or what a template asks for, is a date."""
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def asks_the_wall_clock(module: ast.Module) -> bool:
    attributes = (node for node in ast.walk(module) if isinstance(node, ast.Attribute))
    return any(isinstance(node.value, ast.Name | ast.Attribute) and (_last(node.value), node.attr) in WALL for node in attributes)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def test_r56_the_wall_clock_is_asked_for_dates_only() -> None:
    modules = {path.relative_to(ROOT / "burnish").as_posix(): path for path in (ROOT / "burnish").rglob("*.py")}
    assert {name for name, path in modules.items() if asks_the_wall_clock(ast.parse(path.read_text(encoding="utf-8")))} == DATED


@pytest.mark.slow
def test_r56_a_clock_that_jumps_an_hour_either_way_changes_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    clock, jumps = time.time, iter([0.0, -3600.0, 3600.0] * 1000)
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    history = make_learner(tmp_path, training={"max_steps": 3}).train().history
    assert len(history) == 3
    for metrics in history:
        durations = [value for name, value in metrics.items() if name.startswith("time/")]
        assert durations and all(0 <= seconds < 600 for seconds in durations)
        assert not [name for name in metrics if "timeout" in name and metrics[name] > 0]
