"""Boxed mathematics through math-verify, in worker processes that can be killed."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from burnish.agentic.calls import Calls
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import UserError
from burnish.rewards import math
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.types import Completion, Group, Prompt, Status, Step, StopReason, Trajectory

pytest.importorskip("math_verify")
pytestmark = pytest.mark.slow  # two seconds of imports in each worker


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(4)
    yield made
    made.close()


def graded(pool: WorkerPool, gold: Any, texts: Sequence[str], fn: Any = math, timeout_s: float = 60.0) -> list[Trajectory]:
    none = np.zeros(0, np.int32)
    completion = Completion(none, none.astype(np.float32), none, StopReason.STOP_ID)
    made = [
        Trajectory([Step(none, completion, t)], none, none.astype(bool), completion.logps, none, 0, (1, 0), i) for i, t in enumerate(texts)
    ]
    group = Group((1, 0), Prompt("p", ({"role": "user", "content": "?"},), {"answer": gold}), made)
    asyncio.run(RewardManager([RewardSpec("math", fn, timeout_s=timeout_s)], runner=Calls(pool)).score(group))
    return made


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            r"\frac{1}{2}",
            [r"\boxed{0.5}", r"so \boxed{1/2}", r"\boxed{\frac{2}{4}}", r"\boxed{3} no, \boxed{\dfrac12}"],
            [r"\boxed{2}", "1/2", ""],
        ),
        (r"x^2+2x+1", [r"\boxed{(x+1)^2}"], [r"\boxed{(x-1)^2}", r"\boxed{"]),
        (r"\{1,2\}", [r"\boxed{\{2,1\}}"], [r"\boxed{\{1\}}"]),
        (["7", r"\boxed{8}"], [r"\boxed{7}", r"\boxed{8.0}"], [r"\boxed{78}"]),
    ],
)
def test_equal_is_equal_as_mathematics(pool: WorkerPool, gold: Any, right: list[str], wrong: list[str]) -> None:
    got = graded(pool, gold, right + wrong)
    assert [t.reward for t in got] == [1.0] * len(right) + [0.0] * len(wrong), [t.error for t in got]


def hangs_for_one(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    if "hang" in completions:
        time.sleep(600)
    return math(completions, answer)


def test_b085_one_that_hangs_is_killed_and_costs_itself_only(pool: WorkerPool) -> None:
    got = graded(pool, "4", [r"\boxed{4}", "hang", r"\boxed{5}"], hangs_for_one, timeout_s=8.0)
    assert [t.reward for t in got] == [1.0, None, 0.0] and got[1].status is Status.GRADER_ERROR


def test_a_thread_is_refused_and_so_is_a_gold_answer_that_is_none(pool: WorkerPool) -> None:
    with pytest.raises(UserError, match="must run in a worker process"):
        asyncio.run(asyncio.to_thread(math, [r"\boxed{4}"], ["4"]))
    assert math([r"\boxed{4}"], ["4"]) == [1.0] and os.getpid() > 0
    got = graded(pool, "", [r"\boxed{4}"])
    assert got[0].status is Status.GRADER_ERROR and "can't be read as mathematics" in (got[0].error or "")
