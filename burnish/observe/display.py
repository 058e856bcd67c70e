"""What a person sees while a run goes on: progress, a sampled completion now and then, and before/after side by side at the end.

Owns presentation only; every number comes from the reports. On a terminal a block of a few lines is redrawn in place; elsewhere (a log,
CI, a notebook) each step is one line. Sampled text is data: markup and control characters in it are shown, never obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from burnish.observe.panel import Progress, clock, panel
from burnish.observe.sinks import AFTER, BEFORE, EvalReport, StepReport
from burnish.types import Trajectory

SAMPLE_CHARACTERS = 600


class ProgressSink:
    """Draws the progress of a run on `stream` (standard output by default).

    sample_every: show one completion with its reward every so many steps. live: redraw in place when the stream is a terminal.
    """

    def __init__(self, *, sample_every: int = 5, live: bool = True, stream: TextIO | None = None) -> None:
        out = sys.stdout if stream is None else stream
        self._console = Console(file=out, highlight=False, width=None if out.isatty() else 140)
        self._live = Live(console=self._console, refresh_per_second=4) if live and out.isatty() else None
        self._sample_every = sample_every
        self._progress = Progress(0)
        self._warned: set[str] = set()
        self._evaluations: dict[str, dict[str, float]] = {}

    def step(self, report: StepReport) -> None:
        self._progress.max_steps = report.max_steps
        self._progress.add(report.step, report.metrics)
        if self._live is None:
            self._print(Text(step_line(report, eta_s=self._progress.eta_s)))
        else:
            self._live.start()  # does nothing when it is started already
            self._live.update(Group(*panel(self._progress, width=self._console.width)))
        standing = {warning.name: warning for warning in self._progress.warnings()}
        for name in standing.keys() - self._warned:
            self._print(Text(f"! step {report.step}: {standing[name].line()}"))
        self._warned = {*standing}
        if report.step % self._sample_every == 0:
            for line in sample_lines(report):
                self._print(Text(line))

    def evaluation(self, report: EvalReport) -> None:
        self._evaluations.setdefault(report.label, {}).update(report.metrics)
        numbers = " · ".join(f"{name.removesuffix('/accuracy')} {cell(report.metrics, name)}" for name in shown(report.metrics))
        self._print(Text(f"evaluation {printable(report.label)} (step {report.step}): {numbers}"))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        if {BEFORE, AFTER} <= self._evaluations.keys():
            self._print(comparison(self._evaluations[BEFORE], self._evaluations[AFTER]))
        self._evaluations.clear()

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text))


def step_line(report: StepReport, *, eta_s: float | None) -> str:
    """A step in one line: reward, speed, time by phase, what remains."""
    metrics = report.metrics
    parts = [f"step {report.step}/{report.max_steps}"]
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    elif "policy/loss" in metrics:
        parts.append(f"loss {metrics['policy/loss']:.4f}")
    if "perf/rollout_tokens_per_second" in metrics:
        parts.append(f"{metrics['perf/rollout_tokens_per_second']:.0f} tokens/s")
    elif "perf/row_tokens_per_second" in metrics:
        parts.append(f"{metrics['perf/row_tokens_per_second']:.0f} tokens/s")
    phases = {name[5:-8]: s for name, s in metrics.items() if name.startswith("time/") and name.endswith("_seconds")}
    detail = ", ".join(f"{phase} {s:.1f}" for phase, s in sorted(phases.items(), key=lambda item: -item[1]))
    if "perf/step_seconds" in metrics:
        parts.append(f"{metrics['perf/step_seconds']:.1f} s" + (f" ({detail})" if detail else ""))
    if eta_s is not None:
        parts.append(f"ETA {clock(eta_s)}")
    return " · ".join(parts)


def sample_lines(report: StepReport) -> list[str]:
    """One episode of the step, another group and sample each time: its last prompt message, its text, its reward."""
    if not report.groups:
        return []
    group = report.groups[report.step % len(report.groups)]
    if not group.trajectories:
        return []
    trajectory = group.trajectories[report.step % len(group.trajectories)]
    asked = group.prompt.messages[-1]["content"] if group.prompt.messages else ""
    return [
        f"  ┌ sample {trajectory.sample} of prompt {printable(group.prompt.id)} · {_verdict(trajectory)}",
        *(f"  │ > {line}" for line in _excerpt(asked)),
        *(f"  │ {line}" for line in _excerpt(trajectory.final_text)),
        "  └",
    ]


def comparison(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Both evaluations side by side, with the change."""
    table = Table("held-out tasks", "before", "after", "change", title="before and after")
    for name in shown({**before, **after}):
        row = [printable(name), cell(before, name), cell(after, name)]
        if name in before and name in after:
            change = after[name] - before[name]
            row.append(f"{100 * change:+.1f} points" if name.endswith("/accuracy") else f"{change:+.3g}")
        table.add_row(*(Text(text) for text in row))
    return table


def shown(metrics: Mapping[str, float]) -> list[str]:
    """Evaluation metrics worth a row; counts appear in the cells of what they count."""
    return [name for name in sorted(metrics) if not name.endswith("/count")]


def cell(metrics: Mapping[str, float], name: str) -> str:
    """A metric for people: `71.5 % of 300` for an accuracy over 300 tasks."""
    if name not in metrics:
        return "–"
    if not name.endswith("/accuracy"):
        return f"{metrics[name]:.4g}"
    count = metrics.get(name.removesuffix("accuracy") + "count")
    return f"{100 * metrics[name]:.1f} %" + (f" of {count:.0f}" if count is not None else "")


def printable(text: str) -> str:
    """`text` without anything that a terminal would act on."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _excerpt(text: str) -> list[str]:
    short = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} … ({len(text)} characters)"
    return printable(short).split("\n")


def _verdict(trajectory: Trajectory) -> str:
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    stops = f", stopped by {trajectory.steps[-1].completion.stop}" if trajectory.steps else ""
    return f"{reward} ({trajectory.status}{stops}, {trajectory.num_sampled} tokens)"
