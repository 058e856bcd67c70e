"""burnish's side: python burnish_rl.py MODEL TARGET STEPS f32|bf16"""

from __future__ import annotations

import copy
import dataclasses
import sys

from burnish import GRPOConfig, GRPOLearner, RLCluster, RolloutConfig, TrainingConfig
from burnish.models.model import Model
from burnish.text.codec import Codec
from work import LEARNING_RATE, PROMPT_LIMIT, PROMPTS, SAMPLES, TOKENS, question, versions, vowels, write


def reward(prompts, completions):
    return vowels(completions)


def main() -> None:
    path, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    model = Model.load(path)
    endless = copy.copy(model.codec.template)
    endless.stop_ids = ()  # nothing ends a turn, so every completion has the same length
    model = dataclasses.replace(model, codec=Codec(model.codec.tokenizer, endless))
    slots = PROMPTS * SAMPLES
    rollout = RolloutConfig(max_prompt_tokens=PROMPT_LIMIT, slots=slots, prefill_rows=PROMPTS, sampling={"max_tokens": TOKENS})
    training = TrainingConfig(max_steps=steps, batch_size=PROMPTS, optimizer={"learning_rate": LEARNING_RATE})
    cluster = RLCluster(model, precision=setting, rollout=rollout, training=training)
    del model
    rows = [question(i) for i in range(PROMPTS * steps)]
    result = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES), reward_fns=[reward], train_ds=rows).train()
    write(
        target,
        side="burnish",
        setting=setting,
        step_seconds=[step["perf/step_seconds"] for step in result.history],
        generate_seconds=[step["time/rollout_seconds"] for step in result.history],
        completion_tokens=[step["length/sampled_mean"] for step in result.history],
        versions=versions("burnish", "jax", "optax"),
    )


if __name__ == "__main__":
    main()
