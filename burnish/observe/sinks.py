"""What a learner tells the world after each step and each evaluation, and the sink that writes it down.

Owns the reports, the protocol, the JSON-lines sink, and `Sinks`, which hands a report to several. Sinks are one of the three borders at
which an error is data: a full disk or a lost connection costs that sink's record, never the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from burnish.observe.run_folder import RunFolder, write_atomically
from burnish.types import Group, Trajectory

BEFORE, AFTER = "before", "after"
"""Labels of the evaluations of which `ProgressSink` shows the comparison."""


class TokenScores(NamedTuple):
    """What was known of an episode's sampled ids, float32[num_sampled] each, before the step's updates: its advantages, and the trained
    policy's log-probs where the algorithm asked for them."""

    advantages: np.ndarray
    policy_logps: np.ndarray | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: its number (from 1), how many there will be, its metrics by name (docs/metrics.md), the episodes it learned from.

    scores: of the episodes that were trained on, by group and sample. decode: ids → text, special tokens included.
    """

    step: int
    max_steps: int
    metrics: Mapping[str, float]
    groups: Sequence[Group] = ()
    scores: Mapping[tuple[tuple[int, int], int], TokenScores] = field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation after `step` steps. `label`: `before`, `after`, or any other text; metrics are named `eval/NAME/…`."""

    step: int
    label: str
    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory] = ()


@runtime_checkable
class Sink(Protocol):
    """Takes reports, from one thread. `close` is called whatever happened; a second call does nothing."""

    def step(self, report: StepReport) -> None: ...

    def evaluation(self, report: EvalReport) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Hands each report to every sink. A sink that raises is named on stderr, closed, and left out from then on; `errors` counts."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.errors = 0

    def step(self, report: StepReport) -> None:
        self._each(lambda sink: sink.step(report))

    def evaluation(self, report: EvalReport) -> None:
        self._each(lambda sink: sink.evaluation(report))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, deliver: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                deliver(sink)
            except Exception as error:
                self.errors += 1
                self._sinks.remove(sink)
                print(
                    f"burnish: {type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}", file=sys.stderr
                )
                with contextlib.suppress(Exception):
                    sink.close()


class JsonlSink:
    """Writes `metrics.jsonl`, one line a step, and `eval.json`, every evaluation with its outcomes.

    A run that goes on appends: call `rewind` first.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._evaluations: list[dict[str, Any]] = []
        self._file = -1

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: take out what was written of later ones, and a line that was cut off by a crash."""
        if self._folder.metrics_path.is_file():
            lines = self._folder.metrics_path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            if kept != lines:
                write_atomically(self._folder.metrics_path, "".join(kept))
        if self._folder.evaluations_path.is_file():
            past = json.loads(self._folder.evaluations_path.read_text(encoding="utf-8"))["evaluations"]
            self._evaluations = [entry for entry in past if entry["step"] <= step and step > 0]
            if self._evaluations != past:
                self._write_evaluations()

    def step(self, report: StepReport) -> None:
        if self._file < 0:
            self._file = os.open(self._folder.metrics_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line = json.dumps({"step": report.step, **json_numbers(report.metrics)}) + "\n"
        os.write(self._file, line.encode())  # one write: only a line that crosses a page can be seen in part, without its end

    def evaluation(self, report: EvalReport) -> None:
        outcomes = [
            {"group": t.group, "sample": t.sample, "status": str(t.status), "reward": t.reward, "rewards": t.rewards}
            for t in report.trajectories
        ]
        entry = {"step": report.step, "label": report.label, "metrics": json_numbers(report.metrics), "outcomes": outcomes}
        self._evaluations.append(entry)
        self._write_evaluations()

    def _write_evaluations(self) -> None:
        lines = ",\n".join(json.dumps(e, default=float) for e in self._evaluations)
        write_atomically(self._folder.evaluations_path, f'{{"evaluations": [\n{lines}\n]}}\n')

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def json_numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as strict JSON can hold them: what isn't finite becomes "NaN", "Infinity" or "-Infinity", which `float` reads back."""
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {name: float(value) if math.isfinite(value) else names.get(value, "NaN") for name, value in metrics.items()}
