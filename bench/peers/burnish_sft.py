"""burnish's side: python burnish_sft.py MODEL TARGET STEPS f32|bf16"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
from sft_work import CUTS, LEARNING_RATE, LENGTH, ROWS, TOKENS, texts

from burnish import PeftTrainer
from burnish.config.optimizer import OptimizerConfig
from burnish.config.tuning import SFTTrainingConfig
from burnish.data.example_stream import Encoder, training_examples
from burnish.data.examples import Answer, Example
from burnish.data.source import from_rows
from burnish.models.model import Model
from burnish.text.codec import Codec
from burnish.train.compiles import keep_compiled
from burnish.types import Prompt
from work import versions, write


def main() -> None:
    path, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    keep_compiled()
    model, ids = Model.load(path), texts(steps)

    def encode(row: Prompt, codec: Codec) -> Example:
        own = np.array(ids[row.meta["index"]], np.int32)
        return Example(row.id, (Answer(own, np.arange(len(own)) > 0, shown=1),))

    batch = sum(len(cut) for cut in CUTS) * ROWS // len(CUTS)
    source = from_rows([{"prompt": "", "index": i} for i in range(len(ids))], name="texts")
    training = SFTTrainingConfig(
        max_steps=steps,
        batch_size=batch,
        max_tokens=LENGTH,
        tokens_per_device=TOKENS,
        optimizer=OptimizerConfig(name="adamw", learning_rate=LEARNING_RATE),
    )
    stream = training_examples([source], Encoder(encode, model.codec, LENGTH, "error"), seed=0, batch_size=batch, shuffle=False)
    trainer = PeftTrainer(dataclasses.replace(model), train_ds=stream, precision=setting, training=training)
    del model
    history = trainer.train().history
    write(
        target,
        side="burnish",
        setting=setting,
        step_seconds=[step["perf/step_seconds"] for step in history],
        losses=[step["policy/loss"] for step in history],
        versions=versions("burnish", "jax", "optax"),
    )


if __name__ == "__main__":
    main()
