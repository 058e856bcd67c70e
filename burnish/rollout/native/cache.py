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


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the dtype that attention multiplies."""

    keys: Float[Array, "S K C h"]
    values: Float[Array, "S K C h"]


Cache = tuple[LayerCache, ...]


def allocate(config: ModelConfig, *, slots: int, context: int, precision: Precision) -> Cache:
    shape = (slots, config.num_kv_heads, context, config.head_dim)
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


def attend(q: Float[Array, "S H h"], cache: LayerCache, positions: Int[Array, " S"], *, span: int) -> Float[Array, "S H h"]:
    """softmax(q·k / sqrt(h)) v over positions 0..positions[slot] of each slot; only the first `span` are read."""
    slots, heads, head_dim = q.shape
    keys, values = cache.keys[:, :, :span], cache.values[:, :, :span]
    grouped = (q * head_dim**-0.5).reshape(slots, keys.shape[1], -1, head_dim).astype(keys.dtype)
    scores = jnp.einsum("skgh,skch->skgc", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(span)[None] <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    mixed = jnp.einsum("skgc,skch->skgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return mixed.reshape(slots, heads, head_dim)
