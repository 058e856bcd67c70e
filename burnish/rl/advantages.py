"""From rewards to advantages: who did better than the group.

Owns the baselines and their scales, by group id and never by position, and the rule for which episodes count at all. Host numpy, float64
inside, float32 out; no jax. The trainer calls `credit`; where an advantage lands in a batch is `rl.batch`'s.

An estimator is any `(rewards, group_ids, *, valid) -> Advantages`; a user's own is passed to `algorithms.from_config`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

import numpy as np

from burnish.types import Group, Status, Trajectory

Rewards: TypeAlias = Sequence[SupportsFloat | None]
TrajectoryKey: TypeAlias = tuple[tuple[int, int], int]
"""(group id, sample): what an episode is called, whatever row or batch it ends up in."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """values: float32[N]. valid: bool[N], False where an episode has no reward and so no place in the baseline or the loss (value 0)."""

    values: np.ndarray
    valid: np.ndarray


@runtime_checkable
class Estimator(Protocol):
    def __call__(self, rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray) -> Advantages: ...


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """How many groups there are, how many carry no signal because all their rewards are equal, and how many have no reward at all."""

    groups: int
    constant: int
    empty: int


def group_relative(
    rewards: Rewards,
    group_ids: Sequence[Hashable],
    /,
    *,
    valid: np.ndarray,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-6,
) -> Advantages:
    """How far each reward lies above its group's mean, in units of `scale`.

    A_i = (r_i - mean(group)) / (s + eps), s = sample standard deviation (ddof 1) of the group's rewards ("group", GRPO), of all valid
    rewards ("batch"), or A_i = r_i - mean(group) ("none", Dr.GRPO). Means and deviations run over valid rewards only. A group whose
    rewards are all equal, a group of one included, gets exactly 0: rounding must not be divided by a tiny deviation.
    Sources: arXiv:2402.03300 (GRPO), arXiv:2503.20783 (Dr.GRPO), arXiv:2508.08221 (batch deviation). Differs from the papers: ddof 1.
    """
    values, valid = _clean(rewards, valid)
    out = np.zeros(values.shape, np.float64)
    for rows in _groups(group_ids, valid):
        if not _is_constant(values[rows]):
            out[rows] = values[rows] - values[rows].mean()
            if scale == "group":
                out[rows] /= values[rows].std(ddof=1) + eps
    if scale == "batch" and valid.sum() > 1:
        out /= values[valid].std(ddof=1) + eps
    return Advantages(out.astype(np.float32), valid)


def leave_one_out(rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray) -> Advantages:
    """Each reward minus the mean of the others in its group (RLOO, arXiv:2402.14740).

    A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) * (r_i - mean). Exactly 0 in a constant group and in a group of one.
    """
    values, valid = _clean(rewards, valid)
    out = np.zeros(values.shape, np.float64)
    for rows in _groups(group_ids, valid):
        if not _is_constant(values[rows]):
            out[rows] = (values[rows] - values[rows].mean()) * (len(rows) / (len(rows) - 1))
    return Advantages(out.astype(np.float32), valid)


def count_groups(rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray) -> GroupCounts:
    """Count the groups that can't teach anything: `group/zero_std_fraction` is constant / (groups - empty)."""
    values, valid = _clean(rewards, valid)
    constant = sum(_is_constant(values[rows]) for rows in _groups(group_ids, valid))
    groups, present = len(set(group_ids)), len({g for g, ok in zip(group_ids, valid, strict=True) if ok})
    return GroupCounts(groups=groups, constant=constant, empty=groups - present)


def counts(trajectory: Trajectory, *, train_truncated: bool) -> bool:
    """Whether an episode may enter baseline and loss: it ended well (or was cut, if the algorithm trains those) and has a reward."""
    ended = trajectory.status is Status.OK or (train_truncated and trajectory.status is Status.TRUNCATED)
    return ended and trajectory.reward is not None and bool(np.isfinite(trajectory.reward))


def credit(groups: Sequence[Group], estimator: Estimator, *, train_truncated: bool) -> Mapping[TrajectoryKey, float]:
    """The advantage of every episode that carries loss; an episode that isn't in the answer carries none."""
    trajectories = [t for group in groups for t in group.trajectories]
    result = estimator(
        [t.reward for t in trajectories],
        [t.group for t in trajectories],
        valid=np.array([counts(t, train_truncated=train_truncated) for t in trajectories], bool),
    )
    keyed = zip(trajectories, result.values, result.valid, strict=True)
    return {(t.group, t.sample): float(value) for t, value, ok in keyed if ok}


def _clean(rewards: Rewards, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float64 with 0 at the missing ones, and validity that a missing or non-finite reward has taken away."""
    values = np.array([np.nan if r is None else float(r) for r in rewards], np.float64)
    if values.shape != np.shape(valid):
        raise ValueError(f"one validity a reward: got {values.shape[0]} rewards and validity of shape {np.shape(valid)}")
    valid = np.asarray(valid, bool) & np.isfinite(values)
    return np.where(valid, values, 0.0), valid


def _groups(group_ids: Sequence[Hashable], valid: np.ndarray) -> Iterator[np.ndarray]:
    """The valid rows of each group that has any, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for row, (group, ok) in enumerate(zip(group_ids, valid, strict=True)):
        if ok:
            members.setdefault(group, []).append(row)
    return (np.array(rows) for rows in members.values())


def _is_constant(values: np.ndarray) -> bool:
    return bool(values.max() == values.min())
