"""The load of experts: its loss by hand, over the whole mini-batch however that is cut, padding left out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.attention import Visibility
from burnish.models.config import MoeConfig
from burnish.models.moe import Load
from burnish.models.transformer import Params, expert_load
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config
from burnish.train.balance import balance_loss, fractions

CONFIG = tiny_config("qwen3_moe")
MOE = MoeConfig(4, 2, normalised=True)
assert CONFIG.moe == MOE


@jax.jit
def load_of(params: Params, tokens: jax.Array) -> Load:
    """Id 0 is padding."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    segments = (tokens != 0).astype(jnp.int32)
    return expert_load(CONFIG, params, tokens, positions, Visibility(segments, jnp.zeros_like(segments)))


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
        expert_load(tiny_config("llama"), {}, ones, ones, Visibility(ones, ones))
