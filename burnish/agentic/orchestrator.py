"""Many episodes at once: starts the samples of each prompt, scores complete groups, hands them on in the order in which they were drawn.

Owns concurrency, lost episodes and identity: the group's id is (step, draw index) and every sample's noise is a function of (run seed,
step, draw, sample, turn). Doesn't own batches, advantages or weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from burnish import faults
from burnish.agentic.agents import ConversationAgentBase
from burnish.agentic.environments import BaseTaskEnv, EpisodeId
from burnish.agentic.record import TokenRecord
from burnish.agentic.slots import Adaptive, grow
from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
from burnish.observe.trace import lane, span
from burnish.rewards.manager import RewardManager
from burnish.types import Group, Prompt, SamplingParams, Status, Trajectory

log = logging.getLogger(__name__)

_ATTEMPTS = 2
_LEAVE_S = 5.0
"""How long a lost episode gets to close its environment."""


@dataclass(frozen=True)
class Draw:
    """One prompt drawn: its group's id, how many samples, how to sample each, and the root of their noise."""

    id: tuple[int, int]
    prompt: Prompt
    params: tuple[SamplingParams, ...]
    seed_path: tuple[int, ...]


class RolloutOrchestrator:
    """Runs episodes of many groups together, at most `max_concurrency` at a time; `concurrency` is how many now."""

    def __init__(
        self,
        context: EpisodeContext,
        rewards: RewardManager,
        *,
        make_agent: Callable[[], ConversationAgentBase],
        make_env: Callable[[Prompt], BaseTaskEnv],
        max_concurrency: int | Adaptive,
    ) -> None:
        self._context = context
        self._rewards = rewards
        self._make_agent = make_agent
        self._make_env = make_env
        self._max_concurrency = max_concurrency
        self.concurrency = max_concurrency.start if isinstance(max_concurrency, Adaptive) else max_concurrency
        self._playing: set[asyncio.Task[Trajectory]] = set()  # an event loop alone doesn't keep its tasks
        self._died: set[tuple[tuple[int, int], int]] = set()  # whose worker died in the last attempt

    async def groups(self, draws: Iterable[Draw]) -> AsyncGenerator[Group]:
        """Complete, scored groups in drawn order, whatever finished first."""
        bound = self._max_concurrency
        slots = asyncio.Semaphore(bound.start if isinstance(bound, Adaptive) else bound)
        tasks = [asyncio.create_task(self._group(draw, slots)) for draw in draws]
        growing = [asyncio.create_task(grow(slots, bound, self._room, grown=self._note))] if isinstance(bound, Adaptive) else []
        try:
            for task in tasks:
                yield await task
        finally:
            for task in (*tasks, *growing):
                task.cancel()
            await asyncio.gather(*tasks, *growing, return_exceptions=True)

    def _room(self) -> int:
        """Requests that the engine could begin at once."""
        stats = self._context.engine.stats()
        return stats.slots - stats.running - stats.waiting

    def _note(self, concurrency: int) -> None:
        self.concurrency = concurrency

    async def _group(self, draw: Draw, slots: asyncio.Semaphore) -> Group:
        # A TaskGroup cancels the other samples and closes their environments when one raises: what raises here is no episode's data.
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [episodes.create_task(self._episode(draw, sample, slots)) for sample in range(len(draw.params))]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        group = Group(draw.id, draw.prompt, [task.result() for task in tasks])
        with lane("rewards"), span("reward", step=draw.id[0], group=draw.id[1], samples=len(tasks)):
            await self._rewards.score(group)
        return group

    async def _episode(self, draw: Draw, sample: int, slots: asyncio.Semaphore) -> Trajectory:
        """One sample of a draw. If nothing comes from it in time, or its worker process dies, it is played again with the same noise, once;
        then it is aborted, or the error that it has."""
        limit = self._context.limits.lost_after_s
        async with slots:
            for lost in range(_ATTEMPTS):
                trajectory = await self._attempt(draw, sample, limit, lost)
                last = lost + 1 == _ATTEMPTS
                if isinstance(trajectory, Trajectory) and (last or not self._worker_died(trajectory)):
                    trajectory.num_lost = lost
                    return trajectory
                why = f"nothing came from it in {limit:g} s" if trajectory is None else trajectory.error
                then = "it is left out" if last else "it is played again"
                log.warning("sample %d of draw %d in step %d is lost: %s; %s", sample, *draw.id[::-1], why, then)
        error = f"lost {_ATTEMPTS} times: nothing came from it in {limit:g} s"
        empty = TokenRecord().arrays()
        return Trajectory([], **empty, group=draw.id, sample=sample, status=Status.ABORTED, error=error, num_lost=_ATTEMPTS)

    def _worker_died(self, trajectory: Trajectory) -> bool:
        return (trajectory.group, trajectory.sample) in self._died

    async def _attempt(self, draw: Draw, sample: int, limit: float | None, lost: int) -> Trajectory | None:
        """The episode, or None if it didn't come in time; then it is cancelled, and left behind should it not even end then."""
        self._died.discard((draw.id, sample))
        task = asyncio.create_task(self._collect(draw, sample, lost))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        try:
            await asyncio.wait({task}, timeout=limit)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_LEAVE_S)

    async def _collect(self, draw: Draw, sample: int, lost: int) -> Trajectory:
        if faults.point("episode.lost", step=draw.id[0], draw=draw.id[1], sample=sample, attempt=lost):
            await asyncio.Event().wait()
        collector = TrajectoryCollectEngine(self._context, params=draw.params[sample], seed_path=(*draw.seed_path, sample))
        env = self._make_env(draw.prompt)
        env.episode = EpisodeId(draw.id, sample, len(draw.params), lost)
        with lane("episodes"), span("episode", step=draw.id[0], group=draw.id[1], sample=sample) as seen:
            trajectory = await collector.collect(self._make_agent(), env, group=draw.id, sample=sample)
            if collector.worker_died:
                self._died.add((draw.id, sample))
            seen.note(status=str(trajectory.status), turns=len(trajectory.steps), tokens=trajectory.num_sampled)
        return trajectory


__all__ = ["Draw", "RolloutOrchestrator"]
