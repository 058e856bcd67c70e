"""The held-out set, sampled to its end: the same function before, during and after training and behind `burnish eval`.

Owns its seeds (apart from training's) and what an evaluation is. Never trains on what it samples.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.config.schema import RolloutConfig, SamplingConfig
from burnish.observe.trace import span
from burnish.rl.fleet import ALONE, Fleet, play
from burnish.rl.handoff import Interrupted
from burnish.rollout.engine import wait_for
from burnish.types import Prompt, SamplingParams, Trajectory

EVALUATION_STREAM = 2**31 - 1
"""Takes a training step's place in the seed path, so that evaluation and training never share noise."""


@dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out prompts under one way of sampling, in the prompts' order.

    rewards: float64[N], one a prompt; an episode without a reward counts as 0, since leaving it out would reward failing. Their mean is
    the accuracy. trajectories: the episodes; none where a resumed run knows the rewards only.
    """

    label: str
    rewards: np.ndarray
    trajectories: Sequence[Trajectory] = ()

    @classmethod
    def of(cls, label: str, trajectories: Sequence[Trajectory]) -> Evaluation:
        return cls(label, np.array([0.0 if t.reward is None else t.reward for t in trajectories]), trajectories)

    @property
    def accuracy(self) -> float:
        return float(self.rewards.mean())

    def metrics(self) -> dict[str, float]:
        accuracy, count = metric_names(self.label)
        return {accuracy: self.accuracy, count: float(len(self.rewards))}


def metric_names(label: str) -> tuple[str, str]:
    """Of an evaluation's accuracy, and of the count behind it."""
    return f"eval/{label}/accuracy", f"eval/{label}/count"


async def evaluate(
    orchestrator: RolloutOrchestrator,
    prompts: Sequence[Prompt],
    samplings: Mapping[str, SamplingParams],
    *,
    seed: int,
    fleet: Fleet = ALONE,
) -> dict[str, Evaluation]:
    """Sample every prompt once in every way of `samplings`, all ways of a prompt together so that its prefill is shared.

    The noise of a completion depends on (seed, prompt index, way's position) only, so two evaluations of one run are paired.
    """
    ways = tuple(samplings.values())
    draws = [Draw((EVALUATION_STREAM, i), prompt, ways, (seed, EVALUATION_STREAM, i)) for i, prompt in enumerate(prompts)]
    with span("evaluate", prompts=len(prompts)):
        groups = await play(fleet, "evaluate", orchestrator, draws)
    return {label: Evaluation.of(label, [group.trajectories[way] for group in groups]) for way, label in enumerate(samplings)}


class Evaluator:
    """Evaluates on the caller's thread, until it is done or `cancel` is called."""

    def __init__(self, orchestrator: RolloutOrchestrator, fleet: Fleet) -> None:
        self._orchestrator, self._fleet = orchestrator, fleet
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[dict[str, Evaluation]]] | None = None
        self._cancelled = False

    def run(self, prompts: Sequence[Prompt], samplings: Mapping[str, SamplingParams], *, seed: int) -> dict[str, Evaluation]:
        """`evaluate`, by label. Raises `Interrupted` once it is cancelled."""

        async def work() -> dict[str, Evaluation]:
            task = asyncio.create_task(evaluate(self._orchestrator, prompts, samplings, seed=seed, fleet=self._fleet))
            self._running = asyncio.get_running_loop(), task
            if self._cancelled:
                task.cancel()
            return await task

        try:
            return wait_for(work())
        except asyncio.CancelledError:
            if self._cancelled:
                raise Interrupted from None
            raise
        finally:
            self._running = None

    def cancel(self) -> None:
        """End the evaluation that runs, and every later one. Any thread, and a signal's handler, may call it."""
        self._cancelled = True
        if (running := self._running) is not None:
            loop, task = running
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
                loop.call_soon_threadsafe(task.cancel)


def evaluation_samplings(rollout: RolloutConfig, *, compare: bool) -> dict[str, SamplingConfig]:
    """How held-out prompts are sampled, by label: as `rollout.evaluation` says, and with `compare` at the training temperature too."""
    evaluation, training = rollout.evaluation, rollout.sampling
    changes = {"temperature": evaluation.temperature, "max_tokens": evaluation.max_tokens or training.max_tokens}
    ways = {_label(evaluation.temperature): training.model_copy(update=changes)}
    if compare:
        ways[_label(training.temperature)] = training.model_copy(update={"max_tokens": changes["max_tokens"]})
    return ways


def _label(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T={temperature:g}"


@dataclass(frozen=True, slots=True)
class Change:
    """Difference of two accuracies on the same tasks, with its 95 % bootstrap interval."""

    difference: float
    low: float
    high: float


def paired_change(
    before: Evaluation, after: Evaluation, *, clusters: Sequence[Hashable] | None = None, resamples: int = 10_000, seed: int = 0
) -> Change:
    """after - before, resampling tasks (not answers), so that what makes a task hard cancels (Efron & Tibshirani, 1993, ch. 8).

    clusters: one label a task; tasks of one label are resampled together, as wordings of one question must be: they aren't independent.
    """
    difference = after.rewards - before.rewards
    labels = np.arange(len(difference)) if clusters is None else np.unique(np.array([str(c) for c in clusters]), return_inverse=True)[1]
    totals, sizes = np.bincount(labels, weights=difference), np.bincount(labels)
    drawn = np.random.default_rng(seed).integers(len(sizes), size=(resamples, len(sizes)))
    means = totals[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Change(float(difference.mean()), float(low), float(high))


__all__ = ["Change", "Evaluation", "Evaluator", "evaluate", "evaluation_samplings", "metric_names", "paired_change"]
