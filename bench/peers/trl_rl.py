"""TRL's side: python trl_rl.py MODEL TARGET STEPS [defaults | bf16]

defaults: `GRPOConfig`'s own (bf16 autocast where it finds it, gradient checkpointing). bf16: weights in bf16 too.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from work import LEARNING_RATE, PROMPTS, SAMPLES, TOKENS, question, versions, vowels, write


class Timed(GRPOTrainer):
    """Takes the time of sampling."""

    generating: list[float] = []

    def _generate(self, prompts):
        start = time.monotonic()
        found = super()._generate(prompts)
        Timed.generating.append(time.monotonic() - start)
        return found


class Steps(TrainerCallback):
    """Takes the time of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.monotonic() - self.start)


def reward(completions, **columns):
    return vowels([turns[-1]["content"] if isinstance(turns, list) else turns for turns in completions])


def main() -> None:
    model, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question(i)}]} for i in range(PROMPTS * steps)])
    clock = Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            shuffle_dataset=False,
            use_cpu=True,
            model_init_kwargs={"dtype": "bfloat16" if setting == "bf16" else "float32"},
        )
        trainer = Timed(model, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock])
        trainer.train()
    write(
        target,
        side="TRL",
        setting="defaults" if setting == "defaults" else "bf16 weights, autocast, checkpointing",
        step_seconds=clock.seconds,
        generate_seconds=Timed.generating,
        options={"bf16": config.bf16, "gradient_checkpointing": config.gradient_checkpointing},
        versions=versions("trl", "torch", "transformers", "accelerate"),
    )


if __name__ == "__main__":
    main()
