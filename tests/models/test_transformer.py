"""The decoder's arithmetic: rematerialising changes no gradient, bf16 products stay near float32's, noise depends on place only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.config.schema import LoraConfig
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.lora import init_adapter
from burnish.models.transformer import MLP_TOKENS, Adapter, Params, Precision, Remat, dot, forward, init, vocab_logits
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config

CONFIG = tiny_config("qwen3")
TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
RULE = Visibility(jnp.ones_like(TOKENS), jnp.zeros_like(TOKENS))


def gradient(
    params: Params, *, config: ModelConfig = CONFIG, tokens: Array = TOKENS, remat: Remat = False, precision: Precision = "f32"
) -> Params:
    rule = Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))

    def loss(params: Params) -> Array:
        return jnp.sin(forward(config, params, tokens, tokens, rule, remat=remat, precision=precision)).mean()

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, "nested"])
@pytest.mark.parametrize("length", [12, MLP_TOKENS], ids=["short", "MLP in two parts"])
def test_computing_layers_again_changes_no_gradient(remat: Remat, length: int) -> None:
    """Six layers, so that nested means two groups of three."""
    config = replace(CONFIG, num_layers=6)
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) % config.vocab_size, (2, length))
    params = lively_params(config)
    expected, found = (gradient(params, config=config, tokens=tokens, remat=r) for r in (False, remat))
    for kept, again in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(again, kept, atol=1e-6)


def test_an_adapter_is_scanned_with_its_layers_in_groups() -> None:
    config = replace(CONFIG, num_layers=6)
    adapter = init_adapter(config, LoraConfig(rank=2), jax.random.key(0))
    pairs = jax.tree.map(lambda x: x + 0.1, adapter.pairs)
    params = lively_params(config)
    plain, nested = (
        forward(config, params, TOKENS, TOKENS, RULE, adapter=Adapter(pairs, adapter.scale), remat=remat) for remat in (False, "nested")
    )
    np.testing.assert_allclose(nested, plain, atol=1e-5)


@pytest.mark.slow
def test_bf16_gradients_point_where_float32_gradients_do() -> None:
    """Rounding the operands and the cotangents of products turns no leaf's gradient by more than a few degrees."""
    params = lively_params(CONFIG)
    exact, rounded = gradient(params), gradient(params, precision="bf16")
    for (path, one), other in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(rounded), strict=True):
        cosine = float(jnp.vdot(one, other) / (jnp.linalg.norm(one) * jnp.linalg.norm(other) + 1e-30))
        assert jax.tree_util.keystr(path, simple=True) == "head" or cosine > 0.99, (path, cosine)


def test_bf16_products_have_float32_results() -> None:
    """1 + 2^-10 isn't a bfloat16 but is a sum of products of two; a bfloat16 result would lose it."""
    x, w = jnp.asarray([[[1.0, 2.0**-10]]]), jnp.ones((2, 1))
    out = dot(x, w, "bf16")
    assert out.dtype == jnp.float32 and out.shape == (1, 1, 1) and float(out[0, 0, 0]) == 1 + 2.0**-10


def test_logits_of_a_bf16_head_take_16_bits_of_the_hidden_state() -> None:
    """1 + 2^-10 is the sum of two bfloat16 numbers; rounded to one it would be 1. In float32 all of it counts."""
    hidden = jnp.asarray([[1 + 2.0**-10, 3.0], [1 + 2.0**-20, 0.0]])
    head = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [-2.0, 1.0]])
    for compute in (vocab_logits, jax.jit(vocab_logits)):
        out = compute(hidden, head.astype(jnp.bfloat16))
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out[0], [1 + 2.0**-10, 3.0, 1 - 2.0**-9])
        np.testing.assert_array_equal(compute(hidden, head), hidden @ head.T)


def test_a_leaf_starts_the_same_whatever_the_others_sizes() -> None:
    small, large = init(CONFIG, jax.random.key(3)), init(replace(CONFIG, mlp_width=96), jax.random.key(3))
    np.testing.assert_array_equal(small["layers"]["q"], large["layers"]["q"])
    assert not np.array_equal(small["layers"]["q"][0], small["layers"]["q"][1])


def test_layers_of_several_kinds_are_one_program_whatever_their_number() -> None:
    """Gemma 3's windows and two RoPEs are scanned inputs: 12 layers trace to as many operations as 2, gradient included."""

    def operations(num_layers: int) -> int:
        config = tiny_config("gemma3_text", num_layers=num_layers)
        shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
        run = jax.grad(lambda params: jnp.sin(forward(config, params, TOKENS, TOKENS, RULE)).mean())
        return str(jax.make_jaxpr(run)(shapes)).count(" = ")

    assert operations(12) == operations(2)
