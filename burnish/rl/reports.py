"""What a step's episodes amount to, as metrics (names and meanings: docs/metrics.md). Owns counting; no models, no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from burnish.observe.metrics import MetricCollector
from burnish.rl.advantages import count_groups
from burnish.rl.credit import counts
from burnish.types import Group


def record_rollout(metrics: MetricCollector, groups: Sequence[Group], *, version: int, train_truncated: bool) -> None:
    """Rewards, group signal, lengths, stop reasons, statuses and staleness of some groups, into `metrics`.

    version: of the weights being trained; staleness is how many versions older a token's sampler was.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    metrics.mean("reward/mean", [t.reward for t in trajectories if t.reward is not None])
    for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
        metrics.mean(f"reward/{name}/mean", [value for t in trajectories if (value := t.rewards.get(name)) is not None])
    for status, count in Counter(t.status for t in trajectories).items():
        metrics.sum(f"status/{status}", count)
    for stop, count in Counter(step.completion.stop for t in trajectories for step in t.steps).items():
        metrics.sum(f"stop/{stop}", count)
    metrics.sum("episode/lost", [t.num_lost for t in trajectories])
    metrics.sum("episode/forks", [len(t.forks) for t in trajectories])
    metrics.mean("episode/turns", [len(t.steps) for t in trajectories])
    metrics.sum("time/environment_seconds", [t.timings["environment_seconds"] for t in trajectories if t.timings])
    sampled = [t.num_sampled for t in trajectories]
    metrics.mean("length/sampled_mean", sampled)
    metrics.max("length/sampled_max", sampled)
    metrics.mean("length/prompt_mean", [t.prompt_length for t in trajectories])
    if trajectories:
        lag = version - np.concatenate([t.versions[t.sampled] for t in trajectories])
        metrics.mean("staleness/mean", lag)
        metrics.max("staleness/max", lag)
    valid = np.array([counts(t, train_truncated=train_truncated) for t in trajectories], bool)
    found = count_groups([t.reward for t in trajectories], [t.group for t in trajectories], valid=valid)
    if any(len(group.trajectories) > 1 for group in groups):  # else nothing is compared inside a group
        metrics.mean("group/zero_std_fraction", 1.0, weight=found.constant)
        metrics.mean("group/zero_std_fraction", 0.0, weight=found.groups - found.empty - found.constant)
    metrics.sum("group/empty", found.empty)


__all__ = ["record_rollout"]
