"""What a step's episodes amount to, as metrics (names and meanings: docs/metrics.md). Owns counting; no models, no jax."""

from __future__ import annotations

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
    for t in trajectories:
        if t.reward is not None:
            metrics.mean("reward/mean", t.reward)
        for name, value in t.rewards.items():
            if value is not None:
                metrics.mean(f"reward/{name}/mean", value)
        metrics.sum(f"status/{t.status}", 1)
        metrics.sum("episode/lost", t.num_lost)
        metrics.sum("episode/forks", len(t.forks))
        metrics.mean("episode/turns", len(t.steps))
        if t.timings:
            metrics.sum("time/environment_seconds", t.timings["environment_seconds"])
        for step in t.steps:
            metrics.sum(f"stop/{step.completion.stop}", 1)
        metrics.mean("length/sampled_mean", t.num_sampled)
        metrics.max("length/sampled_max", t.num_sampled)
        metrics.mean("length/prompt_mean", t.prompt_length)
        lag = version - t.versions[t.sampled]
        metrics.mean("staleness/mean", lag)
        metrics.max("staleness/max", lag)
    valid = np.array([counts(t, train_truncated=train_truncated) for t in trajectories], bool)
    found = count_groups([t.reward for t in trajectories], [t.group for t in trajectories], valid=valid)
    if any(len(group.trajectories) > 1 for group in groups):  # else nothing is compared inside a group
        metrics.mean("group/zero_std_fraction", 1.0, weight=found.constant)
        metrics.mean("group/zero_std_fraction", 0.0, weight=found.groups - found.empty - found.constant)
    metrics.sum("group/empty", found.empty)


__all__ = ["record_rollout"]
