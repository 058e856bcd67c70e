"""Moves arrays to another sharding, on the same devices or on others, block by block along `plan`.

Owns the moving. No block goes to a device that doesn't keep it, so nothing is gathered anywhere. (`jax.device_put` to a sharding with other
blocks goes through the host, whole.) Blocks go from device to device one by one: no collective runs, so other threads' programs on these
devices needn't be kept away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from burnish.sync.plan import Move, Region, plan, region_of


def reshard(array: Any, target: Sharding) -> jax.Array:
    """A copy of `array` that lies as `target`: none of its buffers is the array's, so either may be donated.

    array: a jax array whose devices are this process's, or one on the host.
    """
    if not isinstance(array, jax.Array):
        return jax.device_put(np.array(array), target)
    if array.sharding.is_equivalent_to(target, array.ndim):
        return jax.device_put(array, target, may_alias=False)
    shards = {shard.device: shard for shard in array.addressable_shards}
    pieces = []
    for _, moves in itertools.groupby(plan(array.shape, array.dtype.itemsize, array.sharding, target).moves, key=lambda move: move.target):
        pieces.append(_assemble(list(moves), shards, array.shape))
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


def placed(array: jax.Array, target: Sharding) -> jax.Array:
    """`array` itself where it lies as `target` already, else a copy that does."""
    return jax.device_put(array, target) if array.sharding.is_equivalent_to(target, array.ndim) else reshard(array, target)


def _assemble(moves: Sequence[Move], shards: dict[Any, Any], shape: tuple[int, ...]) -> jax.Array:
    """The piece of one device, put together there."""
    arrived = []
    for move in moves:
        shard = shards[move.source]
        own = region_of(shard.index, shape)
        block = shard.data
        if own != move.region:
            block = block[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(move.region, own, strict=True))]
        arrived.append(jax.device_put(block, move.target, may_alias=False))
    return _joined(arrived, [move.region for move in moves], 0)


def _joined(blocks: Sequence[jax.Array], regions: Sequence[Region], axis: int) -> jax.Array:
    """One array of the blocks of a grid in row-major order, joined along `axis` and all that follow it."""
    if len(blocks) == 1:
        return blocks[0]
    parts = []
    for _, members in itertools.groupby(range(len(blocks)), key=lambda i: regions[i][axis]):
        inside = list(members)
        parts.append(_joined([blocks[i] for i in inside], [regions[i] for i in inside], axis + 1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
