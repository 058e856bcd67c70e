"""Reward functions of a run: in worker processes, killed at their limit, and asked again sample by sample."""

import asyncio
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from burnish.agentic.calls import Calls
from burnish.agentic.workers import WorkerPool
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.types import Completion, Group, Prompt, Status, Step, StopReason, Trajectory
from tests.agentic import worlds

NONE = np.zeros(0, np.int32)
COMPLETION = Completion(NONE, NONE.astype(np.float32), NONE, StopReason.STOP_ID)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(8)
    yield made
    made.close()


def scored(pool: WorkerPool, spec: RewardSpec, *texts: str) -> list[Trajectory]:
    steps = [[Step(NONE, COMPLETION, text)] for text in texts]
    members = [Trajectory(s, NONE, NONE.astype(bool), COMPLETION.logps, NONE, 0, (3, 1), i) for i, s in enumerate(steps)]
    group = Group((3, 1), Prompt("p", ({"role": "user", "content": "?"},), {"answer": "4"}), members)
    asyncio.run(RewardManager([spec], runner=Calls(pool)).score(group))
    return members


def test_a_function_of_a_module_runs_in_another_process(pool: WorkerPool) -> None:
    got = scored(pool, RewardSpec.of(worlds.exact_and_pid), "4", "5")
    rewards = [t.reward or 0.0 for t in got]
    assert rewards[0] == rewards[1] + 1 and int(rewards[1]) != os.getpid()


def test_b085_one_sample_that_hangs_the_grader_costs_that_sample_only(pool: WorkerPool) -> None:
    start = time.monotonic()
    got = scored(pool, RewardSpec("slow", worlds.slow_for_one, timeout_s=1.0), *["fine"] * 5, "hang", *["fine"] * 2)
    assert time.monotonic() - start < 5
    assert [t.reward for t in got] == [1.0] * 5 + [None] + [1.0] * 2
    assert [t.status for t in got] == [Status.OK] * 5 + [Status.GRADER_ERROR] + [Status.OK] * 2
    assert got[5].error == "reward slow: not done within 1.0 s" and pool.killed == 2


def test_a_function_that_raises_costs_the_group(pool: WorkerPool) -> None:
    got = scored(pool, RewardSpec("broken", worlds.exact_and_pid, timeout_s=5.0), "4")
    assert got[0].status is Status.OK
    got = scored(pool, RewardSpec("broken", worlds.needs_more, timeout_s=5.0), "4", "5")
    assert [t.status for t in got] == [Status.GRADER_ERROR] * 2
    assert got[0].error is not None and got[0].error.startswith("reward broken: ValueError: not enough (worlds.py:")


def test_what_closes_over_something_runs_here(pool: WorkerPool) -> None:
    here = os.getpid()
    got = scored(pool, RewardSpec("own", lambda completions: [float(os.getpid() == here)] * len(completions)), "4")
    assert got[0].reward == 1.0
