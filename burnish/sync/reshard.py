"""Moves arrays to another sharding, on the same devices or on others, block by block along `plan`.

Owns the moving. No block goes to a device that doesn't keep it, so nothing is gathered anywhere. (`jax.device_put` to a sharding with other
blocks goes through the host, whole.) Blocks go from device to device one by one: no collective runs, so other threads' programs on these
devices needn't be kept away. And the ways between an array of several processes (`jax.distributed`) and one of this process's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from burnish.sync.plan import Move, Region, plan, region_of


def reshard(array: Any, target: Sharding) -> jax.Array:
    """A copy of `array` that lies as `target`: none of its buffers is the array's, so either may be donated.

    array: a jax array whose devices are this process's, or one on the host. target: may be on devices of several processes; each then
    gives its own devices their blocks, of an array that all of them have.
    """
    if not isinstance(array, jax.Array):
        return from_host(np.array(array), target)
    if array.sharding.is_equivalent_to(target, array.ndim):
        return jax.device_put(array, target, may_alias=False)
    shards = {shard.device: shard for shard in array.addressable_shards}
    pieces = []
    for device, moves in itertools.groupby(plan(array.shape, array.dtype.itemsize, array.sharding, target).moves, key=lambda m: m.target):
        if device in target.addressable_devices:
            pieces.append(_assemble(list(moves), shards, array.shape))
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


def placed(array: jax.Array, target: Sharding) -> jax.Array:
    """`array` itself where it lies as `target` already, else a copy that does."""
    return jax.device_put(array, target) if array.sharding.is_equivalent_to(target, array.ndim) else reshard(array, target)


def from_host(tree: Any, target: Sharding) -> Any:
    """Arrays on the host, put where `target` says; where that is on several processes' devices, all of them have the same arrays."""
    if target.is_fully_addressable:
        return jax.device_put(tree, target)
    return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, target, lambda index: array[index]), tree)


def whole_here(array: jax.Array) -> jax.Array:
    """The whole of an array of several processes on those of its devices that are this process's; an array of this process's is returned.

    All processes ask together: it is a program over all the devices, in which each receives what its process lacks. The array stays cut
    over the process's devices, along a dimension that was cut, so none of them holds the whole; what was whole on all is shared instead.
    """
    if array.is_fully_addressable:
        return array
    where, spec = array.sharding, PartitionSpec()
    if not (isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh)):
        raise ValueError(f"an array of several processes must lie on a mesh, this one lies as {where}")
    if not array.is_fully_replicated:
        num_local = len(where.addressable_devices)
        dimension = _innermost_cut(where)
        if array.shape[dimension] % num_local == 0:
            spec = PartitionSpec(*(None,) * dimension, "local")
        array = _relaid(NamedSharding(Mesh(where.mesh.devices.reshape(-1, num_local), ("process", "local")), spec))(array)
    shards = array.addressable_shards
    here = NamedSharding(Mesh(np.array([shard.device for shard in shards]), ("local",)), spec)
    return jax.make_array_from_single_device_arrays(array.shape, here, [shard.data for shard in shards])


def _innermost_cut(where: NamedSharding) -> int:
    """The dimension that the innermost mesh axis cuts, of those that cut: neighbours have its pieces. Cut along another, XLA would put the
    whole on every device on the way."""
    order = {name: place for place, name in enumerate(where.mesh.axis_names)}
    axes = [(part,) if isinstance(part, str) else part or () for part in where.spec]
    return max(range(len(axes)), key=lambda dimension: max((order[name] for name in axes[dimension]), default=-1))


def on_host(array: Any) -> np.ndarray:
    """An array's numbers; as for `whole_here`, all processes ask together where it is theirs."""
    return np.asarray(whole_here(array) if isinstance(array, jax.Array) else array)


@functools.cache
def _relaid(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=target)


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
