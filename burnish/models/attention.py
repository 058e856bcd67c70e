"""Attention over packed rows, from segment metadata: chunked, no `[T, T]` array, no dense mask.

Owns the visibility rule and the only attention of training and scoring; cached attention of the engine is the engine's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Visibility(NamedTuple):
    """Who sees whom: query i sees key j iff j <= i, segments[j] != 0 and segments[j] is segments[i] or parents[i].

    segments: 0 is padding, else a number that is unique in the row. parents: the segment of the shared prompt, 0 for none.
    """

    segments: Int[Array, "B T"]
    parents: Int[Array, "B T"]


def visible(rule: Visibility, queries: Int[Array, " q"], keys: Int[Array, " k"]) -> Bool[Array, "B q k"]:
    """The rule for two sets of columns."""
    key_segments = rule.segments[:, keys][:, None, :]
    own, parent = rule.segments[:, queries][:, :, None], rule.parents[:, queries][:, :, None]
    causal = (keys[None, :] <= queries[:, None])[None]
    return causal & (key_segments != 0) & ((key_segments == own) | (key_segments == parent))


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    rule: Visibility,
    *,
    precision: Literal["f32", "bf16"] = "f32",
    chunk: int = 128,
) -> Float[Array, "B T H h"]:
    """softmax(q·k / sqrt(h)) v over what each query may see, one chunk of queries at a time; rows that see nothing give 0."""
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    padded = -(-length // chunk) * chunk
    q = jnp.pad(q, ((0, 0), (0, padded - length), (0, 0), (0, 0))) * head_dim**-0.5
    q = q.reshape(rows, padded // chunk, chunk, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1)
    keys = jnp.arange(length)

    @jax.checkpoint
    def one(inputs: tuple[Array, Array]) -> Array:
        block, start = inputs
        columns = jnp.minimum(start + jnp.arange(chunk), length - 1)
        mask = visible(rule, columns, keys)[:, None, None]
        scores = jnp.einsum("bqkgh,bskh->bkgqs", block.astype(dtype), k.astype(dtype), preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        weights = jnp.where(mask, weights, 0.0)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32)

    out = jax.lax.map(one, (q, jnp.arange(padded // chunk) * chunk))
    return out.swapaxes(0, 1).reshape(rows, padded, heads, head_dim)[:, :length]
