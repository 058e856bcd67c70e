"""What tracing costs: an event, and the steps of a small model with and without it, in turn.

    python bench/trace_cost.py [--pairs 40] [--run runs/NAME]

Two minutes on 2 cores. The model is small (6 layers of width 384, which are drawn; 4 prompts × 8 samples of 16 tokens a step), so that its
steps take a fraction of a second: any other run's events cost a smaller share of its steps. Of each pair one step is traced, which of them
by chance; a step's seconds hold all the writing of its events. Writes bench/baselines/trace_cost.json; exits with 1 where events cost more
than 1 % of the median step, or 1,000 steps would make more than 50 MB. --run: a finished run, of which the same share is told.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from burnish import GRPOConfig, GRPOLearner, RLCluster, RolloutConfig, TrainingConfig
from burnish.config.schema import SamplingConfig
from burnish.models.model import Model
from burnish.observe import trace
from burnish.observe.bottlenecks import whole_steps
from burnish.observe.trace_reader import Timeline, read
from burnish.observe.trace_writer import TraceWriter
from burnish.rewards.manager import RewardSpec
from burnish.testing.tiny import tiny_config, write_tiny_model

TARGET = Path(__file__).parent / "baselines" / "trace_cost.json"
EVENTS = 200_000
MOST = 0.01
WARM_UP = 2
"""Steps that compile."""


def cost_of_an_event(folder: Path) -> tuple[float, float, float]:
    """Seconds of the thread that makes it, seconds of CPU altogether (the writing thread's too), and bytes."""
    writer = TraceWriter(folder / "events.pftrace", most_bytes=2**30)
    used, inside = time.process_time(), 0.0
    for _ in range(EVENTS // 2000):
        start = time.perf_counter()
        for i in range(1000):
            with trace.span("model", turn=i % 7, prompt_tokens=64):
                pass
        inside += time.perf_counter() - start
        writer.flush()  # a step has pauses, in which the writer comes along
    writer.close()
    return inside / EVENTS, (time.process_time() - used) / EVENTS, (folder / "events.pftrace").stat().st_size / EVENTS


def alternate(folder: Path, pairs: int) -> tuple[list[tuple[float, float]], float, float]:
    """Seconds of each pair's traced and untraced step; events and bytes of a traced step."""
    write_tiny_model(folder, config=tiny_config(width=384, num_layers=6))
    cluster = RLCluster(
        Model.load(folder),
        precision="f32",
        rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=16), max_prompt_tokens=32, slots=32),
        training=TrainingConfig(max_steps=WARM_UP + 2 * pairs, batch_size=4),
    )
    path, pause, draw = folder / "run.pftrace", contextlib.ExitStack(), random.Random(0)
    writer = TraceWriter(path, most_bytes=2**30)
    traced = [order for _ in range(pairs) for order in draw.choice([(True, False), (False, True)])] + [True]
    ends: list[float] = []
    untraced_bytes = 0

    def turn(step: int) -> None:
        """A step is over when its events are written."""
        nonlocal untraced_bytes
        writer.flush()
        ends.append(time.perf_counter())
        pause.close()
        if step == WARM_UP:
            untraced_bytes = path.stat().st_size
        if step >= WARM_UP and not traced[step - WARM_UP]:
            pause.enter_context(trace.paused())

    rows = [{"prompt": f"{i} + {i}", "answer": str(i)} for i in range(10)]
    GRPOLearner(
        cluster,
        GRPOConfig(num_generations=8),
        reward_fns=[dataclasses.replace(RewardSpec.of(lengths), timeout_s=None)],  # in this process
        train_ds=rows,
        sinks=[writer],
    ).train(on_step=turn)
    pause.close()
    seconds = [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    told = [(a, b) if first else (b, a) for a, b, first in zip(seconds[::2], seconds[1::2], traced[::2], strict=False)]
    timeline = read(path)
    steps = whole_steps(timeline)[WARM_UP:]
    return told, events_between(timeline, steps[0].start_ns) / pairs, (path.stat().st_size - untraced_bytes) / pairs


def lengths(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def events_between(timeline: Timeline, start_ns: int) -> int:
    spans = sum(one.start_ns >= start_ns for one in timeline.slices)
    return 2 * spans + sum(at >= start_ns for values in timeline.counters.values() for at, _ in values)


def share_of(run: Path, cost: float) -> dict[str, float | str]:
    """What events cost of the steps of a run that is over, its first left out."""
    timeline = read(run / "trace.pftrace")
    steps = whole_steps(timeline)[1:]
    median, events = statistics.median(step.seconds for step in steps), events_between(timeline, steps[0].start_ns) / len(steps)
    return {"run": run.name, "events_a_step": events, "median_step_seconds": median, "events_times_cost_over_step": events * cost / median}


def interval(values: Sequence[float], *, resamples: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wall, cpu, size = cost_of_an_event(Path(name))
        pairs, events, step_bytes = alternate(Path(name), args.pairs)
    relative = [traced / untraced - 1 for traced, untraced in pairs]
    step = statistics.median(untraced for _, untraced in pairs)
    record = {
        "what": "an event of the trace, and steps of a small drawn model (6 layers of width 384, 4 prompts x 8 samples of 16 tokens) with "
        "and without tracing in turn",
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "perfetto")} | {"python": platform.python_version()},
        "events_measured": EVENTS,
        "microseconds_an_event": 1e6 * wall,
        "microseconds_of_cpu_an_event": 1e6 * cpu,
        "bytes_an_event": size,
        "events_a_step": events,
        "median_step_seconds": step,
        "events_times_cost_over_step": events * cpu / step,
        "megabytes_in_1000_steps": step_bytes * 1000 / 1e6,
        "pairs": len(pairs),
        "seconds_traced_and_untraced": pairs,
        "traced_over_untraced_median": statistics.median(relative),
        "interval_95": interval(relative),
        "target": MOST,
        "of_a_run": share_of(args.run, cpu) if args.run else None,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    sys.exit(0 if record["events_times_cost_over_step"] <= MOST and record["megabytes_in_1000_steps"] < 50 else 1)


if __name__ == "__main__":
    main()
