"""One GRPO step on SmolLM2-135M: full fine-tuning, 4 prompts × 8 completions of exactly 64 tokens, prompts of about 44 tokens (limit 64).

    python bench/grpo_smollm2.py [--steps 4] [--precision auto]

Writes raw times of every step to bench/baselines/grpo_smollm2.json. The first step compiles; quote the median of the others.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from burnish import GRPOConfig, GRPOLearner, RLCluster, RolloutConfig, TrainingConfig
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import SamplingConfig
from burnish.models.model import Model
from burnish.text.codec import Codec

QUESTIONS = ("how rivers shape valleys", "why the sky is blue", "what makes bread rise", "how a clock keeps time")
TARGET = Path(__file__).parent / "baselines" / "grpo_smollm2.json"


def vowels(completions: Sequence[str]) -> list[float]:
    """Any reward that differs inside a group does: without a signal the update is skipped."""
    return [sum(text.count(v) for v in "aeiou") / 100 for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", choices=["auto", "f32", "bf16"], default="auto")
    args = parser.parse_args()
    model = Model.load("smollm2-135m")
    endless = copy.copy(model.codec.template)
    endless.stop_ids = ()  # nothing ends a turn, so every completion has the same length
    model = dataclasses.replace(model, codec=Codec(model.codec.tokenizer, endless))
    rollout = RolloutConfig(max_prompt_tokens=64, slots=32, prefill_rows=4, sampling=SamplingConfig(max_tokens=64))
    optimizer = OptimizerConfig(learning_rate=1e-6)
    training = TrainingConfig(max_steps=args.steps, batch_size=4, optimizer=optimizer)
    cluster = RLCluster(model, precision=args.precision, rollout=rollout, training=training)
    precision = cluster.precision
    del model
    rows = [f"Tell me {QUESTIONS[i % 4]}, please." for i in range(4 * args.steps)]
    result = GRPOLearner(cluster, GRPOConfig(num_generations=8), reward_fns=[vowels], train_ds=rows).train()
    seconds = [step["perf/step_seconds"] for step in result.history]
    record = {
        "what": "GRPO on SmolLM2-135M, full fine-tuning, 4 prompts x 8 completions of exactly 64 tokens",
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": {"cpu": _cpu(), "amx": _has_flag("amx_bf16"), "cores": _cores(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
        "precision": precision,
        "prompt_tokens": [step["length/prompt_mean"] for step in result.history],
        "completion_tokens": [step["length/sampled_mean"] for step in result.history],
        "step_seconds": seconds,
        "rollout_seconds": [step["time/rollout_seconds"] for step in result.history],
        "update_seconds": [step["time/update_seconds"] for step in result.history],
        "median_seconds_after_the_first": statistics.median(seconds[1:] or seconds),
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _cpu() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _has_flag(flag: str) -> bool:
    return flag in _cpuinfo().split()


def _cores() -> int:
    return _cpuinfo().count("processor\t")


if __name__ == "__main__":
    main()
