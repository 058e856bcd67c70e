"""Many episodes in a bad world: hangs, exceptions, dead processes, vanished episodes. Counters equal what was injected, nothing is left."""

import asyncio
import gc
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from burnish import faults
from burnish.agentic.agents import ModelAgent
from burnish.agentic.calls import Calls, leaked_threads
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.agentic.processes import descendants
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import WorkersKeepDying
from burnish.observe.metrics import MetricCollector
from burnish.rewards.manager import RewardManager
from burnish.rl.reports import record_rollout
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import Group, Prompt, SamplingParams, Status
from tests.agentic import worlds
from tests.agentic.episodes import END, Talk, context
from tests.agentic.worlds import Planned

PARAMS = SamplingParams(20, stop_ids=(END,))


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(6)
    yield made
    made.close()


def play_all(
    codec: Codec, tasks: Sequence[dict[str, Any]], samples: int, make: Any, *, pool: WorkerPool | None = None, limits: dict[str, Any]
) -> list[Group]:
    engine = ScriptedEngine(lambda request: [70, END])
    orchestrator = RolloutOrchestrator(
        context(engine, codec, calls=Calls(pool), limits=limits),
        RewardManager([]),
        make_agent=ModelAgent,
        make_env=make,
        max_concurrency=6,
    )
    draws = [Draw((1, i), Prompt(f"p:{i}", (), task), (PARAMS,) * samples, (0, 1, i)) for i, task in enumerate(tasks)]

    async def everything() -> list[Group]:
        return [group async for group in orchestrator.groups(draws)]

    return asyncio.run(everything())


def in_order(prompt: Prompt) -> Planned:
    return Planned(prompt.meta)


@pytest.mark.slow
def test_thirty_percent_of_steps_hang_ten_raise_five_percent_of_episodes_vanish(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    """Each step that is reached hangs with 30 % and raises with 10 %; what each episode must come to follows from its plan."""
    rng = random.Random(3)
    plans = [[rng.choices(["hang", "raise", "go"], [3, 1, 6])[0] for _ in range(2)] + ["done"] for _ in range(40)]
    vanishing = {7, 23}
    tasks = [{"plan": plan, "log": str(tmp_path / "log")} for plan in plans]
    rules = ",".join(f"episode.lost@draw={draw}:flag" for draw in vanishing)
    before = threading.active_count(), set(descendants(os.getpid()))

    with faults.armed(rules):
        start = time.monotonic()
        groups = play_all(codec, tasks, 1, in_order, pool=pool, limits={"step_timeout_s": 0.2, "lost_after_s": 3.0})
        assert time.monotonic() - start < 60
        assert faults.fired() == {"episode.lost": 2 * len(vanishing)}, "each was tried twice"

    def expected(draw: int, plan: list[str]) -> Status:
        if draw in vanishing:
            return Status.ABORTED
        ended = next(step for step in plan if step != "go")
        return {"hang": Status.ENV_TIMEOUT, "raise": Status.ENV_ERROR, "done": Status.OK}[ended]

    wanted = [expected(draw, plan) for draw, plan in enumerate(plans)]
    assert [group.trajectories[0].status for group in groups] == wanted and len(set(wanted)) == 4
    metrics = MetricCollector()
    record_rollout(metrics, groups, version=0, train_truncated=True)
    taken = metrics.take()
    assert {name: taken[f"status/{name}"] for name in Counter(wanted)} == Counter(wanted)
    assert taken["episode/lost"] == 4 and pool.killed == Counter(wanted)[Status.ENV_TIMEOUT] and pool.died == 0
    lines = Counter((tmp_path / "log").read_text().split())
    assert lines["opened"] == lines["closed"] == len(plans) - len(vanishing)
    pool.close()
    gc.collect()
    assert (threading.active_count(), set(descendants(os.getpid()))) == before and leaked_threads() == 0


def test_b083_an_episode_lost_once_is_played_again_with_the_same_noise(codec: Codec, caplog: pytest.LogCaptureFixture) -> None:
    tasks = [{} for _ in range(2)]
    whole = play_all(codec, tasks, 4, lambda prompt: Talk(), limits={})
    with faults.armed("episode.lost@draw=1@sample=2@attempt=0:flag"), caplog.at_level(logging.WARNING):
        start = time.monotonic()
        groups = play_all(codec, tasks, 4, lambda prompt: Talk(), limits={"lost_after_s": 0.5})
        assert 0.5 < time.monotonic() - start < 20
    assert [[t.ids.tolist() for t in g.trajectories] for g in groups] == [[t.ids.tolist() for t in g.trajectories] for g in whole]
    assert [t.num_lost for t in groups[1].trajectories] == [0, 0, 1, 0]
    assert "sample 2 of draw 1 in step 1 is lost: nothing came from it in 0.5 s; it is played again" in caplog.text


def test_b083_an_episode_lost_twice_is_left_out_of_its_group(codec: Codec) -> None:
    with faults.armed("episode.lost@sample=0:flag"):
        (group,) = play_all(codec, [{}], 3, lambda prompt: Talk(), limits={"lost_after_s": 0.2})
    lost, *others = group.trajectories
    assert (lost.status, lost.num_lost, lost.reward, lost.num_sampled, lost.steps) == (Status.ABORTED, 2, None, 0, [])
    assert lost.error == "lost 2 times: nothing came from it in 0.2 s" and [t.status for t in others] == [Status.OK] * 2


def test_an_engine_that_never_answers_is_a_lost_episode_and_its_environment_is_closed(codec: Codec) -> None:
    opened: list[Talk] = []

    def make(prompt: Prompt) -> Talk:
        opened.append(Talk())
        return opened[-1]

    orchestrator = RolloutOrchestrator(
        context(ScriptedEngine(lambda request: [70, END], latency_s=lambda request: 600.0), codec, limits={"lost_after_s": 0.2}),
        RewardManager([]),
        make_agent=ModelAgent,
        make_env=make,
        max_concurrency=2,
    )

    async def first() -> Group:
        return await anext(orchestrator.groups([Draw((1, 0), Prompt("p", (), {}), (PARAMS,), (0,))]))

    assert asyncio.run(first()).trajectories[0].status is Status.ABORTED
    assert [env.closed for env in opened] == [1, 1]


class Yields(BaseTaskEnv):
    """Waits a moment in each call, on the loop."""

    async def _initial_observation(self) -> str:
        await asyncio.sleep(0)
        return "hi"

    async def _step_impl(self, action: Any) -> EnvStepResult:
        await asyncio.sleep(0)
        return EnvStepResult("", 1.0, True)

    async def close(self) -> None:
        await asyncio.sleep(0)


def test_b089_no_task_is_lost_to_the_garbage_collector(codec: Codec, capfd: pytest.CaptureFixture[str]) -> None:
    """1,000 episodes, with a collection at every step of every environment."""

    class Collects(Yields):
        async def _step_impl(self, action: Any) -> EnvStepResult:
            gc.collect(0)
            return await super()._step_impl(action)

    groups = play_all(codec, [{}] * 125, 8, lambda prompt: Collects({}), limits={})
    assert sum(t.status is Status.OK for group in groups for t in group.trajectories) == 1000
    gc.collect()
    assert "was destroyed" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------ R25: workers that die by themselves


def fragile(prompt: Prompt) -> worlds.Fragile:
    return worlds.Fragile(prompt.meta)


def test_r25_episodes_whose_worker_dies_are_played_again(codec: Codec, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks = [{"dies": n < 3, "once": True, "log": str(tmp_path / "log")} for n in range(6)]
    pool = WorkerPool(3, max_deaths=3)
    try:
        with caplog.at_level(logging.WARNING):
            start = time.monotonic()
            groups = play_all(codec, tasks, 1, fragile, pool=pool, limits={})
        assert time.monotonic() - start < 15 and pool.died == 3
    finally:
        pool.close()
    got = [group.trajectories[0] for group in groups]
    assert [(t.status, t.num_lost, t.reward) for t in got] == [(Status.OK, 1, 1.0)] * 3 + [(Status.OK, 0, 0.0)] * 3
    assert "sample 0 of draw 1 in step 1 is lost: its worker process ended: signal 9; it is played again" in caplog.text


def test_r25_one_that_dies_twice_is_an_error(codec: Codec, tmp_path: Path) -> None:
    pool = WorkerPool(2, max_deaths=2)
    try:
        (group,) = play_all(codec, [{"dies": True, "once": False, "log": str(tmp_path / "log")}], 1, fragile, pool=pool, limits={})
    finally:
        pool.close()
    (got,) = group.trajectories
    assert (got.status, got.num_lost, got.error) == (Status.ENV_ERROR, 1, "its worker process ended: signal 9")


def test_r25_more_deaths_than_the_budget_end_the_run_and_leave_nobody(codec: Codec, tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    pool = WorkerPool(1, max_deaths=3)
    tasks = [{"dies": True, "once": True, "log": str(tmp_path / "log")} for _ in range(5)]
    try:
        with pytest.raises(WorkersKeepDying, match=r"4 worker processes have died .* environment.limits.max_worker_deaths \(3\)"):
            play_all(codec, tasks, 1, fragile, pool=pool, limits={})
    finally:
        pool.close()
    assert pool.died == 4 and set(descendants(os.getpid())) <= before
