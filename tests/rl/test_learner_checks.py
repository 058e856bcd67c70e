"""What a learner refuses before it loads weights: each mistake here names a model folder that has none."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.schema import RolloutConfig, SamplingConfig, TrainingConfig
from burnish.rl.learners import GRPOLearner
from burnish.testing.tiny import tiny_config, write_tiny_model

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole, bare = (tmp_path_factory.mktemp(name) for name in ("whole", "bare"))
    write_tiny_model(whole, config=tiny_config(width=16), alphabet="0123456789")
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    return bare


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    "options, training, message",
    [
        ({"train_ds": [{"prompt": "1"}] * 4}, {}, "reward exact needs answer, which train:0 has not; its columns are: seed"),
        ({"eval_ds": [*ROWS, {"prompt": "1"}]}, {}, "reward exact needs answer, which eval:4 has not"),
        ({"reward_fns": []}, {}, "reward_fns is empty"),
        (
            {},
            {"optimizer": {"schedule": "cosine", "warmup_updates": 10}},
            "a cosine schedule of 3 updates has no room after a warm-up of 10",
        ),
        ({}, {"eval_every": 1}, "eval_every .* need held-out prompts"),
    ],
)
def test_mistakes_are_errors_before_weights_are_loaded(folder: Path, options: Any, training: Any, message: str) -> None:
    given = {"reward_fns": [exact], "train_ds": ROWS, **options}
    with pytest.raises(UserError, match=message):
        GRPOLearner(
            folder,
            training=TrainingConfig(max_steps=3, batch_size=2, **training),
            rollout=RolloutConfig(max_prompt_tokens=12, sampling=SamplingConfig(max_tokens=4)),
            **given,
        )


@pytest.mark.slow
def test_a_run_inside_a_running_loop_as_in_a_notebook(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789")

    async def cell() -> int:
        learner = GRPOLearner(
            tmp_path,
            reward_fns=[exact],
            train_ds=ROWS,
            eval_ds=ROWS,
            training=TrainingConfig(max_steps=1, batch_size=2, compare=True),
            rollout=RolloutConfig(max_prompt_tokens=12, slots=16, sampling=SamplingConfig(max_tokens=4)),
        )
        return learner.train().steps

    assert asyncio.run(cell()) == 1
