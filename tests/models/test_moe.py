"""Experts: values and gradients equal a loop over tokens and experts; routing is float32 and follows the configuration."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.models.config import MoeConfig
from burnish.models.moe import expert_mlp, grouped_dot, route

EXPERTS, WIDTH, INNER, TOKENS = 5, 12, 8, 9


def layer_and_tokens() -> tuple[dict[str, Array], Array]:
    shapes = {"router": (WIDTH, EXPERTS), "gate": (EXPERTS, WIDTH, INNER), "up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    layer = {name: jax.random.normal(key, shape) * 0.5 for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    return layer, jax.random.normal(keys[-1], (3, TOKENS // 3, WIDTH))


def dense_loop(moe: MoeConfig, layer: dict[str, Array], x: Array) -> Array:
    """Every expert computes every token; a token's own ones are then weighed. Weights from the definition, expert by expert."""
    flat = x.reshape(-1, WIDTH)
    probs = jax.nn.softmax(flat @ layer["router"], axis=-1)
    kept = jnp.sort(probs, axis=-1)[:, -moe.per_token][:, None]
    weights = jnp.where(probs >= kept, probs, 0.0)
    if moe.normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.zeros_like(flat)
    for expert in range(EXPERTS):
        inner = jax.nn.silu(flat @ layer["gate"][expert]) * (flat @ layer["up"][expert])
        out = out + weights[:, expert : expert + 1] * (inner @ layer["down"][expert])
    return out.reshape(x.shape)


@pytest.mark.parametrize(("per_token", "normalised"), [(1, False), (2, True), (2, False), (5, True)])
def test_values_and_gradients_equal_a_dense_loop(per_token: int, normalised: bool) -> None:
    moe = MoeConfig(EXPERTS, per_token, normalised)
    layer, x = layer_and_tokens()

    def outputs(f: Any, layer: dict[str, Array], x: Array) -> Any:
        out, pull = jax.vjp(f, layer, x)
        return out, pull(jnp.cos(out))

    def both(layer: dict[str, Array], x: Array) -> tuple[Any, Any]:
        ours = outputs(lambda layer, x: expert_mlp(moe, layer, x, jax.nn.silu, "f32")[0], layer, x)
        return ours, outputs(lambda layer, x: dense_loop(moe, layer, x), layer, x)

    ours, wanted = jax.jit(both)(layer, x)
    for (path, one), other in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert float(jnp.abs(ours[1][0]["router"]).max()) > 1e-2, "the router learns"


def test_a_tokens_result_does_not_depend_on_its_neighbours() -> None:
    """No expert has a limit: all tokens may want the same one, and none is dropped."""
    moe = MoeConfig(EXPERTS, 2, normalised=True)
    layer, x = layer_and_tokens()
    crowd = jnp.broadcast_to(x[:1, :1], x.shape)
    run = jax.jit(lambda x: expert_mlp(moe, layer, x, jax.nn.silu, "f32")[0])
    np.testing.assert_allclose(run(crowd), np.broadcast_to(run(x)[:1, :1], x.shape), atol=1e-6)


def test_routing_by_hand() -> None:
    """Logits 2, 1, 0: probabilities .665241, .244728, .090031; of the two best, made to sum to 1: .731059 and .268941."""
    x, router = jnp.ones((1, 1)), jnp.asarray([[2.0, 1.0, 0.0]])
    routing = route(MoeConfig(3, 2, normalised=False), x, router)
    assert routing.experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(routing.weights, [[0.665241, 0.244728]], atol=1e-6)
    np.testing.assert_allclose(routing.probs, [[0.665241, 0.244728, 0.090031]], atol=1e-6)
    np.testing.assert_allclose(route(MoeConfig(3, 2, normalised=True), x, router).weights, [[0.731059, 0.268941]], atol=1e-6)


def test_the_router_computes_in_float32_at_bf16() -> None:
    """Two logits that bfloat16 can't tell apart: 1 and 1 + 2^-9."""
    moe = MoeConfig(2, 1, normalised=True)
    layer = {"gate": jnp.ones((2, 1, 1)), "up": jnp.ones((2, 1, 1)), "down": jnp.asarray([[[1.0]], [[-1.0]]])}
    run = jax.jit(lambda router: expert_mlp(moe, layer | {"router": router}, jnp.ones((1, 1)), jax.nn.silu, "bf16"))
    for better, sign in ((0, 1), (1, -1)):
        router = jnp.ones((1, 2)).at[0, better].add(2.0**-9)
        out, routing = run(router)
        assert int(routing.experts[0, 0]) == better and float(out[0, 0]) * sign > 0


def test_bf16_rounds_operands_only() -> None:
    """Values and gradients stay near float32's, and aren't equal to them."""
    layer, x = layer_and_tokens()
    rows, sizes = x.reshape(-1, WIDTH), jnp.asarray([2, 0, 3, 4, 0], jnp.int32)

    @partial(jax.jit, static_argnums=0)
    def outputs(precision: Any) -> list[Array]:
        out, pull = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, precision), rows, layer["gate"])
        return [out, *pull(jnp.sin(out))]

    for rounded, exact in zip(outputs("bf16"), outputs("f32"), strict=True):
        assert rounded.dtype == jnp.float32
        difference = float(jnp.abs(rounded - exact).max() / jnp.abs(exact).max())
        assert 1e-5 < difference < 2e-2
