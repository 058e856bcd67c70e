"""The thread that turns prompts into batches: draws, plays episodes, computes advantages, lays out micro-batches, hands them on.

Owns the order of a step on the sampling side and its clock. Never touches weights: it waits at the gate until the version it may sample
from is published, and talks to the engine only through episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.config.errors import BurnishError
from burnish.data.stream import PromptStream
from burnish.observe.trace import span
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import Credit, TokenBatch, build_batch, fit_shape
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.credit import credit
from burnish.rl.handoff import Closed, Handoff, VersionGate
from burnish.types import Group, SamplingParams, Status


class RolloutFailed(BurnishError):
    """Not one episode of the first step could be used: something is wrong with the run, not with an episode."""


@dataclass(frozen=True)
class Chunk:
    """One micro-batch on its way to the trainer.

    key: (step, mini-batch, micro-batch), the same in every iteration over it. groups: the episodes in it, handed over with iteration 0.
    """

    key: tuple[int, int, int]
    iteration: int
    batch: TokenBatch
    groups: Sequence[Group]
    rollout_seconds: float


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
    ) -> None:
        super().__init__(name="producer", daemon=True)
        self._stream, self._orchestrator, self._algorithm, self._plan = stream, orchestrator, algorithm, plan
        self._params, self._handoff, self._gate, self._seed, self._steps = params, handoff, gate, seed, steps
        self._rows_multiple = rows_multiple
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
        for step in self._steps:
            self._gate.wait_for_step(step)
            prompts = list(itertools.islice(self._stream, self._plan.batch))
            if len(prompts) < self._plan.batch:
                return  # the data has ended; what doesn't fill a batch is left
            params = (self._params,) * self._algorithm.num_generations
            draws = [Draw((step, i), prompt, params, (self._seed, step, i)) for i, prompt in enumerate(prompts)]
            await self._step(step, draws)

    async def _step(self, step: int, draws: Sequence[Draw]) -> None:
        groups: list[Group] = []
        mini = 0
        clock = time.monotonic()
        for start in range(0, len(draws), self._plan.rollout):
            with span("rollout", step=step, draw=start):
                async for group in self._orchestrator.groups(draws[start : start + self._plan.rollout]):
                    groups.append(group)
            while len(groups) >= (mini + 1) * self._plan.mini_batch:
                if mini == 0 and step == self._steps.start:
                    _require_some_success(groups)
                size = self._plan.mini_batch
                for chunk in self._chunks(step, mini, groups[mini * size : (mini + 1) * size], time.monotonic() - clock):
                    self._handoff.put(chunk)
                mini, clock = mini + 1, time.monotonic()  # the wait for room was the trainer's time

    def _chunks(self, step: int, mini: int, groups: Sequence[Group], seconds: float) -> Iterator[Chunk]:
        """The micro-batches of a mini-batch, each once per iteration."""
        advantages = credit(groups, self._algorithm.advantage, train_truncated=self._algorithm.train_truncated)
        size = self._plan.train_micro
        parts = [groups[i : i + size] for i in range(0, len(groups), size)]
        batches = [self._batch(part, advantages) for part in parts]
        for iteration in range(self._algorithm.num_iterations):
            for micro, (part, batch) in enumerate(zip(parts, batches, strict=True)):
                first = iteration == 0
                yield Chunk((step, mini, micro), iteration, batch, part if first else (), seconds if first and micro == 0 else 0.0)

    def _batch(self, groups: Sequence[Group], advantages: Credit) -> TokenBatch:
        with span("batch", groups=len(groups)):
            shape = fit_shape(groups, advantages, rows_multiple=self._rows_multiple)
            return build_batch(groups, advantages, temperature=self._params.temperature, shape=shape)


def _require_some_success(groups: Sequence[Group]) -> None:
    """Stop a run whose first episodes all failed, with the first reason: training on nothing looks healthy and isn't."""
    trajectories = [t for group in groups for t in group.trajectories]
    failed = [t for t in trajectories if t.status not in (Status.OK, Status.TRUNCATED)]
    if trajectories and len(failed) == len(trajectories):
        raise RolloutFailed(f"all {len(failed)} episodes of the first batch failed; the first ({failed[0].status}): {failed[0].error}")
    if trajectories and all(t.reward is None for t in trajectories):
        raise RolloutFailed(
            f"none of the {len(trajectories)} episodes of the first batch has a reward: every reward function returned None"
        )


__all__ = ["Chunk", "Producer", "RolloutFailed"]
