"""From rewards to advantages: who did better than the group, or than the batch.

Owns the baselines and their scales, by group id and never by position. Knows rewards and ids only: which episodes count, and what an
advantage is given to, is `rl.credit`'s, which calls these functions. Host numpy, float64 inside, float32 out; no jax.

An estimator is any `(rewards, group_ids, *, valid) -> Advantages`; a user's own is passed to `algorithms.from_config`. The rewards are
floats; those that `rl.credit` passes are `WeightedReward`s, which also know what each reward function gave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

import numpy as np

Rewards: TypeAlias = Sequence[SupportsFloat | None]


class WeightedReward(float):
    """A reward that remembers what it is the weighted sum of.

    parts: by reward function what it gave, where it gave something. weights: by reward function; one that isn't named has weight 1.
    """

    parts: Mapping[str, float]
    weights: Mapping[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float], weights: Mapping[str, float]) -> WeightedReward:
        reward = super().__new__(cls, total)
        reward.parts, reward.weights = parts, weights
        return reward


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
    out = _centred(values, group_ids, valid, eps=eps if scale == "group" else None)
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


def batch_normalised(
    rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray, baseline: bool = False, eps: float = 1e-6
) -> Advantages:
    """Each reward in standard deviations from the mean of the batch (REINFORCE++ with its KL penalty elsewhere).

    A_i = (r_i - mean(batch)) / (std(batch) + eps). baseline: A_i = c_i / (std of all c + eps) with c_i = r_i - mean(group)
    (REINFORCE++-baseline). Means and deviations (ddof 1) run over the valid episodes, each counting once. A batch whose rewards are all
    equal gets exactly 0; so does such a group, with `baseline` only: without, it is compared with the other groups.
    Source: arXiv:2501.03262. Differs from the paper: statistics over episodes, not tokens (`rl.credit.discounted_returns` has those);
    with `baseline` the mean of the batch isn't taken as well, since centred groups have none but rounding.
    """
    values, valid = _clean(rewards, valid)
    groups = group_ids if baseline else [0] * len(values)
    return Advantages(_scaled(_centred(values, groups, valid), valid, eps), valid)


def gdpo(rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray, eps: float = 1e-6) -> Advantages:
    """The rewards of each function normalised in their group, summed by weight, then brought to the scale of the batch (GDPO).

    S_i = sum over functions k of w_k * (r_ik - mean_k(group)) / (std_k(group) + eps), A_i = S_i / (std of all S + eps). What sums to the
    same reward in different ways keeps different advantages. Needs `WeightedReward`s. A function that gave an episode nothing adds 0 to
    it and leaves it out of that function's mean. Exactly 0 in a group where every function gave all the same.
    Source: arXiv:2601.05242. Differs from the paper: deviations with ddof 1; the mean of the batch isn't subtracted, since sums of
    centred numbers have none but rounding.
    """
    totals, valid = _clean(rewards, valid)
    known = {row: _weighted(reward) for row, reward in enumerate(rewards) if valid[row]}
    out = np.zeros(totals.shape, np.float64)
    for name in dict.fromkeys(name for reward in known.values() for name in reward.parts):
        given = [known[row].parts.get(name) if row in known else None for row in range(len(rewards))]
        weights = np.array([known[row].weights.get(name, 1.0) if row in known else 0.0 for row in range(len(rewards))])
        values, there = _clean(given, valid)
        out += weights * _centred(values, group_ids, there, eps=eps)
    return Advantages(_scaled(out, valid, eps), valid)


def maxrl(rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray) -> Advantages:
    """How far each reward lies above its group's mean, in units of that mean: hard prompts weigh more (MaxRL).

    A_i = (r_i - mean) / mean, and 0 in a constant group, so where nobody or everybody succeeded. With rewards of 0 and 1 the mean over a
    group of A_i times the gradient of the episode's log-prob is an unbiased gradient of -(sum over k < G of (1 - p)^k / k), which nears
    log p, p being the probability of success. Source: arXiv:2602.02710, with its baseline. Differs from the paper: fractional rewards are
    let through, negative ones are refused.
    """
    values, valid = _clean(rewards, valid)
    if (values < 0).any():
        raise ValueError(f"maxrl needs rewards >= 0 (0 and 1, strictly), got {values.min():g}")
    out = np.zeros(values.shape, np.float64)
    for rows in _groups(group_ids, valid):
        if not _is_constant(values[rows]):
            mean = values[rows].mean()
            out[rows] = (values[rows] - mean) / mean
    return Advantages(out.astype(np.float32), valid)


def count_groups(rewards: Rewards, group_ids: Sequence[Hashable], /, *, valid: np.ndarray) -> GroupCounts:
    """Count the groups that can't teach anything: `group/zero_std_fraction` is constant / (groups - empty)."""
    values, valid = _clean(rewards, valid)
    constant = sum(_is_constant(values[rows]) for rows in _groups(group_ids, valid))
    groups, present = len(set(group_ids)), len({g for g, ok in zip(group_ids, valid, strict=True) if ok})
    return GroupCounts(groups=groups, constant=constant, empty=groups - present)


def _clean(rewards: Rewards, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float64 with 0 at the missing ones, and validity that a missing or non-finite reward has taken away."""
    values = np.array([np.nan if r is None else float(r) for r in rewards], np.float64)
    if values.shape != np.shape(valid):
        raise ValueError(f"one validity a reward: got {values.shape[0]} rewards and validity of shape {np.shape(valid)}")
    valid = np.asarray(valid, bool) & np.isfinite(values)
    return np.where(valid, values, 0.0), valid


def _weighted(reward: SupportsFloat | None) -> WeightedReward:
    if not isinstance(reward, WeightedReward):
        raise TypeError(f"gdpo needs what each reward function gave (WeightedReward), got the bare reward {reward!r}")
    return reward


def _centred(values: np.ndarray, group_ids: Sequence[Hashable], valid: np.ndarray, *, eps: float | None = None) -> np.ndarray:
    """Valid values minus their group's mean, with `eps` over its deviation + eps too; exactly 0 in a constant group and where not valid."""
    out = np.zeros(values.shape, np.float64)
    for rows in _groups(group_ids, valid):
        if not _is_constant(values[rows]):
            out[rows] = values[rows] - values[rows].mean()
            if eps is not None:
                out[rows] /= values[rows].std(ddof=1) + eps
    return out


def _groups(group_ids: Sequence[Hashable], valid: np.ndarray) -> Iterator[np.ndarray]:
    """The valid rows of each group that has any, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for row, (group, ok) in enumerate(zip(group_ids, valid, strict=True)):
        if ok:
            members.setdefault(group, []).append(row)
    return (np.array(rows) for rows in members.values())


def _is_constant(values: np.ndarray) -> bool:
    return bool(values.max() == values.min())


def _scaled(values: np.ndarray, valid: np.ndarray, eps: float) -> np.ndarray:
    """Divided by the deviation of the valid ones, unless those are all equal; 0 elsewhere."""
    scale = values[valid].std(ddof=1) + eps if valid.any() and not _is_constant(values[valid]) else 1.0
    return np.where(valid, values / scale, 0.0).astype(np.float32)
