"""The engine's KV cache: one pair of arrays a layer, allocated once and donated to every program that touches it.

Owns the layout and cached attention. [S, K, C, h] keeps a head's positions together, which is what decoding reads. Who sits in which slot
is the scheduler's business.

Axes: S slots, R prefilled rows, C context, P padded prompt length, H/K query/key heads, h head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from burnish.models.config import ModelConfig
from burnish.models.transformer import Precision

_BLOCK = 64  # positions that attention reads at a time


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the dtype that attention multiplies."""

    keys: Float[Array, "S K C h"]
    values: Float[Array, "S K C h"]


Cache = tuple[LayerCache, ...]


def allocate(config: ModelConfig, *, slots: int, context: int, precision: Precision) -> Cache:
    """Zeros for `context` positions, rounded up to whole blocks."""
    shape = (slots, config.num_kv_heads, -(-context // _BLOCK) * _BLOCK, config.head_dim)
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def insert(cache: LayerCache, k: Float[Array, "R P K h"], v: Float[Array, "R P K h"], source: Int[Array, " S"]) -> LayerCache:
    """Give each slot the prefilled row `source[slot]`; slots with -1 keep what they hold. Several slots may take the same row."""
    taken = (source >= 0)[:, None, None, None]

    def one(old: Array, rows: Array) -> Array:
        length = rows.shape[1]
        new = jnp.take(rows.swapaxes(1, 2).astype(old.dtype), jnp.maximum(source, 0), axis=0)
        return old.at[:, :, :length].set(jnp.where(taken, new, old[:, :, :length]))

    return LayerCache(one(cache.keys, k), one(cache.values, v))


def append(cache: LayerCache, k: Float[Array, "S K h"], v: Float[Array, "S K h"], positions: Int[Array, " S"]) -> LayerCache:
    """Write one position of every slot."""
    slots = jnp.arange(positions.shape[0])
    return LayerCache(
        cache.keys.at[slots, :, positions].set(k.astype(cache.keys.dtype)),
        cache.values.at[slots, :, positions].set(v.astype(cache.values.dtype)),
    )


def attend(q: Float[Array, "S H h"], cache: LayerCache, positions: Int[Array, " S"]) -> Float[Array, "S H h"]:
    """softmax(q·k / sqrt(h)) v over positions 0..positions[slot] of each slot.

    Streams blocks of the cache with a running maximum (Milakov & Gimelshein, 2018, arXiv:1805.02867) up to the furthest slot's last one.
    Blocks beyond a slot's own position change none of its bits (times exp(0), plus 0), so its result doesn't depend on the others, and one
    program serves every length.
    """
    slots, heads, head_dim = q.shape
    kv_heads, dtype = cache.keys.shape[1], cache.keys.dtype
    grouped = (q * head_dim**-0.5).reshape(slots, kv_heads, -1, head_dim).astype(dtype)
    num_blocks = positions.max() // _BLOCK + 1

    def one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        index, highest, total, mixed = carry
        start = index * _BLOCK
        keys, values = (jax.lax.dynamic_slice_in_dim(whole, start, _BLOCK, axis=2) for whole in cache)
        seen = (start + jnp.arange(_BLOCK))[None, None, None] <= positions[:, None, None, None]
        scores = jnp.einsum("skgh,skch->skgc", grouped, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, scores, -1e30)
        risen = jnp.maximum(highest, scores.max(-1))
        shrink, weights = jnp.exp(highest - risen), jnp.where(seen, jnp.exp(scores - risen[..., None]), 0.0)
        new = jnp.einsum("skgc,skch->skgh", weights.astype(dtype), values, preferred_element_type=jnp.float32)
        return index + 1, risen, total * shrink + weights.sum(-1), mixed * shrink[..., None] + new

    zeros = jnp.zeros(grouped.shape[:-1])
    carry = (jnp.int32(0), zeros - 1e30, zeros, jnp.zeros(grouped.shape))
    _, _, total, mixed = jax.lax.while_loop(lambda carry: carry[0] < num_blocks, one, carry)
    return (mixed / total[..., None]).reshape(slots, heads, head_dim)
