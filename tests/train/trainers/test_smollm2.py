"""The real small model on prose: an adapter beside weights of four bits learns as one beside the whole weights does (`make learn`).

The texts are Python's own help pages, which every interpreter brings; results are in docs/results.md.
"""

from __future__ import annotations

import pydoc_data.topics
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import LoraConfig
from burnish.config.tuning import SFTTrainingConfig
from burnish.models.quant import Quantised, stored_bytes
from burnish.train.trainers.named import PeftTrainer

pytestmark = [pytest.mark.learn, pytest.mark.smollm2, pytest.mark.optimised]


def passages() -> list[dict[str, Any]]:
    """Some 400 characters of a help page each; every third page is held out by the order of its name."""
    pages = sorted(pydoc_data.topics.topics.items())
    return [{"text": text, "page": i} for i, (_, page) in enumerate(pages) for text in textwrap.wrap(page, 400)[:6] if len(text) > 200]


def test_nf4_learns_as_the_whole_weights_do() -> None:
    rows = passages()
    train, held_out = [row for row in rows if row["page"] % 3], [row for row in rows if not row["page"] % 3][::7][:24]
    optimizer = OptimizerConfig(learning_rate=2e-4)
    sizes = {"max_steps": 50, "batch_size": 4, "max_tokens": 128, "tokens_per_device": 512, "overlong": "cut"}
    training = SFTTrainingConfig(**sizes, optimizer=optimizer, compare=True)
    reached: dict[str, tuple[float, float]] = {}
    for quantize in (None, "nf4"):
        lora = LoraConfig(rank=16, alpha=32.0, quantize=quantize)
        trainer = PeftTrainer("smollm2-135m", train_ds=train, eval_ds=held_out, lora=lora, training=training)
        base = trainer.policy.model.params
        bytes_of = {"base": stored_bytes(base)}
        if quantize is not None:
            matrices = {name: x for name, x in base["layers"].items() if isinstance(x, Quantised)}
            numbers = sum(int(np.prod(x.shape)) for x in matrices.values())
            whole = numbers + sum(
                x.size for x in jax.tree.leaves(base | {"layers": {n: x for n, x in base["layers"].items() if n not in matrices}})
            )
            shares = stored_bytes(matrices) / (2 * numbers), stored_bytes(base) / (2 * whole)
            print(f"\nbytes of bf16's: matrices {shares[0]:.4f}, base {shares[1]:.4f}; {bytes_of['base'] / 2**20:.1f} MiB")
            assert shares[0] <= 0.35 and shares[1] <= 0.50
        evaluations = trainer.train().evaluations
        reached[str(quantize)] = evaluations[0]["eval/loss"], evaluations[50]["eval/loss"]
        print(f"\n{quantize}: {reached[str(quantize)]}")
    (before, after), (_, quantised) = reached["None"], reached["nf4"]
    assert after < before and abs(quantised / after - 1) <= 0.03, reached
