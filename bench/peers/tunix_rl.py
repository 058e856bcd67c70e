"""Tunix's side: python tunix_rl.py MODEL TARGET STEPS f32|bf16

Its Llama 3 model with SmolLM2's sizes, its own sampler and GRPO learner, at its defaults: recomputing layers in the backward pass
(`remat_config`) fails with the flax that its wheel pulls in (0.12.8: "Cannot mutate Param from a different trace level").
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import jax
import numpy as np
import optax
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout, vanilla_rollout
from tunix_model import DTYPES, smollm2

from work import LEARNING_RATE, PROMPT_LIMIT, PROMPTS, SAMPLES, TOKENS, question, versions, vowels, write

UNUSED_ID = 49151  # ends a completion; next to never sampled
began: list[float] = []
ended: list[float] = []


class Timed(vanilla_rollout.VanillaRollout):
    """Takes the time of sampling."""

    def generate(self, prompts, rollout_config, **kwargs):
        began.append(time.monotonic())
        found = super().generate(prompts, rollout_config, **kwargs)
        ended.append(time.monotonic())
        return found


def reward(prompts, completions, **columns):
    return vowels(completions)


def main() -> None:
    path, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    actor, mesh = smollm2(path, setting)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question(i)}], tokenize=False, add_generation_prompt=True)
        for i in range(PROMPTS * steps)
    ]
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)},
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(LEARNING_RATE),
                eval_every_n_steps=10**6,
                max_steps=steps,
                mini_batch_size=PROMPTS,
                train_micro_batch_size=PROMPTS,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=TOKENS,
                max_prompt_length=PROMPT_LIMIT,
                kv_cache_size=PROMPT_LIMIT + TOKENS + 8,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[UNUSED_ID],
                data_type=DTYPES[setting],
            ),
        ),
    )
    cluster.rollout.__class__ = Timed
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.0, epsilon=0.2), reward_fns=reward
    )
    start = time.monotonic()
    learner.train([{"prompts": np.array(prompts[i : i + PROMPTS])} for i in range(0, len(prompts), PROMPTS)])
    jax.block_until_ready(jax.tree.leaves(jax.live_arrays()))
    end = time.monotonic()
    # A step ends where the sampling of the next one begins.
    marks = [start, *began[1:], end]
    write(
        target,
        side="Tunix",
        setting=setting,
        step_seconds=[after - before for before, after in pairwise(marks)],
        generate_seconds=[after - before for before, after in zip(began, ended, strict=True)],
        versions=versions("google-tunix", "jax", "flax", "optax"),
    )


if __name__ == "__main__":
    main()
