"""An engine on weights that it was lent: the samples of one that copied them, no buffer of its own, given back when asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish import faults
from burnish.models import transformer
from burnish.models.sharding import shardings
from burnish.rollout.native.cache import allocate
from burnish.rollout.native.decode import Slots, decode
from burnish.rollout.native.host_state import page_table, slot_state
from burnish.rollout.native.layout import Layout
from burnish.rollout.native.lease import Lease
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import CONFIG, generate, random_params, request, run
from tests.rollout.test_native_mesh import EVEN, MESHES, PARAMS


def pointers(tree: Any) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_protocol_holds(check: Check, params: transformer.Params, make_engine: MakeEngine) -> None:
    asyncio.run(run_check(check, Subject(make_engine(lent=True), (5, 6, 7), tuple(range(128)), ("layers.q", params["layers"]["q"]))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one device", "data 2, tp 2"])
def test_it_samples_what_a_copy_would_and_holds_nothing_of_its_own(make_engine: MakeEngine, name: str) -> None:
    mesh = None if name == "one device" else MESHES[name]()
    first, second = (
        tree if mesh is None else jax.device_put(tree, shardings(transformer.spec(EVEN), mesh)) for tree in (PARAMS, random_params(EVEN, 7))
    )
    requests = [request((3, 5, 7, 11 + i), (1, i), max_tokens=9) for i in range(6)]
    lent, copied = make_engine(first, EVEN, lent=True, mesh=mesh), make_engine(first, EVEN, mesh=mesh)
    for version, tree in enumerate((first, second)):
        if version:
            names = {**{n: tree[n] for n in ("embed", "head", "final_norm")}, **{f"layers.{n}": leaf for n, leaf in tree["layers"].items()}}
            for engine in (lent, copied):
                run(update(engine, names, version))
        assert pointers(lent._runner.layout.weights) == pointers(tree)
        for one, other in zip(generate(lent, requests), generate(copied, requests), strict=True):
            assert one.ids.tolist() == other.ids.tolist() and set(one.versions.tolist()) == {version}
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


async def update(engine: Any, leaves: dict[str, Any], version: int) -> None:
    await engine.begin_update(version)
    for name, leaf in leaves.items():
        await engine.push(name, leaf)
    await engine.commit_update()


@pytest.mark.optimised
def test_decoding_from_stacked_layers_makes_no_second_copy_of_them() -> None:
    """Whatever a compiler would like to take out of the loop over tokens."""
    config = replace(CONFIG, num_layers=12)
    params = random_params(config)
    state, table = slot_state([None] * 4, min_stop_ids=1), page_table([None] * 4, banks=1, pages=8)
    options: dict[str, Any] = {"config": config, "num_tokens": 4, "max_kept": 0, "precision": "f32", "spread": None}

    def temporary(weights: Any) -> int:
        cache = allocate(config, banks=1, pages=8, precision="f32", place=params["embed"].sharding)
        analysis = decode.lower(weights, cache, Slots(*state), table, **options).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    extra = temporary(Lease.of(config, params).weights) - temporary(Layout.build(config, params, None, precision="f32").weights)
    assert extra < layers / 3


def test_recall_waits_for_what_runs_and_holds_back_what_comes(params: transformer.Params, make_engine: MakeEngine) -> None:
    mine = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    engine = make_engine(mine, lent=True)

    async def story() -> None:
        early = asyncio.create_task(engine.generate(request((5, 6), (1,), max_tokens=60)))
        while engine.stats().running < 1:
            await asyncio.sleep(0)
        await engine.begin_update(1)
        await engine.recall()
        assert early.done() or engine.stats().running == 0
        late = asyncio.create_task(engine.generate(request((5, 6), (2,))))
        for leaf in jax.tree.leaves(mine):
            leaf.delete()  # as an update that donates does
        await asyncio.sleep(0.05)
        assert not late.done() and len((await early).ids) == 60
        await engine.push("embed", params["embed"])
        for name in ("head", "final_norm"):
            await engine.push(name, params[name])
        for name, leaf in params["layers"].items():
            await engine.push(f"layers.{name}", leaf)
        await engine.commit_update()
        assert set((await late).versions.tolist()) == {1}

    run(story())


@pytest.mark.parametrize("how", ["a bad push", "an abort", "a failed commit"])
def test_without_weights_it_says_so_instead_of_sampling(params: transformer.Params, make_engine: MakeEngine, how: str) -> None:
    engine = make_engine(lent=True)

    async def story() -> None:
        await engine.begin_update(1)
        await engine.recall()
        if how == "an abort":
            await engine.abort_update()
        elif how == "a bad push":
            with pytest.raises(ValueError, match="can't be lent as bfloat16"):
                await engine.push("embed", params["embed"].astype(jnp.bfloat16))
        else:
            await engine.push("embed", params["embed"])
            with faults.armed("engine.commit:raise"), pytest.raises(faults.InjectedFault):
                await engine.commit_update()
        with pytest.raises(RuntimeError, match="recalled for version 1, whose update failed: there is nothing to sample from"):
            await engine.generate(request((5, 6)))

    run(story())


def test_what_cant_be_lent_is_refused(params: transformer.Params, make_engine: MakeEngine) -> None:
    half = params | {"embed": params["embed"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="'embed' can't be lent as bfloat16"):
        make_engine(half, lent=True)
    with pytest.raises(ValueError, match="'embed' can't be lent: it lies as"):
        make_engine(jax.device_put(params, jax.devices()[3]), lent=True)
    with pytest.raises(ValueError, match="in float32 and without an adapter only"):
        make_engine(lent=True, precision="bf16")
    with pytest.raises(RuntimeError, match="no update to recall weights for"):
        run(make_engine(lent=True).recall())
