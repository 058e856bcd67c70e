"""What processes say to each other and agree on, with threads in the place of processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.rl import wire
from burnish.rl.fleet import ALONE, Fleet, ProcessesDiffer, all_say, leaders, play, require_same, together
from burnish.rl.handoff import Interrupted
from burnish.rollout.engine import wait_for
from burnish.types import Completion, Group, Prompt, SamplingParams, Status, Step, StopReason, Trajectory


class Table:
    """What has been said, by topic and turn."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.said: dict[tuple[str, int, int], bytes] = {}


class Member(Fleet):
    """One of several threads that are a fleet."""

    def __init__(self, table: Table, index: int) -> None:
        self.index, self.count = index, table.count
        self._table = table
        self._turns: dict[str, int] = {}

    async def gather(self, topic: str, value: bytes) -> list[bytes]:
        turn = self._turns[topic] = self._turns.get(topic, 0) + 1
        self._table.said[topic, turn, self.index] = value
        while any((topic, turn, other) not in self._table.said for other in range(self.count)):
            await asyncio.sleep(0.001)
        return [self._table.said[topic, turn, other] for other in range(self.count)]


def in_each(work: Callable[[Fleet], Any], *, count: int = 2) -> list[Any]:
    """What `work` returns, or raises, in every member."""

    def one(fleet: Fleet) -> Any:
        try:
            return work(fleet)
        except Exception as error:
            return error

    table = Table(count)
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, [Member(table, index) for index in range(count)]))


def test_what_the_leader_says_holds_and_what_all_say_comes_by_index() -> None:
    assert in_each(lambda fleet: leaders(fleet, "t", f"from {fleet.index}"), count=3) == ["from 0"] * 3
    assert in_each(lambda fleet: all_say(fleet, "t", fleet.index), count=3) == [[0, 1, 2]] * 3
    assert leaders(ALONE, "t", 5) == 5 and all_say(ALONE, "t", 5) == [5]


def test_topics_dont_wait_for_each_other() -> None:
    def work(fleet: Fleet) -> Any:
        topics = ["a", "b"] if fleet.leads else ["b", "a"]
        found: dict[str, Any] = {}
        threads = [threading.Thread(target=lambda t=t: found.update({t: all_say(fleet, t, [t, fleet.index])})) for t in topics]
        for thread in threads:
            thread.start()
            thread.join(0.05)
        for thread in threads:
            thread.join()
        return found

    assert in_each(work) == [{"a": [["a", 0], ["a", 1]], "b": [["b", 0], ["b", 1]]}] * 2


def test_a_difference_is_refused_by_all_with_both_values() -> None:
    errors = in_each(lambda fleet: wait_for(require_same(fleet, "t", "prompts", {"count": 4 - fleet.index // 2})), count=3)
    for error in errors:
        assert isinstance(error, ProcessesDiffer)
        assert "different prompts: process 0 has {'count': 4}, process 2 has {'count': 3}" in str(error)
    assert in_each(lambda fleet: wait_for(require_same(fleet, "t", "prompts", 4))) == [None, None]


def test_work_is_gone_on_with_only_where_all_have_done_it() -> None:
    def interrupted(fleet: Fleet) -> int:
        def work() -> int:
            if fleet.index == 1:
                raise Interrupted
            return 7

        return together(fleet, "batches", work, lambda found: found)

    assert [type(error) for error in in_each(interrupted)] == [Interrupted, Interrupted]
    assert in_each(lambda fleet: together(fleet, "batches", lambda: [fleet.index], lambda found: len(found))) == [[0], [1]]
    ended = in_each(lambda fleet: together(fleet, "batches", lambda: [1] if fleet.leads else [], lambda found: found))
    assert all(isinstance(error, ProcessesDiffer) and "process 1 has []" in str(error) for error in ended)
    with pytest.raises(Interrupted):
        together(ALONE, "batches", lambda: (_ for _ in ()).throw(Interrupted), lambda found: found)


class Recorded(RolloutOrchestrator):
    """Plays nothing: two episodes of a group, whose ids tell where they come from."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def groups(self, draws: Iterable[Draw]) -> AsyncIterator[Group]:
        for draw in draws:
            self.asked.append(draw.id)
            yield Group(draw.id, draw.prompt, [episode(draw.id, sample) for sample in range(2)])


def episode(group: tuple[int, int], sample: int) -> Trajectory:
    ids = np.array([*group, sample, 9], np.int32)
    return Trajectory([], ids, ids > 8, np.zeros(4, np.float32), np.full(4, -1, np.int32), 3, group, sample, reward=float(group[1]))


@pytest.mark.parametrize(("count", "prompts", "shares"), [(2, 5, [3, 2]), (3, 2, [1, 1, 0]), (2, 0, [0, 0])])
def test_each_plays_its_share_and_has_the_groups_of_all_in_drawn_order(count: int, prompts: int, shares: list[int]) -> None:
    draws = [Draw((3, i), Prompt(f"row {i}", ()), (SamplingParams(max_tokens=1),) * 2, (0, 3, i)) for i in range(prompts)]

    def work(fleet: Fleet) -> Any:
        orchestrator = Recorded()
        return orchestrator.asked, wait_for(play(fleet, "t", orchestrator, draws))

    found = in_each(work, count=count)
    assert [len(asked) for asked, _ in found] == shares
    assert sorted(i for asked, _ in found for i in asked) == [(3, i) for i in range(prompts)]
    for _, groups in found:
        assert [group.id for group in groups] == [draw.id for draw in draws] and [g.prompt for g in groups] == [d.prompt for d in draws]
        assert [[t.ids.tolist() for t in g.trajectories] for g in groups] == [[[3, i, s, 9] for s in range(2)] for i in range(prompts)]


class Opaque:
    def __repr__(self) -> str:
        return "an object"


def test_an_episode_arrives_as_it_was_sent() -> None:
    kept = np.array([[5, -1], [7, 8]], np.int32)
    completion = Completion(
        np.array([5, 7], np.int32), np.array([-0.1, np.nan], np.float32), np.zeros(2, np.int32), StopReason.LENGTH, "truncated", kept
    )
    step = Step(np.zeros(0, np.int32), completion, 'a\n"é', observation=[{"role": "user", "content": "x"}], reward=None, done=True)
    step.info = {"seen": (1, 2), "table": np.arange(6.0).reshape(2, 3), "score": np.float32(0.5), 3: float("inf"), "other": Opaque()}
    sent = Trajectory([step], np.arange(4), np.array([0, 0, 1, 1], bool), np.zeros(4, np.float32), np.zeros(4, np.int32), 2, (1, 2), 0)
    sent.status, sent.rewards, sent.reward, sent.messages = Status.TRUNCATED, {"a": None, "b": 0.1}, 0.1, [{"role": "user", "content": "["}]
    [[found]] = wire.unpack(wire.pack([[sent]]))
    assert repr(found) == repr(sent).replace("np.float32(0.5)", "0.5").replace("an object", "'an object'")
    assert found.status is Status.TRUNCATED and found.steps[0].completion.stop is StopReason.LENGTH
    assert found.ids.dtype == sent.ids.dtype and found.sampled.dtype == bool and found.group == (1, 2)
    found.sampled[0] = True  # a writable array of its own
    assert not sent.sampled[0]


def test_what_arrives_executes_nothing_and_is_refused_where_unknown() -> None:
    head = b'[["record", "system", "ls"], []]'
    with pytest.raises(KeyError, match="system"):
        wire.unpack(len(head).to_bytes(8, "little") + head)
    assert isinstance(wire.unpack(wire.pack({"a": Opaque()}))["a"], str)
