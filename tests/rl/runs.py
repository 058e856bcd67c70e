"""Learners on a tiny random model that copies nothing and knows nothing: for tests of the whole loop."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from burnish.config.algorithms import GRPOConfig
from burnish.config.schema import ClusterConfig, LoraConfig, RolloutConfig, RunSection, TrainingConfig
from burnish.models.model import Model
from burnish.observe.metrics import Metric
from burnish.rewards.manager import RewardSpec
from burnish.rl.batch import TokenBatch
from burnish.rl.cluster import RLCluster
from burnish.rl.fleet import ALONE, Fleet
from burnish.rl.learners import GRPOLearner
from burnish.rollout.engine import Engine
from burnish.sync.reshard import on_host
from burnish.train.step import MicroBatch

ROWS = [{"prompt": f"{i}{(7 * i) % 10}", "answer": str((7 * i) % 10)} for i in range(10)]


class RecordingCluster(RLCluster):
    """Keeps the metrics of every single update, which a step's report averages, and how far trainer and sampler were apart at most."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.updates: list[dict[str, Metric]] = []
        self.worst_mismatch: list[float] = []
        self.batches: list[TokenBatch] = []
        super().__init__(*args, **options)

    def update_actor(self, micro_batches: Iterable[MicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        micro_batches = list(micro_batches)
        params, pairs = (self.state.trainable, None) if self._scale is None else (self._base, self.state.trainable)
        for batch, *_ in micro_batches:
            self.batches.append(batch)
            apart = np.abs(on_host(self._score(params, pairs, batch)) - on_host(batch.sampler_logps))
            self.worst_mismatch.append(float(apart[on_host(batch.mask)].max()))
        metrics = super().update_actor(micro_batches, count=count, step=step)
        self.updates.append(metrics)
        return metrics

    def means(self, name: str) -> list[float]:
        return [update[name].total / update[name].weight for update in self.updates]


def digits_reward(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """How many places hold the answer's digit: differs between samples of a random model."""
    return [float(text.count(gold)) + 0.1 * len(text) for text, gold in zip(completions, answer, strict=True)]


def make_learner(
    model: Model | Path,
    *,
    reward: Callable[..., Any] = digits_reward,
    train_ds: Any = ROWS,
    eval_ds: Iterable[Any] | None = None,
    training: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    axes: dict[Any, int] | None = None,
    cluster: dict[str, Any] | None = None,
    learning_rate: float = 1e-2,
    sinks: Sequence[Any] = (),
    fleet: Fleet = ALONE,
    engine: Engine | None = None,
    seed: int = 3,
) -> GRPOLearner:
    """Batches of 4 prompts × 4 samples of at most 4 ids. axes: the actor's, where that is all that is said of meshes; else `cluster`."""
    sizes = {"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": learning_rate}, "head_chunk": 64, **(training or {})}
    limits = {"max_prompt_tokens": 12, "slots": 16, "prefill_rows": 4, "decode_chunk": 4, "max_kept": 8, **(rollout or {})}
    meshes = ClusterConfig.model_validate(cluster or {"actor": {"axes": axes}})
    policy = RecordingCluster(
        model,
        lora=lora,
        precision="f32",
        cluster=meshes,
        rollout=RolloutConfig(sampling={"max_tokens": 4, **(sampling or {})}, **limits),
        training=TrainingConfig(**sizes),
        fleet=fleet,
        engine=engine,
        seed=seed,
    )
    return GRPOLearner(
        policy,
        GRPOConfig(**{"num_generations": 4, **(algorithm or {})}),
        reward_fns=[dataclasses.replace(RewardSpec.of(reward), timeout_s=None)],  # in this process: a worker would take longer to start
        train_ds=train_ds,
        eval_ds=eval_ds,
        run=RunSection(seed=seed),
        sinks=sinks,
    )


def host(tree: Any) -> Any:
    """A copy on the host: what a later update can't change."""
    return jax.tree.map(lambda x: np.array(x), tree)


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def differs(left: Any, right: Any) -> bool:
    return any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
