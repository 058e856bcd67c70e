"""The display: the right numbers in words, on a terminal and in a log, and sampled text that can't act on the terminal."""

import io
import math

from burnish.observe.display import ProgressSink, sparkline
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
