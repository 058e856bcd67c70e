"""Weights arrive whole or not at all, and nobody waits for ever: updates, failures, cancelling and closing of the native engine."""

import asyncio
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish import faults
from burnish.models import transformer
from burnish.rollout.engine import EngineClosed
from burnish.rollout.native.engine import NativeEngine
from burnish.types import StopReason
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import CONFIG, forward_logits, generate, log_softmax, random_adapter, random_params, request, run

pytestmark = pytest.mark.optimised  # same ids and log-probs, bit for bit

PROMPT = (5, 6, 7, 8)
LEAVES = ["embed", "final_norm", "head", *(f"layers.{name}" for name in transformer.spec(CONFIG)["layers"])]


async def update(engine: NativeEngine, leaves: dict[str, Array], version: int) -> None:
    await engine.begin_update(version)
    for name, array in leaves.items():
        await engine.push(name, array)
    await engine.commit_update()


def model_logps(params: transformer.Params, ids: np.ndarray, adapter: transformer.Adapter | None = None) -> np.ndarray:
    logits = forward_logits(params, [*PROMPT, *ids], adapter)[len(PROMPT) - 1 : -1]
    return log_softmax(logits)[np.arange(len(ids)), ids]


@pytest.mark.slow
def test_b075_each_leaf_reaches_the_sampler_and_changes_it(params: transformer.Params, make_engine: MakeEngine) -> None:
    """One leaf at a time is perturbed and pushed; the sampler then agrees with the new model and no longer with the old one."""
    engine = make_engine()
    current = {"embed": params["embed"], "final_norm": params["final_norm"], "head": params["head"], "layers": dict(params["layers"])}
    for version, name in enumerate(LEAVES, start=1):
        tree, key = (current["layers"], name.removeprefix("layers.")) if name.startswith("layers.") else (current, name)
        before = {**current, "layers": dict(current["layers"])}
        noise = np.random.default_rng(version).normal(0, 0.3, tree[key].shape)
        tree[key] = jnp.asarray(np.asarray(tree[key]) + noise, jnp.float32)
        run(update(engine, {name: tree[key]}, version))
        out = generate(engine, [request(PROMPT)])[0]
        np.testing.assert_allclose(out.logps, model_logps(current, out.ids), atol=1e-4, err_msg=name)
        assert np.abs(out.logps - model_logps(before, out.ids)).max() > 1e-3, f"{name} changed nothing"
        assert set(out.versions.tolist()) == {version}


def test_b075_adapter_leaves_reach_the_sampler(params: transformer.Params, make_engine: MakeEngine) -> None:
    adapter = random_adapter()
    engine = make_engine(adapter=adapter)
    pairs = {name: dict(pair) for name, pair in adapter.pairs.items()}
    for version, (name, half) in enumerate([("q", "a"), ("q", "b"), ("o", "a"), ("down", "b")], start=1):
        pairs[name][half] = pairs[name][half] * 1.7 + 0.05
        run(update(engine, {f"adapter.{name}.{half}": pairs[name][half]}, version))
        out = generate(engine, [request(PROMPT)])[0]
        np.testing.assert_allclose(out.logps, model_logps(params, out.ids, transformer.Adapter(pairs, 2.0)), atol=1e-4)
    base = {**params, "layers": params["layers"] | {"q": params["layers"]["q"] * 0.5}}
    run(update(engine, {"layers.q": base["layers"]["q"]}, 9))
    out = generate(engine, [request(PROMPT)])[0]
    np.testing.assert_allclose(out.logps, model_logps(base, out.ids, transformer.Adapter(pairs, 2.0)), atol=1e-4)


def test_a_tied_head_follows_the_embedding(make_engine: MakeEngine) -> None:
    tied = dataclasses.replace(CONFIG, tied_head=True)
    params, other = random_params(tied, 0), random_params(tied, 5)
    engine = make_engine(params, tied)
    run(update(engine, {"embed": other["embed"]}, 1))
    out = generate(engine, [request(PROMPT)])[0]
    logits = forward_logits({**params, "embed": other["embed"]}, [*PROMPT, *out.ids], config=tied)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(out.logps, log_softmax(logits)[np.arange(12), out.ids], atol=1e-4)


def test_the_engine_owns_its_weights(params: transformer.Params, make_engine: MakeEngine) -> None:
    """A trainer that donates or deletes what it pushed takes nothing from the sampler."""
    mine = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    engine = make_engine(mine)
    pushed = jnp.array(params["embed"], copy=True)
    run(update(engine, {"embed": pushed}, 1))
    for array in (pushed, mine["embed"], mine["final_norm"], mine["head"], *mine["layers"].values()):
        array.delete()
    out = generate(engine, [request(PROMPT)])[0]
    np.testing.assert_allclose(out.logps, model_logps(params, out.ids), atol=1e-4)


def test_b097_a_failed_push_leaves_the_old_weights_as_a_whole(params: transformer.Params, make_engine: MakeEngine) -> None:
    engine, other = make_engine(), random_params(seed=7)
    before = generate(engine, [request(PROMPT)])[0]
    leaves = {"embed": other["embed"], "final_norm": other["final_norm"], "head": other["head"]}
    for spec, error in (("engine.push@leaf=head:raise", "injected"), ("engine.commit:raise", "injected")):
        with faults.armed(spec), pytest.raises(faults.InjectedFault, match=error):
            run(update(engine, leaves, 1))
    with pytest.raises(ValueError, match=r"'head' have shape \(97, 31\), the engine's have \(97, 32\)"):
        run(update(engine, {"embed": other["embed"], "head": other["head"][:, 1:]}, 1))
    with pytest.raises(ValueError, match=r"'layers.query', which this engine doesn't have; it has .*layers.q,"):
        run(update(engine, {"embed": other["embed"], "layers.query": other["head"]}, 1))
    with pytest.raises(RuntimeError, match="bad push"):
        run(engine.commit_update())
    after = generate(engine, [request(PROMPT)])[0]
    assert engine.version == 0
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_array_equal(before.logps, after.logps)
    run(update(engine, leaves, 2))
    out = generate(engine, [request(PROMPT)])[0]
    np.testing.assert_allclose(out.logps, model_logps({**params, **leaves}, out.ids), atol=1e-4)


def test_requests_of_both_sides_of_an_update_are_wholly_old_or_wholly_new(params: transformer.Params, make_engine: MakeEngine) -> None:
    engine, other = make_engine(), random_params(seed=7)

    async def story() -> None:
        early = [asyncio.create_task(engine.generate(request(PROMPT, (i,), max_tokens=100))) for i in range(8)]
        while engine.stats().running < 8:
            await asyncio.sleep(0)
        change = asyncio.create_task(update(engine, {"embed": other["embed"]}, 3))
        late = [asyncio.create_task(engine.generate(request(PROMPT, (i,)))) for i in range(3)]
        await change
        for out in await asyncio.gather(*early):
            assert out.versions.tolist() == [0] * 100
            np.testing.assert_allclose(out.logps, model_logps(params, out.ids), atol=1e-4)
        for out in await asyncio.gather(*late):
            weights = params if out.versions[0] == 0 else {**params, "embed": other["embed"]}
            np.testing.assert_allclose(out.logps, model_logps(weights, out.ids), atol=1e-4)
        assert (await engine.generate(request(PROMPT))).versions.tolist() == [3] * 12

    run(story())


@pytest.mark.slow
def test_cancelling_frees_the_slot_and_returns_what_there_is(make_engine: MakeEngine) -> None:
    engine = make_engine(decode_chunk=1)

    async def story() -> None:
        long = [request(PROMPT, (i,), max_tokens=120) for i in range(8)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in long]
        while engine.stats().running < 8 or engine.stats().tokens < 16:
            await asyncio.sleep(0)
        next_one = asyncio.create_task(engine.generate(request(PROMPT, (99,), max_tokens=2)))
        await engine.cancel(long[3])
        out = await tasks[3]
        assert out.stop is StopReason.CANCELLED and 0 < len(out.ids) < 120 and len(out.ids) == len(out.logps)
        assert len((await next_one).ids) == 2
        tasks[4].cancel()
        assert [len((await task).ids) for i, task in enumerate(tasks) if i not in (3, 4)] == [120] * 6

    run(story())
    assert engine.stats().running == 0


def test_b065_many_threads_with_their_own_loops(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = [generate(engine, [request(PROMPT, (i,))])[0].ids.tolist() for i in range(16)]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: generate(engine, [request(PROMPT, (i,))])[0].ids.tolist()})) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(16)] == expected


def test_closing_answers_those_who_wait_and_leaves_no_thread(make_engine: MakeEngine) -> None:
    before = set(threading.enumerate())
    engine = make_engine(decode_chunk=1)

    async def story() -> None:
        tasks = [asyncio.create_task(engine.generate(request(PROMPT, (i,), max_tokens=120))) for i in range(20)]
        while engine.stats().running < 8:
            await asyncio.sleep(0)
        await engine.close()
        assert all(isinstance(out, EngineClosed) for out in await asyncio.gather(*tasks, return_exceptions=True))
        with pytest.raises(EngineClosed):
            await engine.generate(request(PROMPT))

    run(story())
    assert set(threading.enumerate()) <= before


def test_a_failure_of_the_worker_reaches_every_caller_now_and_later(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def story() -> None:
        with faults.armed("engine.step:raise"):
            outs = await asyncio.gather(*(engine.generate(request(PROMPT, (i,))) for i in range(5)), return_exceptions=True)
        assert [type(out) for out in outs] == [faults.InjectedFault] * 5
        for later in (engine.generate(request(PROMPT)), engine.begin_update(1)):
            with pytest.raises(faults.InjectedFault):
                await later
        await engine.close()

    run(story())


def test_a_failing_text_decoder_is_such_a_failure(make_engine: MakeEngine) -> None:
    def broken(ids: object) -> str:
        raise UnicodeError("no such bytes")

    engine = make_engine(decode_text=broken)
    with pytest.raises(UnicodeError, match="no such bytes"):
        generate(engine, [request(PROMPT, stop_strings=("x",))])


def test_an_idle_engine_takes_no_processor(make_engine: MakeEngine) -> None:
    generate(make_engine(), [request(PROMPT)])
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_context_beyond_the_model_is_refused(params: transformer.Params) -> None:
    with pytest.raises(ValueError, match="between 2 and the model's 256 positions, got 257"):
        NativeEngine(CONFIG, params, decode_text=str, context=257)
