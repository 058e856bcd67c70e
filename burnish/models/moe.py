"""Experts in place of a layer's MLP: each token goes through the few that its router prefers (Shazeer et al., 2017, arXiv:1701.06538).

Owns routing, the products of tokens with their experts' matrices, and the balance of the load. Called by `transformer.block`. The router
computes in float32 whatever the precision: a rounded logit would send a token to another expert in sampling than in training.

Tokens are sorted by expert, so that one product over groups of rows (`lax.ragged_dot`) serves all experts; no expert has a limit, so no
token is dropped and a token's result doesn't depend on its neighbours.

Axes: n tokens, k experts a token, E experts, D width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from burnish.models.attention import KEPT
from burnish.models.config import MoeConfig, Precision
from burnish.models.quant import dense


class Load(NamedTuple):
    """What routers did with some tokens; adds up over micro-batches. counts: how many of the tokens' choices fell on each expert; probs:
    the sums of its probabilities; tokens: how many there were."""

    counts: Float[Array, "*L E"]
    probs: Float[Array, "*L E"]
    tokens: Float[Array, "*L"]


class Routing(NamedTuple):
    """Where tokens go. weights: of a token's experts; probs: over all experts, before any are chosen."""

    experts: Int[Array, "*n k"]
    weights: Float[Array, "*n k"]
    probs: Float[Array, "*n E"]


def route(moe: MoeConfig, x: Float[Array, "n D"], router: Float[Array, "D E"]) -> Routing:
    """The experts of the highest softmax probabilities, and these as weights, made to sum to 1 where `normalised`."""
    logits = jax.lax.dot_general(x, router.astype(jnp.float32), (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(probs, moe.per_token)
    if moe.normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(experts, weights, probs)


def load_of(routing: Routing, real: Bool[Array, "*n"]) -> Load:
    """Of one layer; tokens that aren't real (padding) count for nothing."""
    chosen = jax.nn.one_hot(routing.experts, routing.probs.shape[-1]).sum(axis=-2)
    counts, probs = (jnp.sum(jnp.where(real[..., None], x, 0.0), axis=range(real.ndim)) for x in (chosen, routing.probs))
    return Load(jax.lax.stop_gradient(counts), probs, jnp.sum(real, dtype=jnp.float32))


def expert_mlp(
    moe: MoeConfig,
    layer: Mapping[str, Any],
    x: Float[Array, "*n D"],
    activate: Callable[[Array], Array],
    precision: Precision,
) -> tuple[Float[Array, "*n D"], Routing]:
    """The weighted sum of each token's experts: down(activate(gate(x)) · up(x)) of `layer`'s [E, D, F] and [E, F, D]; and the routing."""
    flat = x.reshape(-1, x.shape[-1])
    routing = route(moe, flat, layer["router"])
    chosen = routing.experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=moe.num_experts).astype(jnp.int32)
    rows = jnp.take(jnp.repeat(flat, moe.per_token, axis=0), order, axis=0, unique_indices=True)
    gate = checkpoint_name(grouped_dot(rows, dense(layer["gate"]), sizes, precision), KEPT)
    up = checkpoint_name(grouped_dot(rows, dense(layer["up"]), sizes, precision), KEPT)
    out = grouped_dot(activate(gate) * up, dense(layer["down"]), sizes, precision)
    # Back in the order of tokens by a permutation and a sum, not by adding into places: the order of additions is then always the same.
    out = jnp.take(out, jnp.argsort(order), axis=0, unique_indices=True).reshape(*routing.weights.shape, -1)
    mixed = jnp.sum(out * routing.weights[..., None], axis=1).reshape(x.shape)
    return mixed, Routing(*(a.reshape(*x.shape[:-1], a.shape[-1]) for a in routing))


def grouped_dot(x: Float[Array, "m i"], w: Float[Array, "E i o"], sizes: Int[Array, " E"], precision: Precision) -> Float[Array, "m o"]:
    """`x @ w[e]` for the `sizes[e]` rows of each expert in turn, with a float32 result. At `bf16` operands are rounded to bfloat16, the
    cotangent too."""
    if precision == "bf16":
        return _grouped_bf16(x, w, sizes)
    return jax.lax.ragged_dot(x, w.astype(jnp.float32), sizes, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _grouped_bf16(x: Float[Array, "m i"], w: Float[Array, "E i o"], sizes: Int[Array, " E"]) -> Float[Array, "m o"]:
    return jax.lax.ragged_dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes, preferred_element_type=jnp.float32)


def _grouped_bf16_forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_bf16(x, w, sizes), (x, w, sizes)


def _grouped_bf16_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w, sizes = residuals
    x16, w16, g16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    dx = jax.lax.ragged_dot(g16, w16.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    dw = jax.lax.ragged_dot_general(x16, g16, sizes, _ROWS_CONTRACTED, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype), None


_ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_grouped_bf16.defvjp(_grouped_bf16_forward, _grouped_bf16_backward)
