"""What a checkpoint costs the quickstart's run (SmolLM2-135M, LoRA), and how long saving and restoring take, there and for every weight.

    python bench/checkpoint_smollm2.py [--steps 11]

Saves once in ten steps, beside them; the loop should wait at most 2 % of these. Writes bench/baselines/checkpoint_smollm2.json;
exits with 1 where the target isn't met.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from burnish import Saver, load_config
from burnish.checkpoint import store
from burnish.cli.build import build_learner
from burnish.config.schema import CheckpointSection
from burnish.models import weights
from burnish.models.locate import locate
from burnish.observe import trace
from burnish.rl.learner import RLLearner

TARGET = Path(__file__).parent / "baselines" / "checkpoint_smollm2.json"
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
MOST = 0.02


def learner(steps: int) -> RLLearner:
    overrides = [f"training.max_steps={steps}", "training.compare=false"]
    return build_learner(load_config(RECIPE, overrides), sinks=list, report=lambda line: print(line, flush=True))


def seconds_of(spans: list[trace.span], name: str) -> list[float]:
    return [span.seconds for span in spans if span.name == name]


def megabytes(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=11, help="the first compiles; the ten after it are compared with one save")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "adapter"
        first, trained = args.steps // 2, learner(args.steps)
        trace.take()
        result = trained.train(saver=Saver(checkpoints, CheckpointSection(every=first, keep_last=None)))
        spans = trace.take()
        steps = [step["perf/step_seconds"] for step in result.history]
        blocked = [a + b for a, b in zip(seconds_of(spans, "save.wait"), seconds_of(spans, "save.copy"), strict=True)]
        written = seconds_of(spans, "save.write")
        again = learner(args.steps)
        with again:
            begun = time.perf_counter()
            again.resume(checkpoints)
            restored = time.perf_counter() - begun
        record: dict[str, Any] = {
            "what": "one save of the quickstart's adapter and its moments in ten steps; then every weight of SmolLM2 with two moments",
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
            "versions": {name: version(name) for name in ("jax", "jaxlib", "orbax-checkpoint")} | {"python": platform.python_version()},
            "step_seconds": steps,
            "adapter_megabytes": megabytes(checkpoints / str(first)),
            "loop_waited_seconds": blocked,
            "written_beside_seconds": written,
            "resume_seconds": restored,
            "waited_over_ten_steps": max(blocked) / (10 * statistics.median(steps[1:])),
            "target": MOST,
        }
        full = weights.load(locate("smollm2-135m"))[1]
        tree = {"weights": full, "first": full, "second": full}
        begun = time.perf_counter()
        arrays = store.snapshot(tree)
        record["all_weights_copied_seconds"] = time.perf_counter() - begun
        begun = time.perf_counter()
        store.write(Path(folder) / "full", 1, arrays, {})
        record["all_weights_written_seconds"] = time.perf_counter() - begun
        record["all_weights_megabytes"] = megabytes(Path(folder) / "full")
        begun = time.perf_counter()
        jax.block_until_ready(store.read(Path(folder) / "full", 1, tree))
        record["all_weights_read_seconds"] = time.perf_counter() - begun
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    sys.exit(0 if record["waited_over_ten_steps"] <= MOST else 1)


if __name__ == "__main__":
    main()
