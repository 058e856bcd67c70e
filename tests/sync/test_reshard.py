"""What moves between shardings: right numbers, fresh buffers, and no byte more than the index maps say."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from burnish.sync.plan import plan
from burnish.sync.reshard import placed, reshard

SHAPE = (4, 8, 16)


def on(devices: list[int], axes: dict[str, int], *spec: Any) -> NamedSharding:
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]).reshape(tuple(axes.values())), tuple(axes), (AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, P(*spec))


def alone(device: int) -> Sharding:
    return SingleDeviceSharding(jax.devices()[device])


SHARDINGS = {
    "one device": lambda: alone(0),
    "another": lambda: alone(5),
    "fsdp 4": lambda: on([0, 1, 2, 3], {"fsdp": 4}, None, "fsdp"),
    "tp 4 on the same": lambda: on([0, 1, 2, 3], {"tp": 4}, None, None, "tp"),
    "tp 4, another order": lambda: on([3, 1, 0, 2], {"tp": 4}, None, None, "tp"),
    "fsdp 2, tp 2": lambda: on([0, 1, 2, 3], {"fsdp": 2, "tp": 2}, None, "fsdp", "tp"),
    "data 2, tp 2": lambda: on([0, 1, 2, 3], {"data": 2, "tp": 2}, None, None, "tp"),
    "tp 2 on others": lambda: on([4, 5], {"tp": 2}, None, None, "tp"),
    "whole on four": lambda: on([4, 5, 6, 7], {"data": 4}),
}
PAIRS = list(itertools.product(SHARDINGS, SHARDINGS))


def bytes_needed(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> dict[Any, int]:
    """Of each target device, the numbers of its piece that it hasn't, counted one by one with masks; no planner."""
    needed = {}
    has = source.devices_indices_map(shape)
    for device, index in target.devices_indices_map(shape).items():
        lacks = np.zeros(shape, bool)
        lacks[index] = True
        if device in has:
            lacks[has[device]] = False
        needed[device] = int(lacks.sum()) * itemsize
    return needed


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_numbers_arrive_in_buffers_of_their_own(source: str, target: str) -> None:
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    before, where = jax.device_put(values, SHARDINGS[source]()), SHARDINGS[target]()
    after = reshard(before, where)
    assert after.sharding == where
    used = {shard.data.unsafe_buffer_pointer() for shard in before.addressable_shards}
    assert not used & {shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards}
    before.delete()
    np.testing.assert_array_equal(np.asarray(after), values)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_plans_bytes_are_those_of_the_index_maps(source: str, target: str) -> None:
    here, there = SHARDINGS[source](), SHARDINGS[target]()
    found = plan(SHAPE, 2, here, there)
    arriving: dict[Any, int] = dict.fromkeys(there.device_set, 0)
    for (sender, receiver), size in found.bytes_by_link().items():
        assert sender != receiver and sender in here.device_set
        arriving[receiver] += size
    assert arriving == bytes_needed(here, there, SHAPE, 2)
    assert found.total_bytes == sum(arriving.values())
    for device, index in there.devices_indices_map(SHAPE).items():
        assert sum(move.size for move in found.moves if move.target == device) == np.zeros(SHAPE)[index].size


def test_nothing_crosses_where_both_agree_and_a_quarter_of_a_quarter_stays() -> None:
    fsdp, tp = SHARDINGS["fsdp 4"](), SHARDINGS["tp 4 on the same"]()
    assert plan(SHAPE, 4, fsdp, fsdp).total_bytes == 0
    size = 4 * np.prod(SHAPE)
    assert plan(SHAPE, 4, fsdp, tp).total_bytes == size * 3 / 4
    assert plan(SHAPE, 4, tp, SHARDINGS["tp 2 on others"]()).total_bytes == size


def test_whole_copies_share_the_sending() -> None:
    found = plan((8,), 4, on([0, 1], {"data": 2}), on([2, 3], {"data": 2}))
    assert sorted(found.bytes_by_link().values()) == [32, 32] and len({sender for sender, _ in found.bytes_by_link()}) == 2


def test_placed_shares_what_is_there_already() -> None:
    fsdp = SHARDINGS["fsdp 4"]()
    here = jax.device_put(jnp.ones(SHAPE), fsdp)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in here.addressable_shards]
    assert [shard.data.unsafe_buffer_pointer() for shard in placed(here, fsdp).addressable_shards] == pointers
    assert not {*pointers} & {s.data.unsafe_buffer_pointer() for s in placed(here, SHARDINGS["tp 2 on others"]()).addressable_shards}


def test_arrays_of_the_host_are_copied_too() -> None:
    values = np.ones(SHAPE, np.float32)
    after = reshard(values, alone(3))
    values[:] = 2
    assert float(after.max()) == 1 and after.devices() == {jax.devices()[3]}
