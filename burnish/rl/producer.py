"""The thread that turns prompts into batches: draws, plays episodes, computes advantages, lays out micro-batches, hands them on.

Owns the order of a step on the sampling side and its clock. Never touches weights: it waits at the gate until the version it may sample
from is published, and talks to the engine only through episodes.

What becomes of groups that carry no signal is the algorithm's `zero_signal`. "keep": they stay in the denominators. "drop": they leave
advantages and loss, as if they hadn't been sampled, and the mini-batch is smaller. "resample" (dynamic sampling, DAPO,
arXiv:2503.14476): further prompts are drawn until the step has `batch_size` groups with a signal, in at most `max_resample_rounds` rounds;
the step's mini-batches are handed on when it is complete. What is still missing then is `on_shortage`'s: an error, or mini-batches that
are smaller, evenly. Data that ends on the way ends the run as it always does: under "train_short" after a step with what was kept, else
before it. Differs from the paper: a later round asks for twice what the share kept so far makes necessary, at most `batch_size`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.config.errors import BurnishError
from burnish.data.stream import PromptStream
from burnish.observe import trace
from burnish.observe.trace import span
from burnish.rl.advantages import group_relative
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import Credit, TokenBatch, build_batch, build_micro_batches
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.credit import TokenEstimator, credit, informative, uncredited
from burnish.rl.fleet import ALONE, Fleet, digest, play, require_same
from burnish.rl.handoff import Closed, Handoff, VersionGate
from burnish.rl.layout import BatchShape, bucket
from burnish.rl.replay import Replayed
from burnish.types import Group, SamplingParams, Status

log = logging.getLogger(__name__)


class RolloutFailed(BurnishError):
    """Not one episode of the first step could be used: something is wrong with the run, not with an episode."""


class TooFewGroups(BurnishError):
    """Resampling found too few groups with a signal."""


@dataclass(frozen=True)
class Chunk:
    """One micro-batch on its way to the trainer.

    key: (step, mini-batch, micro-batch), the same in every iteration over it. count: micro-batches of its mini-batch. groups: those whose
    episodes `batch.sequences` numbers, in order. cursor: where the data stands once every prompt of the step is drawn. What is counted
    once comes in iteration 0 only, with the first of the micro-batches that are handed on together: sampled, every group that was sampled
    for them, trained on or not; counts, sums by metric name; rollout_seconds.
    """

    key: tuple[int, int, int]
    iteration: int
    count: int
    batch: TokenBatch
    groups: Sequence[Group]
    cursor: Mapping[str, Any]
    sampled: Sequence[Group]
    counts: Mapping[str, int]
    rollout_seconds: float

    def sign(self) -> list[Any]:
        """What tells it from another: which it is, its shape, its ids. JSON."""
        batch = self.batch
        return [
            *self.key,
            self.iteration,
            self.count,
            *batch.tokens.shape,
            *batch.mask.shape,
            digest(batch.tokens, batch.target_ids, batch.mask),
        ]


class _Once(NamedTuple):
    """What is counted once: see `Chunk`."""

    sampled: Sequence[Group]
    counts: Mapping[str, int]
    rollout_seconds: float


_NOTHING = _Once((), {}, 0.0)


@dataclass
class _MiniBatch:
    """A mini-batch on its way: its number in the step, and the micro-batches of it that are handed on, each with its groups."""

    number: int
    parts: list[tuple[Sequence[Group], TokenBatch]] = field(default_factory=list)


class Producer(threading.Thread):
    """Fills `handoff` with the chunks of `steps`, then ends it, whatever happened.

    streams: each micro-batch is handed on when its groups are complete, not with the others of its mini-batch (`rl.overlap`).
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        orchestrator: RolloutOrchestrator | Replayed,
        algorithm: Algorithm,
        plan: BatchPlan,
        params: SamplingParams,
        handoff: Handoff[Chunk],
        gate: VersionGate,
        seed: int,
        steps: range,
        rows_multiple: int,
        pairs_per_token: float,
        streams: bool = False,
        fleet: Fleet = ALONE,
    ) -> None:
        super().__init__(name="producer", daemon=True)
        self._stream, self._orchestrator, self._algorithm, self._plan = stream, orchestrator, algorithm, plan
        self._params, self._handoff, self._gate, self._seed, self._steps = params, handoff, gate, seed, steps
        self._rows_multiple, self._pairs_per_token, self._fleet = rows_multiple, pairs_per_token, fleet
        self._streams = streams
        self._portion = plan.train_micro if streams and plan.train_micro is not None else plan.mini_batch  # groups handed on together
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._stopping = False

    def run(self) -> None:
        try:
            asyncio.run(self._produce())
        except BaseException as failure:
            # Only a stop that was asked for is a clean end: a cancellation from anywhere else would pass for the end of the data.
            asked = self._stopping and isinstance(failure, Closed | asyncio.CancelledError)
            self._handoff.finish(None if asked else failure)
        else:
            self._handoff.finish()

    def stop(self) -> None:
        """End soon: nothing more is handed on, and the episodes that play are cancelled. Calling it at any time is fine."""
        self._stopping = True
        self._handoff.close()
        self._gate.close()
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

    async def _produce(self) -> None:
        self._running = asyncio.get_running_loop(), asyncio.create_task(self._steps_in_turn())
        await self._running[1]

    async def _steps_in_turn(self) -> None:
        play = self._step_of_informative_groups if self._algorithm.zero_signal == "resample" else self._step
        for step in self._steps:
            with span("gate.wait", step=step):
                self._gate.wait_for_step(step)
            if not await play(step):
                return

    async def _step(self, step: int) -> bool:
        """Sample the groups of a step and hand them on, a portion at a time. False: the data doesn't fill a batch any more."""
        draws = await self._draw(step, 0, self._plan.batch)
        if len(draws) < self._plan.batch:
            return False
        mini, num_groups, clock = _MiniBatch(0), 0, time.monotonic()
        first: list[Group] = []
        async with contextlib.aclosing(self._portions(draws)) as portions:
            async for groups in portions:
                num_groups += len(groups)
                whole = num_groups % self._plan.mini_batch == 0
                if mini.number == 0 and step == self._steps.start:
                    first += groups
                    if whole:
                        _require_some_success(first)
                trained, found = groups, {}
                if self._algorithm.zero_signal == "drop":
                    trained = self._informative(groups)
                    found = {"group/dropped": len(groups) - len(trained)}
                once = _Once(groups, found, time.monotonic() - clock)
                await self._hand_on(step, mini, groups, trained, once, whole=whole)
                clock = time.monotonic()  # the wait for room was the trainer's time
                if whole:
                    mini = _MiniBatch(mini.number + 1)
        return True

    async def _portions(self, draws: Sequence[Draw]) -> AsyncGenerator[list[Group]]:
        """The groups of the draws in drawn order, as many at a time as are handed on together."""
        complete: list[Group] = []
        for start in range(0, len(draws), self._plan.rollout):
            part = draws[start : start + self._plan.rollout]
            with self._rollout_span(part):
                if self._streams:
                    async with contextlib.aclosing(self._orchestrator.groups(part)) as arriving:
                        async for group in arriving:
                            complete.append(group)
                            if len(complete) == self._portion:
                                yield complete
                                complete = []
                else:
                    complete += await play(self._fleet, "rollout", self._orchestrator, part)
            while len(complete) >= self._portion:
                yield complete[: self._portion]
                complete = complete[self._portion :]

    async def _step_of_informative_groups(self, step: int) -> bool:
        """Sample until a step has `batch` groups with a signal, then hand on its mini-batches. False: the data ended first."""
        sampled: list[Group] = []
        kept: list[Group] = []
        wanted, clock = self._plan.batch, time.monotonic()
        rounds, ended = 0, False
        while len(kept) < wanted and rounds < self._algorithm.max_resample_rounds and not ended:
            size = _round_size(wanted - len(kept), kept=len(kept), sampled=len(sampled), most=wanted)
            draws = await self._draw(step, len(sampled), size)
            ended = len(draws) < size
            if ended and not sampled:
                return False
            if not draws:
                break
            fresh: list[Group] = []
            for i in range(0, len(draws), self._plan.rollout):
                with self._rollout_span(draws[i : i + self._plan.rollout]):
                    fresh += await play(self._fleet, "rollout", self._orchestrator, draws[i : i + self._plan.rollout])
            if step == self._steps.start and not sampled:
                _require_some_success(fresh)
            rounds, sampled, kept = rounds + 1, sampled + fresh, kept + self._informative(fresh)
        if len(kept) < wanted:
            short = f"step {step + 1}: {len(kept)} of {len(sampled)} groups kept after {rounds} rounds; it needs {wanted}"
            if ended and (self._algorithm.on_shortage == "error" or not kept):
                log.warning("%s, and the data has ended", short)
                return False
            if self._algorithm.on_shortage == "error":
                raise TooFewGroups(
                    f"{short}, and all rewards of the others are equal: use prompts that are neither too easy nor too hard, raise "
                    "algorithm.max_resample_rounds, or set algorithm.on_shortage to train_short"
                )
            log.warning("%s, and goes on with those", short)
        trained = kept[:wanted]
        found = {
            "group/resampled": max(0, len(sampled) - wanted),
            "group/dropped": len(sampled) - len(kept),
            "group/surplus": len(kept) - len(trained),
            "group/missing": wanted - len(trained),
        }
        seconds = time.monotonic() - clock
        for number, mine in enumerate(_evenly(trained, self._plan.num_mini_batches)):
            once = _NOTHING if number else _Once(sampled, found, seconds)
            await self._hand_on(step, _MiniBatch(number), mine, mine, once, whole=True)
        return True

    async def _draw(self, step: int, first: int, size: int) -> list[Draw]:
        """Up to `size` further prompts of a step, numbered from `first`; fewer where the data ends, which it does for all processes."""
        params = (self._params,) * self._algorithm.num_generations
        with span("data", step=step, prompts=size):
            prompts = list(itertools.islice(self._stream, size))
        drawn = {"step": step + 1, "count": len(prompts), "ids": [prompt.id for prompt in prompts[:1] + prompts[-1:]]}
        await require_same(self._fleet, "draw", "prompts", drawn | {"digest": digest([prompt.id for prompt in prompts])})
        return [Draw((step, i), prompt, params, (self._seed, step, i)) for i, prompt in enumerate(prompts, start=first)]

    def _rollout_span(self, draws: Sequence[Draw]) -> span:
        step, first = draws[0].id
        size = self._plan.mini_batch
        minis = () if self._algorithm.zero_signal == "resample" else range(first // size, draws[-1].id[1] // size + 1)
        return span("rollout", flows=[trace.flow(step, mini) for mini in minis], step=step, group=first, groups=len(draws))

    def _informative(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that have an advantage other than 0; where advantages must wait for scores, those whose rewards differ."""
        if isinstance(self._algorithm.advantage, TokenEstimator):
            return informative(groups, credit(groups, group_relative, train_truncated=self._algorithm.train_truncated))
        return informative(groups, self._credit(groups))

    def _credit(self, groups: Sequence[Group]) -> Credit:
        """The advantage of every episode that carries loss; 0 where it must wait for scores, which only the trainer has."""
        algorithm = self._algorithm
        if isinstance(algorithm.advantage, TokenEstimator):
            return uncredited(groups, train_truncated=algorithm.train_truncated)
        parts = [[group] for group in groups] if algorithm.advantage_scope == "group" else [groups]
        unit = {"train_truncated": algorithm.train_truncated, "per": algorithm.credit, "gamma": algorithm.gamma}
        return {key: worth for part in parts for key, worth in credit(part, algorithm.advantage, **unit).items()}

    async def _hand_on(
        self, step: int, mini: _MiniBatch, groups: Sequence[Group], trained: Sequence[Group], once: _Once, *, whole: bool
    ) -> None:
        """The micro-batches of these groups, of which `trained` carry loss. whole: they are the mini-batch's last; then all of its
        micro-batches follow again for each further iteration."""
        with span("batch", flows=[trace.flow(step, mini.number)], step=step, mini=mini.number, groups=len(groups)):
            fresh = self._batches(groups, trained)
        known = len(mini.parts)
        mini.parts += fresh
        count = len(mini.parts) if whole else self._plan.mini_batch // self._portion
        cursor = self._stream.cursor()  # nobody draws for the next step before this one is handed on
        for micro, (part, batch) in enumerate(fresh, start=known):
            said = once if micro == known else _NOTHING
            await self._put(Chunk((step, mini.number, micro), 0, count, batch, part, cursor, *said))
        for iteration in range(1, self._algorithm.num_iterations if whole else 1):
            for micro, (part, batch) in enumerate(mini.parts):
                await self._put(Chunk((step, mini.number, micro), iteration, count, batch, part, cursor, *_NOTHING))

    async def _put(self, chunk: Chunk) -> None:
        """Into the queue, once there is room; episodes go on meanwhile."""
        step, mini, micro = chunk.key
        with span("queue.put", step=step, mini=mini, micro=micro):
            await asyncio.to_thread(self._handoff.put, chunk, flows=[trace.flow(step, mini)])

    def _batches(self, groups: Sequence[Group], trained: Sequence[Group]) -> list[tuple[Sequence[Group], TokenBatch]]:
        """The micro-batches of a mini-batch, each with the groups that it numbers. A mini-batch that is short keeps the usual program."""
        plan, multiple, temperature = self._plan, self._rows_multiple, self._params.temperature
        advantages = self._credit(trained)
        usual = plan.train_micro or plan.mini_batch
        at_least = BatchShape(rows=0, columns=0, targets=0, sequences=usual * self._algorithm.num_generations, prompts=usual)
        if plan.tokens_per_device is not None:
            batches = build_micro_batches(
                groups,
                advantages,
                temperature=temperature,
                tokens_per_device=plan.tokens_per_device,
                rows_multiple=multiple,
                pairs_per_token=self._pairs_per_token,
                at_least=at_least,
            )
            return [(groups, batch) for batch in batches]
        at_least = dataclasses.replace(at_least, rows=bucket(usual, multiple=multiple))
        parts = [groups[i : i + usual] for i in range(0, len(groups), usual)] or [[]]
        return [(part, build_batch(part, advantages, temperature=temperature, rows_multiple=multiple, at_least=at_least)) for part in parts]


def _round_size(missing: int, *, kept: int, sampled: int, most: int) -> int:
    """Prompts to sample next: twice what is needed if the share kept stays as it is, as a round too few ends a run."""
    return most if not kept else min(most, math.ceil(2 * missing * sampled / kept))


def _evenly(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """In order, in parts whose sizes differ by at most one."""
    edges = [len(groups) * i // parts for i in range(parts + 1)]
    return [groups[a:b] for a, b in itertools.pairwise(edges)]


def _require_some_success(groups: Sequence[Group]) -> None:
    """Stop a run whose first episodes all failed, with the first reason: training on nothing looks healthy and isn't."""
    trajectories = [t for group in groups for t in group.trajectories]
    failed = [t for t in trajectories if t.status not in (Status.OK, Status.TRUNCATED)]
    if trajectories and len(failed) == len(trajectories):
        first = failed[0]
        traceback = f"\n{first.traceback}" if first.traceback else ""
        raise RolloutFailed(f"all {len(failed)} episodes of the first batch failed; the first ({first.status}): {first.error}{traceback}")
    if trajectories and all(t.reward is None for t in trajectories):
        raise RolloutFailed(
            f"none of the {len(trajectories)} episodes of the first batch has a reward: every reward function returned None"
        )


__all__ = ["Chunk", "Producer", "RolloutFailed", "TooFewGroups"]
