"""TRL's side: python trl_sft.py MODEL TARGET STEPS f32|bf16

`SFTTrainer` on the ids, packed by its strategy "wrapped", which cuts the texts' sequence into blocks of the same 256 tokens; on a CPU its
other strategies need an attention that isn't there. f32: float32 throughout; bf16: float32 masters under bf16 autocast. Without
checkpointing of activations, which would cost it a forward pass more.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
from datasets import Dataset
from sft_work import LEARNING_RATE, LENGTH, ROWS, texts
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from work import versions, write


class Steps(TrainerCallback):
    """Takes the time of steps, and their losses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.monotonic() - self.start)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    model, target, steps, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    clock = Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            max_length=LENGTH,
            packing=True,
            packing_strategy="wrapped",
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=setting == "bf16",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            model_init_kwargs={"dtype": "float32"},
        )
        rows = Dataset.from_list([{"input_ids": ids} for ids in texts(steps)])
        SFTTrainer(model, args=config, train_dataset=rows, callbacks=[clock]).train()
    write(
        target,
        side="TRL",
        setting=setting,
        step_seconds=clock.seconds,
        losses=clock.losses,
        options={"bf16": config.bf16, "gradient_checkpointing": config.gradient_checkpointing},
        versions=versions("trl", "torch", "transformers", "accelerate"),
    )


if __name__ == "__main__":
    main()
