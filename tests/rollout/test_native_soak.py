"""A thousand requests of all kinds, cancelled, swapped and overtaken by updates: each is answered once, with what it would get alone."""

import asyncio
import gc
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from burnish.models import transformer
from burnish.rollout.native.engine import NativeEngine
from burnish.types import Completion, Request, SamplingParams, StopReason
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import generate, random_params, request, run
from tests.rollout.test_native_pages import PAGE_BYTES, update

pytestmark = [pytest.mark.optimised, pytest.mark.slow]

COUNT, UPDATES = 1000, 8


def any_request(rng: np.random.Generator, index: int) -> Request:
    """Prompts have common beginnings, of many lengths; half of them truncate."""
    start = int(rng.integers(0, 4))
    prompt = tuple((start + np.arange(int(rng.integers(1, 90)))).tolist())
    kinds = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}]
    params = SamplingParams(
        int(rng.integers(1, 160 if rng.random() < 0.1 else 8)),
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        stop_ids=tuple(rng.integers(0, 97, int(rng.integers(0, 4))).tolist()),
        stop_strings=("$", "7A") if rng.random() < 0.2 else (),
        **kinds[int(rng.integers(0, 4)) if rng.random() < 0.5 else 0],
    )
    return Request(prompt, params, (int(rng.integers(0, 50)), index % 7))


@pytest.mark.timeout(300)
def test_a_thousand_requests_are_answered_once_and_as_alone(
    params: transformer.Params, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(11)
    requests = [any_request(rng, index) for index in range(COUNT)]
    weights = [params["embed"], *(random_params(seed=20 + version)["embed"] for version in range(2))]
    cancelled = set(rng.choice(COUNT, 60, replace=False).tolist())
    engine = make_engine(context=256, kv_cache_bytes=6 * PAGE_BYTES)
    answers: dict[int, Completion] = {}

    async def one(index: int) -> None:
        await asyncio.sleep(float(rng.random()) * 0.05)
        out = await engine.generate(requests[index])
        assert index not in answers
        answers[index] = out

    async def story() -> None:
        for block in range(UPDATES):
            indices = range(block * COUNT // UPDATES, (block + 1) * COUNT // UPDATES)
            tasks = {index: asyncio.create_task(one(index)) for index in indices}
            await asyncio.sleep(0.06)
            for index in cancelled & tasks.keys():
                await engine.cancel(requests[index])
            await update(engine, {"embed": weights[(block + 1) % 3]}, block + 1)
            gc.collect()
            await asyncio.gather(*tasks.values())

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        run(story())
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages) == (0, 0, 0) and sorted(answers) == list(range(COUNT)) and not caplog.records
    assert stats.swaps > 0 and stats.reused > 0 and stats.tokens >= sum(len(out.ids) for out in answers.values())
    for kind in range(3):
        alone = make_engine(params | {"embed": weights[kind]}, context=256)
        for index, out in answers.items():
            assert len(set(out.versions.tolist())) <= 1
            if len(out.ids) and out.versions[0] % 3 == kind:
                assert_as_alone(alone, requests[index], out)
    assert any(out.stop is StopReason.CANCELLED for out in answers.values()) and {
        int(out.versions[0]) for out in answers.values() if len(out.ids)
    } > {0, 1, 2}


def assert_as_alone(alone: NativeEngine, one: Request, out: Completion) -> None:
    """Bit for bit; a cancelled one as far as it came."""
    (expected,) = generate(alone, [one])
    count = len(out.ids) if out.stop is StopReason.CANCELLED else len(expected.ids)
    assert out.ids.tolist() == expected.ids[:count].tolist() and out.logps.tolist() == expected.logps[:count].tolist()
    assert out.stop in (StopReason.CANCELLED, expected.stop)


def held() -> tuple[int, int, int]:
    """Threads, open files and children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(children.read_text().split()) if children.exists() else 0


def test_b089_b091_rollouts_leave_nothing_behind(make_engine: MakeEngine) -> None:
    """200 rollouts, each on an event loop of its own, with collections between: nothing climbs."""
    engine = make_engine()

    def rollouts(count: int) -> None:
        for index in range(count):
            assert len(generate(engine, [request(seed=(index, i), max_tokens=4) for i in range(4)])) == 4
            if index % 10 == 0:
                gc.collect()

    rollouts(50)
    before, memory = held(), resident_bytes()
    rollouts(150)
    assert held() == before and resident_bytes() - memory < 20 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_how_many_tokens_depend_on_the_company(make_engine: MakeEngine, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same requests alone, among others and in an engine of other size: none differs in f32 in one engine; the rest is told."""
    requests = [request(range(i, i + 7 * i + 2), (5, i), max_tokens=30) for i in range(10)]
    engine, wider = make_engine(precision=precision), make_engine(precision=precision, slots=16, prefill_rows=4)
    together, backwards, elsewhere = generate(engine, requests), generate(engine, requests[::-1])[::-1], generate(wider, requests)
    alone = [generate(engine, [one])[0] for one in requests]
    rates = [differing(alone, others) for others in (together, backwards, elsewhere)]
    with capsys.disabled():
        print(
            f"\n{precision}, tokens unlike those of a request alone: {rates[0]:.4f} among others, {rates[1]:.4f} in another order,", end=" "
        )
        print(f"{rates[2]:.4f} with twice the slots")
    assert precision == "bf16" or (
        rates[:2] == [0.0, 0.0] and all(np.array_equal(a.logps, b.logps) for a, b in zip(alone, together, strict=True))
    )
    assert max(rates) < 0.5


def differing(outs: list[Completion], others: list[Completion]) -> float:
    return float(np.mean([a != b for one, other in zip(outs, others, strict=True) for a, b in zip(one.ids, other.ids, strict=True)]))
