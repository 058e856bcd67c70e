"""The display: the right numbers in words, on a terminal and in a log, and sampled text that can't act on the terminal."""

import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from burnish.observe.display import ProgressSink
from burnish.observe.panel import Progress, clock, panel, sparkline
from burnish.observe.sinks import AFTER, BEFORE, EvalReport, StepReport
from burnish.types import Group, Prompt
from tests.observe.test_sinks import trajectory

METRICS = {
    "reward/mean": 0.5,
    "perf/step_seconds": 10.0,
    "perf/rollout_tokens_per_second": 812.4,
    "time/rollout_seconds": 6.0,
    "time/update_seconds": 3.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(step: int, text: str = "4") -> StepReport:
    prompt = Prompt("sums:0", ({"role": "user", "content": "2+2?"},))
    return StepReport(step, 30, METRICS, [Group((step, 0), prompt, [trajectory(0, text)])])


def test_plain_output_is_one_line_a_step() -> None:
    stream = io.StringIO()
    sink = ProgressSink(sample_every=5, stream=stream)
    for step in (1, 2):
        sink.step(report(step))
    sink.close()
    assert stream.getvalue().splitlines() == [
        "step 1/30 · reward 0.500 · 812 tokens/s · 10.0 s (rollout 6.0, update 3.5) · ETA 4:50",
        "step 2/30 · reward 0.500 · 812 tokens/s · 10.0 s (rollout 6.0, update 3.5) · ETA 4:40",
    ]


def test_a_sample_with_its_reward_every_few_steps() -> None:
    stream = io.StringIO()
    sink = ProgressSink(sample_every=3, stream=stream)
    for step in range(1, 7):
        sink.step(report(step, text=f"answer of step {step}"))
    shown = stream.getvalue()
    assert [step for step in range(1, 7) if f"answer of step {step}" in shown] == [3, 6]
    assert "sample 0 of prompt sums:0 · reward 1 (ok, stopped by stop_id, 2 tokens)" in shown and "│ > 2+2?" in shown


def test_sampled_text_is_shown_not_obeyed() -> None:
    stream = io.StringIO()
    sink = ProgressSink(sample_every=1, stream=stream)
    sink.step(report(1, text="[bold]x[/bold][/nope] \x1b]0;title\x07\x1b[2J" + "long " * 2000))
    shown = stream.getvalue()
    assert "[bold]x[/bold][/nope]" in shown and "\x1b" not in shown and "\x07" not in shown
    assert len(shown) < 1500 and "characters)" in shown


def test_before_and_after_side_by_side_with_counts() -> None:
    stream = io.StringIO()
    sink = ProgressSink(stream=stream)
    for label, greedy, sampled in ((BEFORE, 0.215, 0.125), ("step 15", 0.4, 0.3), (AFTER, 0.715, 0.7)):
        sink.evaluation(EvalReport(0, label, {"eval/greedy/accuracy": greedy, "eval/greedy/count": 300}))
        sink.evaluation(EvalReport(0, label, {"eval/sampled/accuracy": sampled, "eval/sampled/count": 300}))
    sink.close()
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in stream.getvalue().splitlines() if line.startswith("│")]
    assert rows == [
        ["eval/greedy/accuracy", "21.5 % of 300", "71.5 % of 300", "+50.0 points"],
        ["eval/sampled/accuracy", "12.5 % of 300", "70.0 % of 300", "+57.5 points"],
    ]


def test_terminal_is_redrawn_in_place_and_restored() -> None:
    stream = Terminal()
    sink = ProgressSink(sample_every=2, stream=stream)
    for step in (1, 2, 3):
        sink.step(report(step))
    sink.close()
    shown = stream.getvalue()
    assert "step 3/30" in shown and "\x1b[2K" in shown and "│ > 2+2?" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("step 3/30")  # the cursor is shown again


def test_missing_metrics_and_empty_steps_are_no_error() -> None:
    stream = io.StringIO()
    sink = ProgressSink(sample_every=1, stream=stream)
    sink.step(StepReport(1, 1, {}, []))
    sink.step(StepReport(1, 1, {"reward/mean": math.nan}, [Group((1, 0), Prompt("p", ()), [])]))
    sink.evaluation(EvalReport(1, AFTER, {}))
    sink.close()
    assert stream.getvalue().splitlines()[:2] == ["step 1/1", "step 1/1 · reward nan"]


def test_sparkline_scales_and_survives_nan() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([math.nan, 1.0, math.inf]) == "·▁·"
    assert sparkline([]) == ""


RUN = {
    **METRICS,
    "time/wait_seconds": 2.0,
    "time/score_seconds": 1.0,
    "time/sync_seconds": 0.5,
    "policy/entropy": 1.1,
    "length/sampled_mean": 40.0,
    "staleness/mean": 1.0,
    "queue/waiting": 2.0,
    "memory/host_peak_mib": 2048.0,
}


def progress(steps: int, **changes: float) -> Progress:
    found = Progress(30)
    for step in range(1, steps + 1):
        found.add(step, {**RUN, "reward/mean": step / 30, **{name.replace("__", "/"): value for name, value in changes.items()}})
    return found


def test_the_panel_says_what_the_numbers_say() -> None:
    lines = [line.plain for line in panel(progress(12), width=80)]
    assert lines[0].startswith("━" * 10) and lines[0].endswith("step 12/30  10.0 s a step  ETA 3:00")
    assert lines[1].startswith("reward ▁▂▂▃▄▄▅▅▆▇▇█ 0.4") and "entropy ▁" in lines[1] and "length" not in lines[1]
    assert lines[2] == "trainer   " + "░" * 12 + "▒" * 6 + "█" * 21 + "▓" * 3 + " " * 18
    assert lines[3] == "sampling  " + "█" * 36
    assert lines[4] == "wait 2.0 · score 1.0 · update 3.5 · sync 0.5 · sampling 6.0 s · overlap 40 %"
    assert lines[5] == "812 tokens/s sampled · staleness 1.0 · queue 2 · memory 2.0 GiB"
    assert len(lines) == 6
    sick = [line.plain for line in panel(progress(12, stop__length=64.0), width=80)]
    assert sick[6].startswith("! 100 % of the completions were cut") and max(map(len, sick)) <= 80


def test_a_warning_is_told_once_when_it_begins() -> None:
    stream = io.StringIO()
    sink = ProgressSink(sample_every=100, stream=stream)
    for step in range(1, 12):
        sink.step(StepReport(step, 12, {**METRICS, "stop/length": 64.0 if step > 2 else 0.0, "stop/stop_id": 0.0 if step > 2 else 64.0}))
    sink.close()
    told = [line for line in stream.getvalue().splitlines() if line.startswith("!")]
    assert len(told) == 1 and told[0].startswith("! step 4: 50 % of the completions were cut at their limit")


def test_clock() -> None:
    assert [clock(s) for s in (0, 61, 3600, 7325.9)] == ["0:00", "1:01", "1:00:00", "2:02:05"]


PROGRAM = """
import sys, time
from burnish.observe.display import ProgressSink
from burnish.observe.sinks import StepReport
sink = ProgressSink(sample_every=100)
for step in range(1, 13):
    sink.step(StepReport(step, 30, {**eval(sys.argv[1]), "reward/mean": step / 30}))
    time.sleep(0.02)
sink.close()
"""


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_of_any_width_shows_whole_lines(width: int) -> None:
    """Through a pseudo-terminal: nothing wraps, the last picture has every line, the cursor comes back."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, repr(RUN)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait(30) == 0
    text = shown.decode()
    assert text.rindex("\x1b[?25h") > text.rindex("step 12/30")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    last = plain[max(0, plain.rindex("step 12/30") - width) :].splitlines()
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= width
    assert any(line.startswith("trainer   ░") for line in last) and any(line.startswith("sampling  █") for line in last)
    assert ("length ▁" in plain) == (width == 200), "a wide terminal has room for one more curve"
