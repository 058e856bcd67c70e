"""The decoder's arithmetic: rematerialising changes no gradient, bf16 products stay near float32's, noise depends on place only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from burnish.models.attention import Visibility
from burnish.models.transformer import Params, Precision, dot, forward, init
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config

CONFIG = tiny_config("qwen3")
TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
RULE = Visibility(jnp.ones_like(TOKENS), jnp.zeros_like(TOKENS))


def gradient(params: Params, *, remat: bool = False, precision: Precision = "f32") -> Params:
    def loss(params: Params) -> Array:
        return jnp.sin(forward(CONFIG, params, TOKENS, TOKENS, RULE, remat=remat, precision=precision)).mean()

    return jax.jit(jax.grad(loss))(params)


def test_computing_layers_again_changes_no_gradient() -> None:
    params = lively_params(CONFIG)
    for kept, again in zip(jax.tree.leaves(gradient(params)), jax.tree.leaves(gradient(params, remat=True)), strict=True):
        np.testing.assert_allclose(again, kept, atol=1e-6)


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


def test_a_leaf_starts_the_same_whatever_the_others_sizes() -> None:
    small, large = init(CONFIG, jax.random.key(3)), init(replace(CONFIG, mlp_width=96), jax.random.key(3))
    np.testing.assert_array_equal(small["layers"]["q"], large["layers"]["q"])
    assert not np.array_equal(small["layers"]["q"][0], small["layers"]["q"][1])
