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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.config.errors import BurnishError
from burnish.data.stream import PromptStream
from burnish.observe import trace
from burnish.observe.trace import span
from burnish.rl.advantages import group_relative
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import Credit, TokenBatch, build_batch, build_micro_batches, fit_shape
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.credit import TokenEstimator, credit, informative, uncredited
from burnish.rl.fleet import ALONE, Fleet, digest, play, require_same
from burnish.rl.handoff import Closed, Handoff, VersionGate
from burnish.rl.layout import BatchShape, bucket
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
    once comes with the first micro-batch of iteration 0 only: sampled, every group that was sampled for the mini-batch, trained on or not;
    counts, sums by metric name; rollout_seconds.
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


class Producer(threading.Thread):
    """Fills `handoff` with the chunks of `steps`, then ends it, whatever happened."""

    def __init__(
        self,
        *,
        stream: PromptStream,
        orchestrator: RolloutOrchestrator,
        algorithm: Algorithm,
        plan: BatchPlan,
        params: SamplingParams,
        handoff: Handoff[Chunk],
        gate: VersionGate,
        seed: int,
        steps: range,
        rows_multiple: int,
        pairs_per_token: float,
        fleet: Fleet = ALONE,
    ) -> None:
        super().__init__(name="producer", daemon=True)
        self._stream, self._orchestrator, self._algorithm, self._plan = stream, orchestrator, algorithm, plan
        self._params, self._handoff, self._gate, self._seed, self._steps = params, handoff, gate, seed, steps
        self._rows_multiple, self._pairs_per_token, self._fleet = rows_multiple, pairs_per_token, fleet
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
        """Sample the groups of a step and hand each mini-batch on when it is complete. False: the data doesn't fill a batch any more."""
        draws = await self._draw(step, 0, self._plan.batch)
        if len(draws) < self._plan.batch:
            return False
        groups: list[Group] = []
        mini, size, clock = 0, self._plan.mini_batch, time.monotonic()
        for start in range(0, len(draws), self._plan.rollout):
            groups += await self._play(draws[start : start + self._plan.rollout])
            while len(groups) >= (mini + 1) * size:
                if mini == 0 and step == self._steps.start:
                    _require_some_success(groups)
                mine = groups[mini * size : (mini + 1) * size]
                trained, found = mine, {}
                if self._algorithm.zero_signal == "drop":
                    trained = self._informative(mine)
                    found = {"group/dropped": len(mine) - len(trained)}
                for chunk in self._chunks(step, mini, mine, trained, sampled=mine, counts=found, seconds=time.monotonic() - clock):
                    self._hand_on(chunk)
                mini, clock = mini + 1, time.monotonic()  # the wait for room was the trainer's time
        return True

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
            fresh = [g for i in range(0, len(draws), self._plan.rollout) for g in await self._play(draws[i : i + self._plan.rollout])]
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
        for mini, mine in enumerate(_evenly(trained, self._plan.num_mini_batches)):
            once = {"sampled": () if mini else sampled, "counts": {} if mini else found, "seconds": 0.0 if mini else seconds}
            for chunk in self._chunks(step, mini, mine, mine, **once):
                self._hand_on(chunk)
        return True

    def _hand_on(self, chunk: Chunk) -> None:
        """Into the queue, once there is room."""
        step, mini, micro = chunk.key
        with span("queue.put", step=step, mini=mini, micro=micro):
            self._handoff.put(chunk, flows=[trace.flow(step, mini)])

    async def _draw(self, step: int, first: int, size: int) -> list[Draw]:
        """Up to `size` further prompts of a step, numbered from `first`; fewer where the data ends, which it does for all processes."""
        params = (self._params,) * self._algorithm.num_generations
        with span("data", step=step, prompts=size):
            prompts = list(itertools.islice(self._stream, size))
        drawn = {"step": step + 1, "count": len(prompts), "ids": [prompt.id for prompt in prompts[:1] + prompts[-1:]]}
        await require_same(self._fleet, "draw", "prompts", drawn | {"digest": digest([prompt.id for prompt in prompts])})
        return [Draw((step, i), prompt, params, (self._seed, step, i)) for i, prompt in enumerate(prompts, start=first)]

    async def _play(self, draws: Sequence[Draw]) -> list[Group]:
        step, first = draws[0].id
        size = self._plan.mini_batch
        minis = () if self._algorithm.zero_signal == "resample" else range(first // size, draws[-1].id[1] // size + 1)
        with span("rollout", flows=[trace.flow(step, mini) for mini in minis], step=step, group=first, groups=len(draws)):
            return await play(self._fleet, "rollout", self._orchestrator, draws)

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

    def _chunks(
        self,
        step: int,
        mini: int,
        groups: Sequence[Group],
        trained: Sequence[Group],
        *,
        sampled: Sequence[Group],
        counts: Mapping[str, int],
        seconds: float,
    ) -> Iterator[Chunk]:
        """The micro-batches of a mini-batch, each once per iteration. groups: its groups; trained: those of them that carry loss."""
        with span("batch", flows=[trace.flow(step, mini)], step=step, mini=mini, groups=len(groups)):
            parts = self._batches(groups, trained)
        cursor = self._stream.cursor()  # nobody draws for the next step before this one is handed on
        for iteration in range(self._algorithm.num_iterations):
            for micro, (part, batch) in enumerate(parts):
                first = iteration == 0 and micro == 0
                once = (sampled, counts, seconds) if first else ((), {}, 0.0)
                yield Chunk((step, mini, micro), iteration, len(parts), batch, part, cursor, *once)

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
        shapes = [fit_shape(part, advantages, rows_multiple=multiple).covering(at_least) for part in parts]
        return [
            (part, build_batch(part, advantages, temperature=temperature, shape=shape)) for part, shape in zip(parts, shapes, strict=True)
        ]


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
