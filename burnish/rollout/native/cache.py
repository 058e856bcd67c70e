"""The engine's KV cache: one pair of arrays a layer, donated to every program that touches it.

Owns the layout, the capacity and cached attention. Keys lie as [S, K, h, C] and values as [S, K, C, h], so that both products of decoding
run along the last axis: 2.6 times faster on a CPU than with both as [S, K, C, h], 1.8 times than [S, C, K, h]. The capacity follows the
longest sequence, in powers of two: attention reads all of it, and each size is a compiled program. Who sits in which slot is the
scheduler's business.

On a mesh, slots are spread over `data` and `fsdp` as the rows of a batch are, and heads over `tp` (`Spread`).

Axes: S slots, R prefilled rows, C capacity, P padded prompt length, H/K query/key heads, h head_dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from burnish.models.config import ModelConfig
from burnish.models.transformer import Precision, capped

_BLOCK = 64  # positions that are summed together, whatever the capacity


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the dtype that attention multiplies."""

    keys: Float[Array, "S K h C"]
    values: Float[Array, "S K C h"]


Cache = tuple[LayerCache, ...]


class Spread(NamedTuple):
    """Where the engine's arrays lie on a mesh. slots: those that have one entry a slot, on their first axis; cache: keys and values."""

    slots: NamedSharding
    cache: NamedSharding

    @classmethod
    def over(cls, mesh: Mesh, *, slots: int) -> Spread:
        """Slots over `data` and `fsdp` where these divide them, else all of them everywhere; heads over `tp`."""
        rows = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
        spread = rows if slots % math.prod(mesh.shape[axis] for axis in rows) == 0 else ()
        heads = "tp" if "tp" in mesh.shape else None
        return cls(NamedSharding(mesh, PartitionSpec(spread)), NamedSharding(mesh, PartitionSpec(spread, heads)))


def kept(cache: LayerCache, spread: Spread | None) -> LayerCache:
    """Inside a program: the cache where it was, so that a donated one is written in place."""
    if spread is None:
        return cache
    return LayerCache(*(jax.lax.with_sharding_constraint(array, spread.cache) for array in cache))


def capacity_for(length: int) -> int:
    """64, 128, 256, …: the smallest that holds `length` positions."""
    return max(_BLOCK, 1 << (length - 1).bit_length())


def allocate(config: ModelConfig, *, slots: int, capacity: int, precision: Precision, place: Sharding) -> Cache:
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    heads, head_dim = config.num_kv_heads, config.head_dim
    return tuple(
        LayerCache(
            jnp.zeros((slots, heads, head_dim, capacity), dtype, device=place),
            jnp.zeros((slots, heads, capacity, head_dim), dtype, device=place),
        )
        for _ in range(config.num_layers)
    )


@partial(jax.jit, static_argnames=("capacity", "spread"))
def resize(cache: Cache, *, capacity: int, spread: Spread | None = None) -> Cache:
    """The same cache with room for more positions, or without its last ones."""

    def one(array: Array, axis: int) -> Array:
        kept = jax.lax.slice_in_dim(array, 0, min(capacity, array.shape[axis]), axis=axis)
        pads = [(0, capacity - kept.shape[axis] if i == axis else 0) for i in range(array.ndim)]
        return jnp.pad(kept, pads)

    return tuple(kept(LayerCache(one(layer.keys, 3), one(layer.values, 2)), spread) for layer in cache)


def insert(cache: LayerCache, k: Float[Array, "R P K h"], v: Float[Array, "R P K h"], source: Int[Array, " S"]) -> LayerCache:
    """Give each slot the prefilled row `source[slot]`; slots with -1 keep what they hold. Several slots may take the same row."""
    taken, rows, length = (source >= 0)[:, None, None, None], jnp.maximum(source, 0), k.shape[1]
    keys = jnp.take(k.transpose(0, 2, 3, 1).astype(cache.keys.dtype), rows, axis=0)
    values = jnp.take(v.transpose(0, 2, 1, 3).astype(cache.values.dtype), rows, axis=0)
    return LayerCache(
        cache.keys.at[..., :length].set(jnp.where(taken, keys, cache.keys[..., :length])),
        cache.values.at[:, :, :length].set(jnp.where(taken, values, cache.values[:, :, :length])),
    )


def append(cache: LayerCache, k: Float[Array, "S K h"], v: Float[Array, "S K h"], positions: Int[Array, " S"]) -> LayerCache:
    """Write one position of every slot."""
    slots = jnp.arange(positions.shape[0])
    return LayerCache(
        cache.keys.at[slots, :, :, positions].set(k.astype(cache.keys.dtype)),
        cache.values.at[slots, :, positions].set(v.astype(cache.values.dtype)),
    )


def attend(
    q: Float[Array, "S H h"],
    cache: LayerCache,
    positions: Int[Array, " S"],
    *,
    window: Array | np.ndarray | int | None = None,
    cap: float | None = None,
) -> Float[Array, "S H h"]:
    """softmax(q·k / sqrt(h)) v over positions 0..positions[slot] of each slot, or the last `window` of them; scores go through `cap`.

    Sums over positions are products over blocks of a fixed size, or pairwise, so a slot's result has the same bits at every capacity: a
    compiler may order a plain sum differently at each size, but here what lies beyond a slot's position only adds exact zeros.
    """
    slots, heads, head_dim = q.shape
    kv_heads, capacity, dtype = cache.keys.shape[1], cache.keys.shape[3], cache.keys.dtype
    grouped = (q * head_dim**-0.5).reshape(slots, kv_heads, -1, head_dim).astype(dtype)
    scores = capped(jnp.einsum("skgh,skhc->skgc", grouped, cache.keys, preferred_element_type=jnp.float32), cap)
    places = jnp.arange(capacity)[None]
    seen = places <= positions[:, None]
    if window is not None:
        seen &= positions[:, None] - places < window
    seen = seen[:, None, None]
    highest = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.exp(jnp.where(seen, scores - highest, -jnp.inf))
    weight_blocks = weights.astype(dtype).reshape(*scores.shape[:-1], -1, _BLOCK)
    value_blocks = cache.values.reshape(slots, kv_heads, -1, _BLOCK, head_dim)
    mixed = jnp.einsum("skgbc,skbch->skbgh", weight_blocks, value_blocks, preferred_element_type=jnp.float32)
    return (_sum_pairs(mixed, 2).squeeze(2) / _sum_pairs(weights, 3)).reshape(slots, heads, head_dim)


def _sum_pairs(x: Array, axis: int) -> Array:
    """Sum over an axis whose size is a power of two, neighbours first: ((0 + 1) + (2 + 3)) + …; the axis stays, of size 1."""
    while x.shape[axis] > 1:
        x = jax.lax.slice_in_dim(x, 0, None, 2, axis) + jax.lax.slice_in_dim(x, 1, None, 2, axis)
    return x
