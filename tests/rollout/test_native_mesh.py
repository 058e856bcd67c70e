"""The native engine on a mesh: the samples of one device, weights and cache in pieces, updates from any sharding."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from burnish.config.errors import UserError
from burnish.models import transformer
from burnish.models.sharding import shardings
from burnish.rollout.native.engine import NativeEngine
from burnish.sync.reshard import reshard
from burnish.types import Completion, Request, SamplingParams
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import CONFIG, random_adapter, random_params, run

EVEN = replace(CONFIG, vocab_size=96)
PARAMS = random_params(EVEN)


def mesh_on(devices: list[int], axes: dict[str, int]) -> Mesh:
    found = np.array([jax.devices()[i] for i in devices]).reshape(tuple(axes.values()))
    return Mesh(found, tuple(axes), (AxisType.Auto,) * len(axes))


MESHES = {
    "tp 2": lambda: mesh_on([4, 5], {"tp": 2}),
    "data 2, tp 2": lambda: mesh_on([3, 2, 1, 0], {"data": 2, "tp": 2}),
    "data 3": lambda: mesh_on([1, 2, 3], {"data": 3}),
    "fsdp 2": lambda: mesh_on([6, 7], {"fsdp": 2}),
}
REQUESTS = [
    Request((3, 5, 7, *range(10, 10 + i)), SamplingParams(max_tokens=9, temperature=temperature), seed_path=(1, i))
    for i, temperature in enumerate([0.0, 1.0, 0.7, 1.0, 1.0])
]


def sample(engine: NativeEngine) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))

    return run(all_of_them())


def assert_close(left: list[Completion], right: list[Completion]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logps, other.logps, atol=2e-5)


def push(engine: NativeEngine, leaves: dict[str, Any], version: int) -> None:
    async def update() -> None:
        await engine.begin_update(version)
        for name, leaf in leaves.items():
            await engine.push(name, leaf)
        await engine.commit_update()

    run(update())


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """What one device samples."""
    engine = NativeEngine(EVEN, PARAMS, **OPTIONS)
    try:
        return sample(engine)
    finally:
        run(engine.close())


OPTIONS: dict[str, Any] = {"decode_text": str, "context": 64, "slots": 4, "prefill_rows": 2, "decode_chunk": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_samples_are_those_of_one_device(make_engine: MakeEngine, alone: list[Completion], name: str) -> None:
    """Five requests in four slots."""
    mesh = MESHES[name]()
    engine = make_engine(PARAMS, EVEN, **OPTIONS, mesh=mesh)
    assert_close(sample(engine), alone)
    assert engine.mesh is mesh and engine._runner.memory.cache[0].keys.sharding.device_set == {*mesh.devices.flat}


def test_weights_and_cache_are_cut_over_tp_and_slots_over_data(make_engine: MakeEngine) -> None:
    engine = make_engine(PARAMS, EVEN, **OPTIONS, mesh=MESHES["data 2, tp 2"]())
    weights: Any = engine._runner.layout.weights
    layer, cache = weights.layers[0], engine._runner.memory.cache[0]
    assert layer["q"].sharding.shard_shape(layer["q"].shape) == (32, 16) and layer["o"].sharding.shard_shape(layer["o"].shape) == (16, 32)
    assert cache.keys.sharding.shard_shape(cache.keys.shape) == (1, 2, 1, 8, 64) and weights.embed.sharding.spec[0] == "tp"
    odd = make_engine(PARAMS, EVEN, **(OPTIONS | {"slots": 3}), mesh=MESHES["data 2, tp 2"]())
    assert odd._runner.memory.cache[0].keys.sharding.shard_shape(odd._runner.memory.cache[0].keys.shape) == (1, 3, 1, 8, 64), (
        "3 slots over 2 groups: all in both"
    )


@pytest.mark.slow
@pytest.mark.parametrize("with_adapter", [False, True], ids=["every weight", "adapter"])
def test_an_update_from_another_mesh_is_that_of_one_device_and_survives_donation(make_engine: MakeEngine, with_adapter: bool) -> None:
    """From fsdp 4 to tp 2, on other devices and on two of them; then the trainer's arrays are deleted."""
    adapter = random_adapter(EVEN) if with_adapter else None
    if adapter is None:
        new = {name: leaf for name, leaf in transformer.init(EVEN, jax.random.key(9)).items() if name != "layers"}
        new |= {f"layers.{name}": 3 * leaf for name, leaf in transformer.init(EVEN, jax.random.key(9))["layers"].items()}
    else:
        halves = random_adapter(EVEN, seed=2).pairs
        new = {f"adapter.{name}.{half}": pair[half] for name, pair in halves.items() for half in pair}
    single = make_engine(PARAMS, EVEN, **OPTIONS, adapter=adapter)
    push(single, new, 1)
    expected = sample(single)
    fsdp = mesh_on([0, 1, 2, 3], {"fsdp": 4})

    def cut(leaf: Any) -> jax.Array:
        axis = next(i for i in range(leaf.ndim) if leaf.shape[i] % 4 == 0)
        return jax.device_put(leaf, NamedSharding(fsdp, PartitionSpec(*[None] * axis, "fsdp")))

    for target in ("tp 2", "data 2, tp 2"):
        engine = make_engine(PARAMS, EVEN, **OPTIONS, adapter=adapter, mesh=MESHES[target]())
        theirs = {name: cut(leaf) for name, leaf in new.items()}
        push(engine, theirs, 1)
        for leaf in theirs.values():
            leaf.delete()
        assert_close(sample(engine), expected)


def test_on_an_equal_mesh_an_adapters_base_is_shared_and_nothing_else_is(make_engine: MakeEngine) -> None:
    mesh = MESHES["data 2, tp 2"]()
    base = jax.tree.map(reshard, PARAMS, shardings(transformer.spec(EVEN), mesh))
    used = {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base) for shard in leaf.addressable_shards}

    def pointers(engine: NativeEngine) -> set[int]:
        held = jax.tree.leaves((engine._runner.layout.weights, dict(engine._runner.layout.stacked)))
        return {shard.data.unsafe_buffer_pointer() for leaf in held for shard in leaf.addressable_shards}

    assert not used & pointers(make_engine(base, EVEN, **OPTIONS, mesh=mesh))
    shared = used & pointers(make_engine(base, EVEN, **OPTIONS, mesh=mesh, adapter=random_adapter(EVEN)))
    names = ("embed", "head", "final_norm", "layers.q", "layers.o", "layers.down")
    leaves = [base["layers"][n.removeprefix("layers.")] if "." in n else base[n] for n in names]
    assert shared == {shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards}


def test_a_mesh_that_cuts_through_a_head_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(UserError, match="tp=4 doesn't divide num_kv_heads=2"):
        make_engine(PARAMS, EVEN, **OPTIONS, mesh=mesh_on([0, 1, 2, 3], {"tp": 4}))
