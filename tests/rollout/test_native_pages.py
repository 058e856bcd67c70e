"""Pages of the KV cache: who shares a prefix computes it once, who gives way loses nothing, and the numbers are those without either."""

import asyncio
from typing import Any

import jax
import numpy as np
import pytest

from burnish import faults
from burnish.config.errors import UserError
from burnish.rollout.native.engine import NativeEngine
from burnish.types import Completion, Request
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import generate, random_params, request, run

pytestmark = pytest.mark.optimised  # same ids and log-probs, bit for bit

PAGE_BYTES = 2 * 2 * 2 * 8 * 64 * 4  # keys and values, layers, heads, head_dim, positions, bytes


def assert_same(outs: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(outs, others, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.logps, other.logps)


def without_sharing(engine: NativeEngine, requests: list[Request]) -> list[Completion]:
    """One by one, and nothing is kept from one to the next."""
    outs = []
    for one in requests:
        outs += generate(engine, [one])
        engine._runner.memory.prefixes.clear()
    return outs


@pytest.mark.parametrize("slots", [32, 8])
def test_four_prompts_of_eight_samples_prefill_four_prompts(make_engine: MakeEngine, slots: int) -> None:
    """Also where a group doesn't fit into the slots at once."""
    engine = make_engine(slots=slots, context=256)
    prompts = [tuple(range(seed, seed + length)) for seed, length in ((1, 30), (2, 65), (3, 66), (9, 85))]
    group = [request(prompt, (p, sample), max_tokens=3 + sample) for p, prompt in enumerate(prompts) for sample in range(8)]
    outs, stats = generate(engine, group), engine.stats()
    tokens = sum(len(prompt) - 1 for prompt in prompts)  # a prompt's last token enters with decoding
    assert (stats.prefilled, stats.reused, stats.pages) == (tokens, 7 * tokens, 0)
    some = slice(None, None, 5)
    assert_same(outs[some], without_sharing(engine, group[some]))


def test_pages_that_are_on_the_device_are_not_put_there_again(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, puts, put = make_engine(), [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **options: puts.append(args) or put(*args, **options))
    generate(engine, [request((4, 5, 6), (1, i)) for i in range(8)])
    assert engine.stats().reused == 7 * 2 and not puts


def test_a_later_turn_goes_on_from_the_pages_of_the_prompt_before(make_engine: MakeEngine) -> None:
    """Hits end where pages do, and only what prefill computed is kept: bit for bit what a new engine says."""
    engine, fresh = make_engine(context=256), make_engine(context=256)
    ids, counts = tuple(range(5, 75)), []
    for turn in range(4):
        one = request(ids, (7, turn), max_tokens=10)
        before = engine.stats()
        (out,) = generate(engine, [one])
        counts.append((engine.stats().prefilled - before.prefilled, engine.stats().reused - before.reused))
        assert_same([out], without_sharing(fresh, [one]))
        ids = (*ids, *out.ids.tolist(), *range(30 + turn, 62 + turn))
    assert counts == [(69, 0), (111 - 64, 64), (153 - 64, 64), (195 - 128, 128)]


def test_kept_pages_stay_within_the_budget(make_engine: MakeEngine) -> None:
    engine = make_engine(context=256, slots=1, prefill_rows=4, kv_cache_bytes=7 * PAGE_BYTES)
    prompts = [tuple(range(seed, seed + 86)) * 2 for seed in range(3)]  # 172 tokens: 3 pages, in a pool of 3 or 4
    for prompt in (*prompts, prompts[2], prompts[1]):
        generate(engine, [request(prompt, max_tokens=2)])
        assert engine.stats().kv_bytes <= 7 * PAGE_BYTES
    assert (engine.stats().prefilled, engine.stats().reused) == (4 * 171, 171), "there is room for one of them"
    with pytest.raises(UserError, match=r"kv_cache_bytes is 10,000, and one sequence of the context's 256 tokens takes 65,536"):
        make_engine(context=256, kv_cache_bytes=10_000)


async def update(engine: NativeEngine, leaves: dict[str, Any], version: int) -> None:
    await engine.begin_update(version)
    for name, leaf in leaves.items():
        await engine.push(name, leaf)
    await engine.commit_update()


def test_r32_a_prefix_of_old_weights_would_be_seen(make_engine: MakeEngine) -> None:
    """With the fault the kept pages outlive their version, and the sampler is another one; without it nothing is left of them."""
    embed = random_params(seed=7)["embed"]
    one = request(range(80), max_tokens=20)
    for spec, same in (("engine.stale_prefix:flag", False), ("", True)):
        engine, fresh = make_engine(), make_engine()
        generate(engine, [one])
        with faults.armed(spec):
            run(update(engine, {"embed": embed}, 1))
        run(update(fresh, {"embed": embed}, 1))
        (out,), (right,) = generate(engine, [one]), generate(fresh, [one])
        assert (engine.stats().reused == 0) == same
        assert np.array_equal(out.logps, right.logps) == same


def test_the_youngest_is_swapped_out_and_comes_back_bitwise(make_engine: MakeEngine) -> None:
    """Eight sequences of three pages each in a budget of six: nobody fails, nothing is computed again."""
    requests = [request(range(i, i + 40), (i,), max_tokens=110) for i in range(8)]
    roomy, tight = make_engine(context=256), make_engine(context=256, kv_cache_bytes=6 * PAGE_BYTES)
    assert_same(generate(tight, requests), generate(roomy, requests))
    stats = tight.stats()
    assert stats.swaps > 0 and roomy.stats().swaps == 0
    assert (stats.prefilled, stats.pages, stats.running, stats.waiting) == (8 * 39, 0, 0, 0) and stats.kv_bytes <= 6 * PAGE_BYTES


def test_who_is_swapped_out_can_be_cancelled_and_an_update_waits_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine(context=256, kv_cache_bytes=5 * PAGE_BYTES)

    async def story() -> None:
        requests = [request(range(i, i + 60), (i,), max_tokens=150) for i in range(3)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
        while not engine.stats().swaps:
            await asyncio.sleep(0)
        change = asyncio.create_task(update(engine, {"embed": random_params(seed=7)["embed"]}, 1))
        await engine.cancel(requests[2])
        await change
        outs = await asyncio.gather(*tasks)
        assert [len(out.ids) for out in outs[:2]] == [150, 150] and len(outs[2].ids) < 150
        assert all(set(out.versions.tolist()) <= {0} for out in outs) and engine.stats().pages == 0

    run(story())


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_long_prompt_is_the_same_in_one_prefill_and_in_many(make_engine: MakeEngine, precision: str) -> None:
    requests = [request(tuple(range(90)) * 2, (1,)), request(range(20), (2,))]
    many, one = (make_engine(context=256, prefill_rows=rows, precision=precision) for rows in (1, 8))
    outs, others = generate(many, requests), generate(one, requests)
    assert [out.ids.tolist() for out in outs] == [out.ids.tolist() for out in others]
    np.testing.assert_allclose(outs[0].logps, others[0].logps, atol=1e-4 if precision == "f32" else 0.1)
