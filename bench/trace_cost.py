"""What tracing costs: an event, and the quickstart's model with and without it, step by step in turn.

    python bench/trace_cost.py [--pairs 30]

A step here is small (2 prompts × 4 samples of 8 tokens), so that many fit; each even step is traced, each odd one isn't. Writes
bench/baselines/trace_cost.json; exits with 1 where events cost more than 1 % of the median step, or the trace would pass 50 MB.
"""

from __future__ import annotations

import argparse
import contextlib
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

from burnish import load_config
from burnish.cli.build import build_learner
from burnish.observe import trace
from burnish.observe.trace_reader import read
from burnish.observe.trace_writer import TraceWriter

TARGET = Path(__file__).parent / "baselines" / "trace_cost.json"
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
EVENTS = 200_000
MOST = 0.01


def cost_of_an_event(folder: Path) -> tuple[float, float, float]:
    """Seconds of the thread that makes it, seconds of CPU altogether (the writing thread's too), and bytes."""
    writer = TraceWriter(folder / "events.pftrace", most_bytes=2**30)
    start, used = time.perf_counter(), time.process_time()
    for i in range(EVENTS // 2):
        with trace.span("model", turn=i % 7, prompt_tokens=64):
            pass
        if i % 1000 == 0:
            time.sleep(0.005)  # a step has pauses, in which the writer comes along
    slept = 0.005 * (EVENTS // 2000)
    wall = time.perf_counter() - start - slept
    writer.close()
    return wall / EVENTS, (time.process_time() - used) / EVENTS, (folder / "events.pftrace").stat().st_size / EVENTS


def alternate(folder: Path, pairs: int) -> tuple[list[float], float]:
    """Seconds of each step, traced and not in turn, after two that compile; and events of a traced step."""
    sizes = ["training.batch_size=2", "training.train_micro_batch_size=2", "algorithm.num_generations=4", "rollout.sampling.max_tokens=8"]
    config = load_config(RECIPE, [*sizes, f"training.max_steps={2 * pairs + 2}", "training.compare=false"])
    path, pause = folder / "run.pftrace", contextlib.ExitStack()

    def turn(step: int) -> None:
        pause.close()
        if step % 2:
            pause.enter_context(trace.paused())

    learner = build_learner(config, sinks=lambda: [TraceWriter(path, most_bytes=2**30)], report=lambda line: print(line, flush=True))
    history = learner.train(on_step=turn).history
    pause.close()
    events = 2 * len(read(path).slices) + sum(map(len, read(path).counters.values()))
    return [step["perf/step_seconds"] for step in history][2:], events / (pairs + 1)


def interval(values: Sequence[float], *, resamples: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wall, cpu, size = cost_of_an_event(Path(name))
        seconds, events = alternate(Path(name), args.pairs)
    traced, plain = seconds[::2], seconds[1::2]
    relative = [a / b - 1 for a, b in zip(traced, plain, strict=True)]
    step = statistics.median(seconds)
    record = {
        "what": "an event of the trace, and SmolLM2-135M's steps (2 prompts x 4 samples of 8 tokens) with and without tracing in turn",
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
        "megabytes_in_1000_steps": events * size * 1000 / 1e6,
        "traced_seconds": traced,
        "untraced_seconds": plain,
        "traced_over_untraced_median": statistics.median(relative),
        "interval_95": interval(relative),
        "target": MOST,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    sys.exit(0 if record["events_times_cost_over_step"] <= MOST and record["megabytes_in_1000_steps"] < 50 else 1)


if __name__ == "__main__":
    main()
