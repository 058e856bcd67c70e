"""What every engine must do, as coroutines that raise AssertionError: the protocol of `rollout.engine`, made checkable.

Owns no engine: a test hands in a `Subject` for each check. Used on the native and on the scripted engine, and by whoever writes another.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check): asyncio.run(run_check(check, subject()))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.rollout.engine import Engine, EngineClosed
from burnish.types import Completion, Request, SamplingParams, StopReason

PATIENCE_S = 60.0
"""No single wait of a check is longer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that nobody else uses, and what the checks may ask of it.

    prompt: one that the engine continues for at least 24 tokens. too_long: one that it must refuse. leaf: a weight that it takes, by name.
    """

    engine: Engine
    prompt: tuple[int, ...]
    too_long: tuple[int, ...]
    leaf: tuple[str, Any]

    def request(self, max_tokens: int = 8, *, seed: int = 0, **params: Any) -> Request:
        return Request(self.prompt, SamplingParams(max_tokens, **params), (seed,))


Check = Callable[[Subject], Awaitable[None]]


async def run_check(check: Check, subject: Subject) -> None:
    """Run one check within the patience and close the engine, whatever comes."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await check(subject)
    finally:
        await subject.engine.close()


async def fields_fit_together(subject: Subject) -> None:
    assert isinstance(subject.engine, Engine)
    for temperature in (0.0, 0.7, 1.0):
        out = await subject.engine.generate(subject.request(temperature=temperature))
        assert_whole(out, subject.engine.version)
        assert out.support == "full" and out.kept_ids is None


def assert_whole(out: Completion, version: int) -> None:
    """Lengths and dtypes agree; every token is of this version."""
    assert out.ids.dtype == np.int32 and out.logps.dtype == np.float32 and out.versions.dtype == np.int32
    assert out.ids.ndim == 1 and out.ids.shape == out.logps.shape == out.versions.shape
    assert bool((out.logps <= 0).all()) and bool((out.ids >= 0).all())
    assert set(out.versions.tolist()) <= {version}


async def budgets_are_kept(subject: Subject) -> None:
    for budget in (1, 2, 7, 24):
        out = await subject.engine.generate(subject.request(budget))
        assert (len(out.ids), out.stop) == (budget, StopReason.LENGTH)


async def stop_ids_end_and_are_included(subject: Subject) -> None:
    free = (await subject.engine.generate(subject.request())).ids.tolist()
    first = max(i for i, token in enumerate(free) if token not in free[:i])
    for budget in (8, first + 1):
        out = await subject.engine.generate(subject.request(budget, stop_ids=(free[first],)))
        assert (out.ids.tolist(), out.stop) == (free[: first + 1], StopReason.STOP_ID)


async def the_same_request_gives_the_same_ids(subject: Subject) -> None:
    requests = [subject.request(seed=seed) for seed in (1, 2, 1)]
    together = await asyncio.gather(*map(subject.engine.generate, requests))
    alone = [await subject.engine.generate(one) for one in requests]
    assert together[0].ids.tolist() == together[2].ids.tolist()
    assert [out.ids.tolist() for out in together] == [out.ids.tolist() for out in alone]


async def truncated_support_says_what_was_kept(subject: Subject) -> None:
    out = await subject.engine.generate(subject.request(top_k=3))
    assert_whole(out, subject.engine.version)
    assert out.support == "truncated" and out.kept_ids is not None
    assert out.kept_ids.dtype == np.int32 and out.kept_ids.shape[0] == len(out.ids) and out.kept_ids.shape[1] <= 3
    assert bool((out.kept_ids == out.ids[:, None]).any(-1).all())


async def impossible_prompts_are_refused(subject: Subject) -> None:
    for prompt in (subject.too_long, ()):
        await assert_raises(ValueError, subject.engine.generate(Request(prompt, SamplingParams(1))))
    assert len((await subject.engine.generate(subject.request())).ids) == 8


async def more_requests_than_slots_are_each_answered_once(subject: Subject) -> None:
    budgets = [1 + i % 5 for i in range(2 * subject.engine.stats().slots + 1)]
    outs = await asyncio.gather(*(subject.engine.generate(subject.request(n, seed=i)) for i, n in enumerate(budgets)))
    assert [len(out.ids) for out in outs] == budgets
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting, stats.tokens) == (0, 0, sum(budgets))


async def a_cancelled_request_says_so_and_others_go_on(subject: Subject) -> None:
    await subject.engine.begin_update(subject.engine.version + 1)  # so that both wait
    gone, stays = subject.request(), subject.request()
    answers = [asyncio.create_task(subject.engine.generate(one)) for one in (gone, stays)]
    await until(lambda: subject.engine.stats().waiting == 2)
    await subject.engine.cancel(gone)
    out = await answers[0]
    assert (out.stop, out.ids.tolist()) == (StopReason.CANCELLED, [])
    await subject.engine.abort_update()
    assert len((await answers[1]).ids) == 8
    await subject.engine.cancel(gone)  # too late: nothing happens


async def a_caller_who_stops_waiting_leaves_nothing_behind(subject: Subject) -> None:
    await subject.engine.begin_update(subject.engine.version + 1)
    task = asyncio.create_task(subject.engine.generate(subject.request()))
    await until(lambda: subject.engine.stats().waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await subject.engine.abort_update()
    assert len((await subject.engine.generate(subject.request())).ids) == 8
    await until(lambda: subject.engine.stats().waiting == subject.engine.stats().running == 0)


async def an_update_is_whole_and_requests_wait_for_it(subject: Subject) -> None:
    engine, old = subject.engine, subject.engine.version
    before = [asyncio.create_task(engine.generate(subject.request(24, seed=i))) for i in range(3)]
    await until(lambda: engine.stats().running > 0 or all(task.done() for task in before))
    await engine.begin_update(old + 5)
    after = asyncio.create_task(engine.generate(subject.request()))
    await engine.push(*subject.leaf)
    assert engine.version == old
    await engine.commit_update()
    assert engine.version == old + 5
    for out in await asyncio.gather(*before):
        assert set(out.versions.tolist()) in ({old}, {old + 5})
    assert_whole(await after, old + 5)


async def updates_that_make_no_sense_are_refused(subject: Subject) -> None:
    engine, old = subject.engine, subject.engine.version
    await assert_raises(RuntimeError, engine.push(*subject.leaf))
    await assert_raises(RuntimeError, engine.commit_update())
    await engine.begin_update(old + 1)
    await assert_raises(RuntimeError, engine.begin_update(old + 2))
    await assert_raises(RuntimeError, engine.commit_update())  # nothing was pushed
    await engine.abort_update()
    assert engine.version == old
    assert_whole(await engine.generate(subject.request()), old)


async def closing_answers_everyone(subject: Subject) -> None:
    engine = subject.engine
    await engine.begin_update(engine.version + 1)
    tasks = [asyncio.create_task(engine.generate(subject.request(seed=i))) for i in range(3)]
    await until(lambda: engine.stats().waiting == 3)
    await engine.close()
    for task in tasks:
        await assert_raises(EngineClosed, task)
    await assert_raises(EngineClosed, engine.generate(subject.request()))
    await assert_raises(EngineClosed, engine.begin_update(9))
    await engine.close()


async def assert_raises(kind: type[Exception], work: Awaitable[Any]) -> None:
    try:
        await work
    except kind:
        return
    raise AssertionError(f"{kind.__name__} wasn't raised")


async def until(ready: Callable[[], bool]) -> None:
    """Wait for something that the engine does in its own time; `run_check` bounds it."""
    while not ready():
        await asyncio.sleep(0.001)


CHECKS: tuple[Check, ...] = (
    fields_fit_together,
    budgets_are_kept,
    stop_ids_end_and_are_included,
    the_same_request_gives_the_same_ids,
    truncated_support_says_what_was_kept,
    impossible_prompts_are_refused,
    more_requests_than_slots_are_each_answered_once,
    a_cancelled_request_says_so_and_others_go_on,
    a_caller_who_stops_waiting_leaves_nothing_behind,
    an_update_is_whole_and_requests_wait_for_it,
    updates_that_make_no_sense_are_refused,
    closing_answers_everyone,
)
"""Every check, in the order in which an author would want to fail them."""
