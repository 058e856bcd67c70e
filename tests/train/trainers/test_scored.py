"""Reward models: the loss by hand, the score where a finished model's is read, held-out pairs ordered by the exported one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import LoraConfig, RewardModelSection
from burnish.config.tuning import RewardTrainingConfig
from burnish.data.source import from_rows
from burnish.models.model import Model
from burnish.rl.reward_model import RewardModel
from burnish.train.trainers.named import RewardModelTrainer
from burnish.train.trainers.scored import bradley_terry, ranked

from .toys import pairs, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_the_loss_by_hand() -> None:
    """-log σ of 1, of 0, of 1 - 2, and at a tie the slopes -1/2 and 1/2; centering adds .1 · 3² = .9."""
    chosen, rejected = jnp.array([1.0, 0.0, 1.0]), jnp.array([0.0, 0.0, 0.0])
    found = bradley_terry(chosen, rejected, jnp.array([0.0, 0.0, 2.0]))
    np.testing.assert_allclose(found, [math.log1p(math.exp(-1)), math.log(2), math.log1p(math.exp(1))], rtol=1e-6)
    both = jax.grad(lambda x: bradley_terry(x[:1], x[1:], jnp.zeros(1))[0])(jnp.zeros(2))
    np.testing.assert_allclose(both, [-0.5, 0.5])
    one = jnp.ones(1)
    np.testing.assert_allclose(bradley_terry(2 * one, one, one, centering=0.1), [math.log(2) + 0.9], rtol=1e-6)


def test_the_last_token_that_is_no_padding_is_scored(model: Model) -> None:
    row = {"prompt": "1", "chosen": "2", "rejected": "33", "margin": 0.5}
    (prompt,) = from_rows([row], name="rows").prompts
    end = int(ranked(None, prompt, model.codec).answers[0].ids[-1])
    for pad_id, back in ((None, 1), (end, 2)):
        example = ranked(pad_id, prompt, model.codec)
        assert example.margin == 0.5
        for answer in example.answers:
            assert answer.ids[-1] == end != answer.ids[-2] and np.flatnonzero(answer.trained).tolist() == [len(answer.ids) - back]
    for margin in (-1.0, "1", True):
        (bad,) = from_rows([row | {"margin": margin}], name="rows").prompts
        with pytest.raises(UserError, match="rows:0: the column `margin` must be a number, 0 or more"):
            ranked(None, bad, model.codec)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8, alpha=16.0, quantize="int8")], ids=["every weight", "adapter"])
def test_a_reward_model_orders_held_out_pairs_and_so_does_what_is_exported(model: Model, tmp_path: Path, lora: LoraConfig | None) -> None:
    sizes = {"max_steps": 15, "batch_size": 16, "max_tokens": 16, "tokens_per_device": 64}
    training = RewardTrainingConfig(**sizes, optimizer=OptimizerConfig(learning_rate=1e-2), centering=0.01, compare=True)
    held_out = pairs(60, seed=1)
    trainer = RewardModelTrainer(model.folder, train_ds=pairs(200, seed=0), eval_ds=held_out, lora=lora, training=training)
    result = trainer.train()
    assert result.evaluations[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6), "scores start at 0"
    assert result.evaluations[15]["eval/accuracy"] >= 0.95, result.evaluations
    exported = trainer.export(tmp_path)
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    judge = RewardModel(RewardModelSection(path=str(exported)))

    def scores(kind: str) -> np.ndarray:
        asked = [{"role": "user", "content": row["prompt"]} for row in held_out]
        said = [{"role": "assistant", "content": row[kind]} for row in held_out]
        return np.array(judge.score([list(talk) for talk in zip(asked, said, strict=True)]))

    apart = scores("chosen") - scores("rejected")
    assert (apart > 0).mean() == result.evaluations[15]["eval/accuracy"]
    assert apart.mean() == pytest.approx(result.evaluations[15]["eval/margin"], rel=1e-3)
    again = RewardModelTrainer(exported, train_ds=pairs(20, seed=0), eval_ds=held_out, training=training)
    assert again.evaluate()["eval/margin"] == pytest.approx(apart.mean(), rel=1e-3), "training goes on from a classifier"


@pytest.mark.slow
def test_a_margin_asks_for_a_larger_difference(model: Model) -> None:
    training = RewardTrainingConfig(max_steps=1, batch_size=8, max_tokens=16, tokens_per_device=64)
    rows = pairs(8, seed=0)
    far = [row | {"margin": 2.0} for row in rows]
    losses = [RewardModelTrainer(model.folder, train_ds=r, eval_ds=r, training=training).evaluate()["eval/loss"] for r in (rows, far)]
    np.testing.assert_allclose(losses, [math.log(2), math.log1p(math.exp(2))], rtol=1e-5)
