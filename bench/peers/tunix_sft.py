"""Tunix's side: python tunix_sft.py MODEL TARGET STEPS f32|bf16

`PeftTrainer` over every weight of its Llama 3 model with SmolLM2's sizes. It has no packing of its own (its `max_seq_token_per_tpu` is
refused), so it is given packed rows: positions that begin again, and an attention mask that keeps texts apart.
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
import optax
from sft_work import LEARNING_RATE, LENGTH, ROWS, rows
from tunix.sft import peft_trainer
from tunix_model import smollm2

from work import versions, write


def packed(steps: int) -> list[dict[str, np.ndarray]]:
    found = []
    every = rows(steps)
    for start in range(0, len(every), ROWS):
        part = every[start : start + ROWS]
        tokens = np.array([[i for text in row for i in text] for row in part], np.int32)
        positions = np.array([[i for text in row for i in range(len(text))] for row in part], np.int32)
        segments = np.array([[n for n, text in enumerate(row) for _ in text] for row in part], np.int32)
        causal = np.tril(np.ones((LENGTH, LENGTH), bool))
        found.append(
            {
                "input_tokens": tokens,
                "input_mask": positions > 0,  # a text's first id isn't learned
                "positions": positions,
                "attention_mask": (segments[:, :, None] == segments[:, None, :]) & causal,
            }
        )
    return found


def main() -> None:
    path, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    model, mesh = smollm2(path, setting)
    options = peft_trainer.TrainingConfig(eval_every_n_steps=10**6, max_steps=steps, max_inflight_computations=1)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(LEARNING_RATE), options).with_gen_model_input_fn(lambda x: x)
    seconds: list[float] = []

    def one_by_one():
        """The next batch is asked for when the step before is done: so the time between two is a step's."""
        for batch in packed(steps):
            jax.block_until_ready(jax.tree.leaves(jax.live_arrays()))
            seconds.append(time.monotonic())
            yield batch

    with mesh:
        trainer.train(one_by_one())
    jax.block_until_ready(jax.tree.leaves(jax.live_arrays()))
    marks = [*seconds, time.monotonic()]
    write(
        target,
        side="Tunix",
        setting=setting,
        step_seconds=[after - before for before, after in zip(marks[:-1], marks[1:], strict=True)],
        losses=[],
        versions=versions("google-tunix", "jax", "flax", "optax"),
    )


if __name__ == "__main__":
    main()
