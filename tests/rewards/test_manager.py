"""How reward functions are called, and what becomes of those that fail. Each test names the rule that it locks."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from burnish import faults
from burnish.data.source import from_rows
from burnish.rewards import exact, length_penalty, numeric
from burnish.rewards.check import check_gold
from burnish.rewards.manager import RewardError, RewardManager, RewardSpec
from burnish.types import Completion, Group, Prompt, Status, Step, StopReason, Trajectory

EMPTY = np.zeros(0, np.int32)
COMPLETION = Completion(EMPTY, EMPTY.astype(np.float32), EMPTY, StopReason.STOP_ID)


def trajectory(text: str, *, sample: int = 0, status: Status = Status.OK, step_rewards: Sequence[float | None] = (None,)) -> Trajectory:
    steps = [Step(EMPTY, COMPLETION, text, reward=reward) for reward in step_rewards]
    ids = np.arange(4, dtype=np.int32)
    return Trajectory(steps, ids, ids > 1, ids.astype(np.float32), ids, 2, (3, 1), sample, status)


def group_of(*texts: str, **meta: Any) -> Group:
    prompt = Prompt("s:0", ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2 ="}), {"seed": 7, **meta})
    return Group((3, 1), prompt, [trajectory(text, sample=i) for i, text in enumerate(texts)])


def score(group: Group, *fns: Callable[..., Any] | RewardSpec) -> list[float | None]:
    manager = RewardManager([fn if isinstance(fn, RewardSpec) else RewardSpec.of(fn) for fn in fns])
    asyncio.run(manager.score(group))
    return [t.reward for t in group.trajectories]


# ---------------------------------------------------------------------------------------------------------------------- calling


def test_a_function_gets_what_it_names() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts, completions, conversations, trajectories, answer, unused=5):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return [0.5, 1.0]

    group = group_of("4", "5", answer="4", level=3)
    assert score(group, reward) == [0.5, 1.0]
    assert seen["prompts"] == ["2 + 2 =", "2 + 2 ="]
    assert seen["completions"] == ["4", "5"]
    assert seen["answer"] == ["4", "4"]
    assert seen["unused"] == 5
    assert seen["trajectories"] == group.trajectories
    assert [m["content"] for m in seen["conversations"][1]] == ["be brief", "2 + 2 =", "5"]


def test_a_function_with_columns_gets_every_column_and_only_lists() -> None:
    def reward(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        assert columns == {"seed": [7, 7], "answer": ["4", "4"]}
        return [1, 0]

    assert score(group_of("4", "5", answer="4"), reward) == [1.0, 0.0]


def test_a_function_may_do_without_prompts_and_may_spoil_its_lists() -> None:
    def spoils(completions, trajectories, answer):  # type: ignore[no-untyped-def]
        for given in (completions, trajectories, answer):
            given.clear()
        return [1.0, 1.0]

    assert score(group_of("4", "5", answer="4"), spoils, numeric) == [2.0, 1.0]


def test_the_conversation_of_an_episode_that_has_messages_is_those() -> None:
    group = group_of("4")
    group.trajectories[0].messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert score(group, lambda conversations: [float(len(conversations[0]))]) == [2.0]


def test_async_functions_and_objects_run_on_the_loop_and_plain_ones_off_it() -> None:
    main = threading.current_thread()

    async def on_loop(completions):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0)
        return [float(threading.current_thread() is main)]

    class Judge:
        async def __call__(self, completions):  # type: ignore[no-untyped-def]
            return [10.0 * (threading.current_thread() is main)]

    def off_loop(completions):  # type: ignore[no-untyped-def]
        return [100.0 * (threading.current_thread() is not main)]

    group = group_of("x")
    assert score(group, on_loop, Judge(), off_loop) == [111.0]
    assert group.trajectories[0].rewards == {"on_loop": 1.0, "Judge": 10.0, "off_loop": 100.0}


def test_bound_options_stay_bound_even_beside_a_column_of_their_name() -> None:
    fn = functools.partial(exact, ignore_case=True)
    group = group_of("A", "b", answer="a", ignore_case=False)
    assert score(group, fn) == [1.0, 0.0]
    assert group.trajectories[0].rewards == {"exact": 1.0}


def test_functions_of_one_name_are_told_apart_and_the_callers_list_is_left_alone() -> None:
    specs = [RewardSpec.of(numeric), RewardSpec("numeric", numeric, weight=0.5)]
    before = list(specs)
    group = group_of("4", answer="4")
    assert score(group, *specs) == [1.5]
    assert group.trajectories[0].rewards == {"numeric": 1.0, "numeric_2": 1.0}
    assert specs == before


def test_a_column_that_a_function_needs_and_the_row_lacks_is_named_before_anything_runs() -> None:
    manager = RewardManager([RewardSpec.of(numeric)])
    with pytest.raises(RewardError, match="reward numeric needs answer, which s:0 has not; its columns are: gold, seed"):
        manager.check(group_of(gold="4").prompt)
    manager.check(group_of(answer="4").prompt)


# ------------------------------------------------------------------------------------------------------------------ the weighted sum


def test_weights_multiply_and_negative_ones_punish() -> None:
    group = group_of("4", "5", answer="4")
    specs = [RewardSpec("right", numeric, weight=2.0), RewardSpec("long", lambda completions: [1.0, 0.0], weight=-0.5)]
    assert score(group, *specs) == [1.5, 0.0]


def test_b001_none_is_missing_and_where_nothing_applies_the_reward_is_none() -> None:
    def sometimes(completions):  # type: ignore[no-untyped-def]
        return [1.0, None, 0.0, None]

    def rarely(completions):  # type: ignore[no-untyped-def]
        return [None, None, None, 3.0]

    group = group_of("a", "b", "c", "d")
    assert score(group, sometimes, rarely) == [1.0, None, 0.0, 3.0]
    assert [t.rewards["sometimes"] for t in group.trajectories] == [1.0, None, 0.0, None]
    assert all(t.status is Status.OK for t in group.trajectories)


def test_what_the_environment_gave_counts_once_with_weight_one() -> None:
    group = group_of("4", answer="4")
    group.trajectories[0] = trajectory("4", step_rewards=[1.0, None, 2.0])
    assert score(group, RewardSpec("right", numeric, weight=0.5)) == [3.5]
    assert group.trajectories[0].rewards == {"right": 1.0, "environment": 3.0}
    assert group.trajectories[0].reward_weights == {"right": 0.5, "environment": 1.0}
    assert score(group) == [3.0]
    assert score(group_of("4")) == [None]


def test_b009_episodes_that_failed_are_neither_graded_nor_touched() -> None:
    group = group_of("4", "4", "5", answer="4")
    group.trajectories[1].status = Status.ENV_ERROR
    group.trajectories[2].status = Status.TRUNCATED
    seen: list[int] = []

    def counting(completions):  # type: ignore[no-untyped-def]
        seen.append(len(completions))
        return [1.0] * len(completions)

    assert score(group, counting) == [1.0, None, 1.0]
    assert seen == [2] and group.trajectories[1].rewards == {} and group.trajectories[1].status is Status.ENV_ERROR


def test_a_group_without_a_graded_episode_calls_nothing() -> None:
    group = group_of("4")
    group.trajectories[0].status = Status.ABORTED
    assert score(group, lambda completions: 1 / 0) == [None]
    assert group.trajectories[0].status is Status.ABORTED


# ------------------------------------------------------------------------------------------------------------------ wrong returns


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "got None"),
        (1.0, "got 1.0"),
        ("10", "got '10'"),
        ({0: 1.0, 1: 0.0}, "got {0: 1.0"),
        ({1.0, 0.0}, "got {"),
        ([1.0], "got 1:"),
        ([1.0, 0.0, 0.0], "got 3:"),
        ([1.0, "0"], "number 1 is '0' .str."),
        ([[1.0], [0.0]], r"number 0 is \[1.0\]"),
        ([1.0, float("nan")], "number 1 is nan .float.. For no reward return None"),
        ([float("inf"), 0.0], "number 0 is inf"),
        (np.zeros((2, 2)), "number 0 is array"),
        ([1j, 0], "number 0 is 1j"),
        (np.array(1.0), r"got array\(1"),
        ([1, 10**400], "number 1 is 10000"),
    ],
)
def test_a_wrong_return_names_the_function_what_was_expected_and_what_came(returned: object, got: str) -> None:
    def mine(completions):  # type: ignore[no-untyped-def]
        return returned

    with pytest.raises(RewardError, match=f"reward mine must return 2 rewards, each a finite number or None; {got}"):
        score(group_of("a", "b"), mine)


@pytest.mark.parametrize(
    "returned", [[True, False], (1, 0), np.array([1.0, 0.0], np.float32), np.array([True, False]), [np.float64(1), np.int32(0)]]
)
def test_numbers_of_every_kind_become_floats(returned: Any) -> None:
    rewards = score(group_of("a", "b"), lambda completions: returned)
    assert rewards == [1.0, 0.0] and all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize("fn", [5, "numeric", None])
def test_a_reward_that_is_no_function_is_refused(fn: Any) -> None:
    with pytest.raises(RewardError, match="reward 'x' must be a function"):
        RewardSpec("x", fn)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5"])
def test_b087_a_time_limit_is_finite_and_positive_or_none(timeout_s: Any) -> None:
    with pytest.raises(RewardError, match="timeout_s must be finite and > 0, or None"):
        RewardSpec("x", numeric, timeout_s=timeout_s)
    assert RewardSpec("x", numeric, timeout_s=None).timeout_s is None


# ---------------------------------------------------------------------------------------------------------------------- failures


def grader_failed(group: Group) -> str:
    assert all(t.status is Status.GRADER_ERROR and t.reward is None for t in group.trajectories)
    (error,) = {t.error for t in group.trajectories}
    assert error is not None
    return error


@pytest.mark.parametrize("kind", [ZeroDivisionError, StopIteration, SystemExit, KeyError, TimeoutError])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_fails_the_group_with_its_text_and_never_the_run(kind: type[BaseException], asynchronous: bool) -> None:
    def bad(completions):  # type: ignore[no-untyped-def]
        raise kind("no such luck")

    async def bad_async(completions):  # type: ignore[no-untyped-def]
        raise kind("no such luck")

    group = group_of("4", "5", answer="4")
    assert score(group, bad_async if asynchronous else bad, numeric) == [None, None]
    error = grader_failed(group)
    assert "reward bad" in error and ("no such luck" in error or kind is StopIteration)
    assert [t.rewards["numeric"] for t in group.trajectories] == [1.0, 0.0]


def test_an_awaitable_that_was_cancelled_fails_the_group_and_cancels_nothing_else() -> None:
    async def bad(completions):  # type: ignore[no-untyped-def]
        shared = asyncio.get_running_loop().create_future()
        shared.cancel()
        return await shared

    group = group_of("4", "5", answer="4")
    assert score(group, bad, numeric) == [None, None]
    assert "reward bad: CancelledError" in grader_failed(group)


def test_the_place_of_an_exception_is_recorded() -> None:
    def bad(completions):  # type: ignore[no-untyped-def]
        raise ValueError("x")

    group = group_of("4")
    score(group, bad)
    assert f"ValueError: x (test_manager.py:{bad.__code__.co_firstlineno + 1})" in grader_failed(group)


def test_a_plain_function_that_hangs_ends_at_its_limit_and_holds_nothing_up() -> None:
    release = threading.Event()

    def hangs(completions):  # type: ignore[no-untyped-def]
        release.wait(30)
        return [1.0]

    manager = RewardManager([RewardSpec("hangs", hangs, timeout_s=0.1)])
    group, start = group_of("4"), time.monotonic()
    asyncio.run(manager.score(group))
    assert time.monotonic() - start < 20
    assert grader_failed(group) == "reward hangs: not done within 0.1 s" and manager.abandoned == 1
    release.set()  # returns late, to a loop that is closed: nothing may be raised on its thread
    for thread in threading.enumerate():
        if thread.name == "reward hangs":
            thread.join(5)
            assert not thread.is_alive()


def test_an_async_function_that_hangs_is_cancelled_at_its_limit() -> None:
    cancelled: list[bool] = []

    async def hangs(completions):  # type: ignore[no-untyped-def]
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    group = group_of("4")
    score(group, RewardSpec("hangs", hangs, timeout_s=0.05))
    assert grader_failed(group) == "reward hangs: not done within 0.05 s" and cancelled == [True]


def test_an_injected_fault_is_reported_like_any_other_failure() -> None:
    group = group_of("4", answer="4")
    with faults.armed("reward@id=1:raise"):
        score(group, numeric)
    assert "InjectedFault" in grader_failed(group)
    with faults.armed("reward@id=2:raise"):
        assert score(group_of("4", answer="4"), numeric) == [1.0]


# ---------------------------------------------------------------------------------------------------------------------- graders


def test_check_gold_names_the_answers_that_their_own_grader_refuses() -> None:
    check_gold(numeric, from_rows([{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "0", "answer": "-0"}], name="s").prompts)

    async def only_a(completions):  # type: ignore[no-untyped-def]
        return [float(completions[0] == "a")]

    with pytest.raises(RewardError, match=r"1 of 2 gold answers don't get 1.0: s:1 \('B'\) gets 0.0"):
        check_gold(only_a, from_rows([{"prompt": "", "answer": "a"}, {"prompt": "", "answer": "B"}], name="s").prompts)


def test_length_penalty_runs_through_the_manager() -> None:
    fn = functools.partial(length_penalty, free_tokens=0, max_tokens=4)
    assert score(group_of("4"), fn) == [-0.5]
