"""The load of experts: its loss by hand, over the whole mini-batch however that is cut, padding left out; added by every trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.algorithms import GRPOConfig
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.tuning import PreferenceTrainingConfig, SFTTrainingConfig
from burnish.models.attention import Visibility
from burnish.models.config import MoeConfig
from burnish.models.moe import Load
from burnish.models.transformer import Params, forward_with_load
from burnish.rl.algorithms import from_config
from burnish.rl.batch import build_micro_batches
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.balance import Balance, balance_loss, balance_of, fractions
from burnish.train.optim import make_optimizer
from burnish.train.state import TrainState, UpdateReport, init_state
from burnish.train.step import MicroBatch, Steps, Totals, make_steps
from burnish.train.trainers.named import DPOTrainer, PeftTrainer

from .tiny_updates import groups

CONFIG = tiny_config("qwen3_moe")
MOE = MoeConfig(4, 2, normalised=True)
assert CONFIG.moe == MOE


@jax.jit
def load_of(params: Params, tokens: jax.Array) -> Load:
    """Id 0 is padding."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    segments = (tokens != 0).astype(jnp.int32)
    return forward_with_load(CONFIG, params, tokens, positions, Visibility(segments, jnp.zeros_like(segments)))[1]


def test_by_hand() -> None:
    """One layer, two experts, three tokens, each to one: two choices of the first; probabilities sum to 1.8 and 1.2.
    2 · (2/3 · 1.8 + 1/3 · 1.2) / 3 = 1.0667; with even shares it is 1 whatever the probabilities."""
    moe = MoeConfig(2, 1, normalised=True)
    load = Load(jnp.asarray([[2.0, 1.0]]), jnp.asarray([[1.8, 1.2]]), jnp.asarray([3.0]))
    np.testing.assert_allclose(balance_loss(moe, load, fractions(moe, load)).value(), 1.066667, rtol=1e-5)
    np.testing.assert_allclose(balance_loss(moe, load, jnp.full((1, 2), 0.5)).value(), 1.0, rtol=1e-6)


def test_how_a_mini_batch_is_cut_changes_neither_loss_nor_gradient() -> None:
    """Four rows of different lengths as one batch, and as two of two; both equal the definition over all tokens at once."""
    params = lively_params(CONFIG)
    tokens = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (4, 12)).astype(np.int32)
    tokens[1, 7:] = tokens[2, 3:] = 0
    whole = load_of(params, jnp.asarray(tokens))
    np.testing.assert_allclose(whole.tokens, [12 + 7 + 3 + 12] * 2)
    np.testing.assert_allclose(whole.counts.sum(-1), 2 * whole.tokens)
    shares = fractions(MOE, whole)

    def loss(params: Params, *, rows: int) -> Any:
        parts = [balance_loss(MOE, load_of(params, jnp.asarray(tokens[i : i + rows])), shares) for i in range(0, 4, rows)]
        return sum(parts[1:], parts[0]).value()

    once, cut = (jax.value_and_grad(lambda p, rows=rows: loss(p, rows=rows))(params) for rows in (4, 2))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), once, cut))
    probs = np.asarray(whole.probs) / np.asarray(whole.tokens)[:, None]
    np.testing.assert_allclose(once[0], (4 * np.asarray(shares) * probs).sum(-1).mean(), rtol=1e-5)
    assert float(once[0]) > 1.0 and float(jnp.abs(once[1]["layers"]["router"]).max()) > 1e-4


def test_padding_moves_nothing() -> None:
    params, tokens = lively_params(CONFIG), np.random.default_rng(1).integers(1, CONFIG.vocab_size, (4, 12)).astype(np.int32)
    tokens[:, 8:] = 0
    tokens[2:] = 0
    few = load_of(params, jnp.asarray(tokens))
    np.testing.assert_allclose(few.tokens, [16.0, 16.0])
    np.testing.assert_allclose(few.probs.sum(-1), [16.0, 16.0], rtol=1e-5)


def test_a_model_without_experts_has_no_load() -> None:
    ones = jnp.ones((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="llama family has no experts"):
        forward_with_load(tiny_config("llama"), {}, ones, ones, Visibility(ones, ones))


OPTIMIZER = make_optimizer(OptimizerConfig(), total_updates=1)
MIXTURE = replace(CONFIG, num_layers=1, moe=replace(MOE, balance=0.5))


def slope(steps: Steps, params: Params, parts: list[Any]) -> tuple[float, Params]:
    """The loss of the load, 0 where there is none, and the gradient of the whole that an update would apply."""
    applied: list[Totals] = []

    def apply(state: TrainState, totals: Totals) -> tuple[TrainState, UpdateReport]:
        applied.append(totals)
        return state, UpdateReport(totals.metrics, jnp.zeros(1, bool))

    replace(steps, apply=apply).update(init_state(params, OPTIMIZER), None, parts, count=len(parts))
    (totals,) = applied
    measured = totals.metrics["policy/balance_loss"].value() if "policy/balance_loss" in totals.metrics else 0.0
    return float(measured), jax.tree.map(lambda g: np.asarray(g / totals.loss.weight), totals.gradients)


def check_cuts(cuts: list[tuple[float, Params]]) -> None:
    for measured, gradient in cuts[1:]:
        assert measured == pytest.approx(cuts[0][0], rel=1e-5) and measured > 1.0
        for one, other in zip(*map(jax.tree.leaves, (cuts[0][1], gradient)), strict=True):
            assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one) + 1e-7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_tiny_model(folder, config=MIXTURE, alphabet="01234567", scale=5.0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_trainers_gradient_does_not_know_how_rows_were_cut(kind: str, folder: Path) -> None:
    """Eight rows at once, four and four, one by one; the factor is the model's own."""
    sizes: dict[str, Any] = {"max_steps": 1, "batch_size": 8, "max_tokens": 8}
    found = []
    for rows, tokens in ((8, 128), (4, 32), (1, 8))[:: 1 if kind == "sft" else 2]:
        if kind == "sft":
            data = [{"prompt": str(i), "completion": str(i * i % 8)} for i in range(8)]
            trainer = PeftTrainer(folder, train_ds=data, training=SFTTrainingConfig(**sizes, tokens_per_device=tokens))
        else:
            data = [{"prompt": str(i), "chosen": str(i * i % 8), "rejected": "77"} for i in range(8)]
            trainer = DPOTrainer(folder, train_ds=data, training=PreferenceTrainingConfig(**sizes, tokens_per_device=2 * tokens))
        with trainer:
            parts = trainer._micro_batches(trainer._stream.take(8), 1)
            assert len(parts) == 8 // rows
            found.append(slope(trainer.policy._steps, trainer.policy.trained, parts))
    check_cuts(found)


@pytest.mark.slow
def test_an_update_of_reinforcement_learning_balances_too() -> None:
    """Eight prompts at once and one by one; without a factor the gradient is another."""
    config = replace(MIXTURE, vocab_size=31)
    params, made = lively_params(config), groups(num_groups=8, size=2)
    values = {(t.group, t.sample): t.sample - 0.3 for g in made for t in g.trajectories}
    whole, single = (
        [
            MicroBatch(jax.tree.map(jnp.asarray, b))
            for b in build_micro_batches(made, values, temperature=0.9, tokens_per_device=t, rows_multiple=1)
        ]
        for t in (256, 24)
    )
    assert len(whole) == 1 < len(single)
    options: dict[str, Any] = {"lora_scale": None, "head_chunk": 8}
    steps, without = (
        make_steps(config, from_config(GRPOConfig()), OPTIMIZER, **options, balance=balance)
        for balance in (balance_of(config, None, trains_routers=True), None)
    )
    found = [slope(steps, params, parts) for parts in (whole, single)]
    check_cuts(found)
    measured, plain = slope(without, params, whole)
    assert measured == 0.0 and np.abs(plain["layers"]["router"] - found[0][1]["layers"]["router"]).max() > 1e-4


def test_whose_factor_counts() -> None:
    """The recipe's before the model's; 0 is none; what no router could learn is refused."""
    assert balance_of(MIXTURE, None, trains_routers=True) == Balance(replace(MOE, balance=0.5), 0.5)
    assert balance_of(MIXTURE, 2.0, trains_routers=True) == Balance(replace(MOE, balance=0.5), 2.0)
    assert balance_of(MIXTURE, 0.0, trains_routers=True) is None and balance_of(MIXTURE, None, trains_routers=False) is None
    with pytest.raises(UserError, match="routers are frozen beside an adapter"):
        balance_of(MIXTURE, 0.5, trains_routers=False)
    with pytest.raises(UserError, match="a llama model has no experts"):
        balance_of(tiny_config("llama"), 0.5, trains_routers=True)
