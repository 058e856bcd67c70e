"""The processes of a run, as one of them sees the others: who it is, what they tell each other, and what they must agree on.

Owns the shares of the episodes, agreement (on what was drawn, on the next update, on stopping) and the errors of a process that fails
alone. `Fleet` is a run of one process, for which all of it is trivial; several are `rl.distributed`'s. Whoever samples, trains or saves
asks the fleet and doesn't know how many there are. No jax.

Every process draws every prompt, plays the episodes of its share, and then has the episodes of all: batches, advantages and metrics are
made of the same groups everywhere, so nothing about an update depends on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.config.errors import BurnishError
from burnish.rl import wire
from burnish.rl.handoff import Interrupted
from burnish.rl.replay import Replayed
from burnish.rollout.engine import wait_for
from burnish.types import Group

T = TypeVar("T")


class PeerFailed(BurnishError):
    """Another process of the run has failed, and said why."""


class PeerLost(BurnishError):
    """Another process of the run is gone without a word."""


class ProcessesDiffer(BurnishError):
    """The processes of a run don't do the same."""


class Fleet:
    """A run of one process.

    index: which of `count` processes this is; 0 leads: the run's folder, the display and the checkpoints are its.
    """

    index = 0
    count = 1

    @property
    def leads(self) -> bool:
        return self.index == 0

    async def gather(self, topic: str, value: bytes) -> list[bytes]:
        """What every process says, by index. All ask in the same order on each topic; a topic is one thread's.

        Raises PeerFailed or PeerLost where a process can't answer any more.
        """
        return [value]

    def ask_to_stop(self) -> None:
        """Pass on that the run is to end soon. A signal's handler may call it."""

    def on_stop(self, listener: Callable[[], None]) -> None:
        """listener: called once, on any thread, after some process was asked to stop."""

    def on_leaving(self, last_words: Callable[[int, str], None]) -> None:
        """last_words: gets (exit code, cause) before this process leaves without any clean-up, because another is gone and its main thread
        is stuck."""

    def cause_of(self, error: BaseException) -> BaseException:
        """The error that this one follows from: another process's end, or itself."""
        return error


ALONE = Fleet()


def digest(*parts: Any) -> str:
    """Of arrays and of anything that prints: for comparing what is too long to be sent."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return hashed.hexdigest()


async def _said(fleet: Fleet, topic: str, value: Any) -> list[Any]:
    return [json.loads(answer) for answer in await fleet.gather(topic, json.dumps(value).encode())]


def all_say(fleet: Fleet, topic: str, value: T) -> list[T]:
    """What every process says, by index: JSON values."""
    return wait_for(_said(fleet, topic, value))


def leaders(fleet: Fleet, topic: str, value: T) -> T:
    """The leader's value (JSON), in every process; the others' isn't looked at."""
    return all_say(fleet, topic, value if fleet.leads else None)[0]  # type: ignore[return-value]


async def require_same(fleet: Fleet, topic: str, what: str, value: Any) -> None:
    """Go on only if all processes say the same (JSON). Raises ProcessesDiffer that shows the first two that don't."""
    _refuse_difference(what, await _said(fleet, topic, value))


def _refuse_difference(what: str, answers: Sequence[Any]) -> None:
    for index, answer in enumerate(answers):
        if answer != answers[0]:
            raise ProcessesDiffer(
                f"the processes of this run have different {what}: process 0 has {answers[0]}, process {index} has {answer}; give all of "
                "them the same configuration, data and versions"
            )


def together(fleet: Fleet, what: str, work: Callable[[], T], sign: Callable[[T], Any]) -> T:
    """Do `work`, as every process does, and go on only if all can. On the learner's thread.

    sign: of the result, JSON that must be the same everywhere. Raises Interrupted in all processes where one was; ProcessesDiffer.
    """
    try:
        result = work()
    except Interrupted:
        all_say(fleet, "learner", None)
        raise
    answers = all_say(fleet, "learner", [sign(result)])
    if None in answers:
        raise Interrupted
    _refuse_difference(what, [answer[0] for answer in answers])  # type: ignore[index]
    return result


async def play(fleet: Fleet, topic: str, orchestrator: RolloutOrchestrator | Replayed, draws: Sequence[Draw]) -> list[Group]:
    """The groups of all draws, in drawn order, of which each process has played its share: every `count`-th."""
    mine = [group async for group in orchestrator.groups(draws[fleet.index :: fleet.count])]
    if fleet.count == 1:
        return mine
    parts = [wire.unpack(part) for part in await fleet.gather(topic, wire.pack([group.trajectories for group in mine]))]
    return [Group(draw.id, draw.prompt, parts[i % fleet.count][i // fleet.count]) for i, draw in enumerate(draws)]


__all__ = ["ALONE", "Fleet", "PeerFailed", "PeerLost", "ProcessesDiffer", "all_say", "digest", "leaders", "play", "require_same"]
__all__ += ["together"]
