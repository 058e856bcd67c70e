"""What layouts are worth: completion tokens a second of log-probs and their gradient, padded, packed, and packed with shared prompts.

    python bench/packing.py [--repetitions 3]

SmolLM2-135M's sizes, every weight trained in f32; 4 groups of 8 completions, lengths lognormal (median 30, sigma 1, at most 256), prompts
of 48. The three take turns in one process, so what else the machine does hits all of them: read the ratios. Targets: packed and shared at
least 3 times padded and 1.4 times packed. Writes bench/baselines/packing.json; exits with 1 where a target isn't met.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models import transformer
from burnish.models.locate import locate
from burnish.models.weights import load_config
from burnish.rl.batch import TokenBatch, build_batch, build_micro_batches
from burnish.train.score import HeadOptions, policy_scores
from burnish.types import Group, Prompt, Trajectory

TARGET = Path(__file__).parent / "baselines" / "packing.json"
GROUPS, SIZE, PROMPT, MEDIAN, SIGMA, CAP, SEED = 4, 8, 48, 30, 1.0, 256, 0
ROW_TOKENS = 2048
OVER_PADDED, OVER_PACKED = 3.0, 1.4


def lengths() -> np.ndarray:
    """int64[GROUPS, SIZE]: completion lengths in tokens."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, (GROUPS, SIZE))
    return np.clip(np.rint(drawn), 1, CAP).astype(int)


def groups(vocab_size: int) -> list[Group]:
    rng = np.random.default_rng(SEED + 1)

    def episode(prompt: np.ndarray, length: int, draw: int, sample: int) -> Trajectory:
        ids = np.concatenate([prompt, rng.integers(0, vocab_size, length)]).astype(np.int32)
        sampled = np.arange(len(ids)) >= PROMPT
        versions = np.where(sampled, 0, -1).astype(np.int32)
        return Trajectory([], ids, sampled, np.where(sampled, -1.0, 0.0).astype(np.float32), versions, PROMPT, (0, draw), sample)

    made = []
    for draw, row in enumerate(lengths().tolist()):
        prompt = rng.integers(0, vocab_size, PROMPT)
        made.append(Group((0, draw), Prompt(f"p{draw}", ()), [episode(prompt, n, draw, i) for i, n in enumerate(row)]))
    return made


def layouts(made: list[Group]) -> dict[str, list[TokenBatch]]:
    """The same episodes three times, as micro-batches of at most ROW_TOKENS a row; packed in the rows that need the least padding."""
    credits = {(t.group, t.sample): float(t.sample - 3.5) for group in made for t in group.trajectories}
    packed = [build_batch(made, credits, temperature=1.0, layout="packed", row_tokens=n) for n in range(CAP + PROMPT, ROW_TOKENS + 1, 16)]
    return {
        "padded": [build_batch(made, credits, temperature=1.0, layout="padded")],
        "packed": [min(packed, key=lambda batch: batch.tokens.size)],
        "shared": build_micro_batches(made, credits, temperature=1.0, tokens_per_device=ROW_TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    config = load_config(locate("smollm2-135m"))
    params = jax.jit(lambda key: transformer.init(config, key))(jax.random.key(0))
    batches = {name: jax.device_put(parts) for name, parts in layouts(groups(config.vocab_size)).items()}
    options = HeadOptions(train_head=True)

    @jax.jit
    def gradient(params: Any, batch: TokenBatch) -> Any:
        def loss(params: Any) -> Any:
            return -jnp.sum(policy_scores(config, params, batch, options=options, remat=True)[0] * batch.advantages)

        return jax.grad(loss)(params)

    def seconds(parts: list[TokenBatch]) -> float:
        start = time.perf_counter()
        for part in parts:
            jax.block_until_ready(gradient(params, part))
        return time.perf_counter() - start

    for parts in batches.values():
        seconds(parts)  # compiles
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(args.repetitions):
        for name, parts in batches.items():
            times[name].append(seconds(parts))
    over_padded, over_packed = (
        statistics.median(a / b for a, b in zip(times[other], times["shared"], strict=True)) for other in ("padded", "packed")
    )
    num_tokens = int(lengths().sum())
    record = {
        "what": "log-probs and their gradient, SmolLM2-135M's sizes, every weight trained in f32, by layout",
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")} | {"python": platform.python_version()},
        "completion_tokens": num_tokens,
        "longest_completion": int(lengths().max()),
        "shapes": {name: [list(part.tokens.shape) for part in parts] for name, parts in batches.items()},
        "seconds": times,
        "completion_tokens_per_second": {name: round(num_tokens / statistics.median(taken), 1) for name, taken in times.items()},
        "shared_over_padded": round(over_padded, 2),
        "shared_over_packed": round(over_packed, 2),
        "targets": {"shared_over_padded": OVER_PADDED, "shared_over_packed": OVER_PACKED},
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    sys.exit(0 if over_padded >= OVER_PADDED and over_packed >= OVER_PACKED else 1)


if __name__ == "__main__":
    main()
