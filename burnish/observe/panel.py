"""The block of lines that shows how a run stands: progress, curves as sparklines, phases beside each other, what waits, warnings.

Owns the words and their layout; every number comes from the metrics of the steps so far. The live display and `burnish watch` draw it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from burnish.observe.health import Warning, diagnose

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (("reward", "reward/mean"), ("loss", "policy/loss"), ("entropy", "policy/entropy"), ("length", "length/sampled_mean"))
"""What is drawn as sparklines, the first of reward and loss that there is, then the others as far as there is room."""
TRAINER = (("wait", "░"), ("prepare", "▒"), ("score", "▒"), ("update", "█"), ("sync", "▓"), ("save", "▓"))
"""Phases of the trainer's thread, one after the other, and how each is drawn."""
NARROW, WIDE = 80, 160


@dataclass
class Progress:
    """What is known of a run: its steps' metrics, in order, and how many there will be."""

    max_steps: int
    history: list[Mapping[str, float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.history.append(metrics)

    @property
    def step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def now(self) -> Mapping[str, float]:
        return self.history[-1] if self.history else {}

    def curve(self, name: str) -> list[float]:
        return [step[name] for step in self.history if name in step]

    @property
    def eta_s(self) -> float | None:
        """Of the steps that are left, by the last ten; the first one compiles and counts only while it is alone."""
        seconds = self.curve("perf/step_seconds")
        recent = seconds[1:][-10:] or seconds
        return (self.max_steps - self.step) * sum(recent) / len(recent) if recent else None

    def warnings(self) -> list[Warning]:
        return diagnose(self.history)


def panel(progress: Progress, *, width: int) -> list[Text]:
    """Lines of at most `width` cells."""
    lines = [_head(progress, width), *_curves(progress, width), *_phases(progress, width), _facts(progress)]
    for warning in progress.warnings()[:3]:
        lines.append(
            Text.assemble(("! ", "bold red" if warning.severity == 3 else "bold yellow"), warning.text, (f": {warning.advice}", "dim"))
        )
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(progress: Progress, width: int) -> Text:
    seconds, eta = progress.now.get("perf/step_seconds"), progress.eta_s
    words = [f"step {progress.step}/{progress.max_steps}"]
    if seconds is not None:
        words.append(f"{seconds:.1f} s a step")
    if eta is not None:
        words.append(f"ETA {clock(eta)}")
    text = "  ".join(words)
    room = max(10, min(width - len(text) - 2, 60))
    done = round(room * progress.step / max(progress.max_steps, 1))
    return Text.assemble(("━" * done, "green"), ("━" * (room - done), "bright_black"), "  ", (text, "bold"))


def _curves(progress: Progress, width: int) -> list[Text]:
    found = [(word, progress.curve(name)) for word, name in CURVES]
    found = [(word, values) for word, values in found if values]
    if len(found) > 1 and found[0][0] == "reward":
        found = [curve for curve in found if curve[0] != "loss"]
    found = found[: 1 if width < NARROW else 2 if width < WIDE else 3]
    if not found:
        return []
    each = (width - 3 * (len(found) - 1)) // len(found)
    line = Text()
    for i, (word, values) in enumerate(found):
        room = each - len(word) - 2 - 8
        part = f"{word} {sparkline(values[-room:])} {values[-1]:.3g}"
        line.append("" if i == 0 else "   ").append(part if i + 1 == len(found) else part.ljust(each))
    return [line]


def _phases(progress: Progress, width: int) -> list[Text]:
    """Two rows on one scale, a step's length: what the trainer did, and how long sampling went on beside it."""
    metrics, step = progress.now, progress.now.get("perf/step_seconds")
    if not step:
        return []
    room = min(width - 10, 60 if width < WIDE else 100)
    bar, words = "", []
    for name, sign in TRAINER:
        seconds = metrics.get(f"time/{name}_seconds")
        if seconds is None:
            continue
        bar += sign * round(room * seconds / step)
        words.append(f"{name} {seconds:.1f}")
    lines = [Text(f"trainer   {bar[:room].ljust(room)}")]
    rollout = metrics.get("time/rollout_seconds")
    if rollout is not None:
        lines.append(Text(f"sampling  {'█' * min(room, round(room * rollout / step))}"))
        words.append(f"sampling {rollout:.1f}")
    unit = f"{' · '.join(words)} s"
    if rollout is not None and "time/wait_seconds" in metrics:
        beside = max(0.0, rollout - metrics["time/wait_seconds"])
        unit += f" · overlap {100 * min(1.0, beside / step):.0f} %"
    return [*lines, Text(unit, style="dim")]


def _facts(progress: Progress) -> Text:
    metrics, words = progress.now, []
    for name, word in (("perf/rollout_tokens_per_second", "sampled"), ("perf/row_tokens_per_second", "trained")):
        if name in metrics:
            words.append(f"{metrics[name]:.0f} tokens/s {word}")
    if "staleness/mean" in metrics:
        words.append(f"staleness {metrics['staleness/mean']:.1f}")
    if "queue/waiting" in metrics:
        words.append(f"queue {metrics['queue/waiting']:.0f}")
    if "perf/mfu" in metrics:
        words.append(f"MFU {100 * metrics['perf/mfu']:.0f} %")
    if "memory/host_peak_mib" in metrics:
        words.append(f"memory {metrics['memory/host_peak_mib'] / 1024:.1f} GiB")
    return Text(" · ".join(words))


def clock(seconds: float) -> str:
    """A duration as 1:02:03, or 2:03."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def sparkline(values: Sequence[float]) -> str:
    """The course of a value as a row of blocks, scaled between its least and its greatest; what isn't finite is a dot."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else "·" for v in values)


__all__ = ["Progress", "clock", "panel", "sparkline"]
