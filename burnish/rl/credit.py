"""Who gets what: from the rewards of episodes and turns to the advantages of episodes, turns and tokens.

Owns which episodes count, what a turn earned, on which token a reward lies, and the estimators that need a model's scores (GAE, returns,
KL in the reward). Baselines are `rl.advantages`', rows and columns `rl.batch`'s. Host numpy, no jax.

The producer calls `credit` before it builds a batch, and `informative` to find groups that teach nothing. Where advantages need scores it
builds the batch with `uncredited`, and the trainer, once the scores of a mini-batch are on the host, goes: `scored_episodes` of each
micro-batch, one call of the `TokenEstimator` over all of them, `batch.from_sequences` into each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from burnish.rewards.manager import ENVIRONMENT
from burnish.rl.advantages import Estimator, Rewards, WeightedReward, group_relative
from burnish.types import Group, Status, Trajectory

TrajectoryKey: TypeAlias = tuple[tuple[int, int], int]
"""(group id, sample): what an episode is called, whatever row or batch it ends up in."""

CreditUnit: TypeAlias = Literal["trajectory", "turn", "return_to_go"]

_UNNAMED = "reward"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that sampled something. index: among all turns of the episode. start, end: its ids among the episode's sampled ids.

    parts: what it earned, by reward function; empty where nothing was said about it, which isn't 0.
    """

    index: int
    start: int
    end: int
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with what models said about its T sampled ids.

    token_rewards: float32[T], each reward on the last id of its turn. truncated: a limit ended it before its environment did.
    values: float32[T], the critic's value before each id, and last_value the one after the last. kl: float32[T], the penalty of each id,
    already weighted. teacher_gain: float32[T], how much likelier, in nats, a teacher finds each id than the policy that the step began with
    does. None where the algorithm has no such score.
    """

    group: tuple[int, int]
    sample: int
    reward: float
    token_rewards: np.ndarray
    truncated: bool = False
    values: np.ndarray | None = None
    last_value: float = 0.0
    kl: np.ndarray | None = None
    teacher_gain: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """float32[T] each, for the sampled ids of one episode. returns: what the critic should have said, where there is one."""

    advantages: np.ndarray
    returns: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """An estimator that runs after the scores are known, over all episodes of a mini-batch, and answers in their order.

    Wraps a function such as `gae` with its options bound, and holds it to one number for each sampled id.
    """

    estimate: Callable[[Sequence[ScoredEpisode]], Sequence[TokenAdvantages]]

    def __call__(self, episodes: Sequence[ScoredEpisode], /) -> Sequence[TokenAdvantages]:
        answers = list(self.estimate(episodes))
        if len(answers) != len(episodes):
            raise ValueError(f"the token estimator answered {len(answers)} times for {len(episodes)} episodes")
        for episode, answer in zip(episodes, answers, strict=True):
            for name, array in (("advantages", answer.advantages), ("returns", answer.returns)):
                if array is not None and np.shape(array) != episode.token_rewards.shape:
                    raise ValueError(
                        f"{name} of episode {(episode.group, episode.sample)} must have one number for each of its sampled ids, shape "
                        f"{episode.token_rewards.shape}; got {np.shape(array)}"
                    )
        return answers


# ------------------------------------------------------------------------------------------------------------------ episodes and turns


def counts(trajectory: Trajectory, *, train_truncated: bool) -> bool:
    """Whether an episode may enter baseline and loss.

    It ended well (or was cut, if the algorithm trains those), has a reward, and the policy sampled something in it.
    """
    ended = trajectory.status is Status.OK or (train_truncated and trajectory.status is Status.TRUNCATED)
    return ended and trajectory.reward is not None and bool(np.isfinite(trajectory.reward)) and trajectory.num_sampled > 0


def credit(
    groups: Sequence[Group], estimator: Estimator, *, train_truncated: bool, per: CreditUnit = "trajectory", gamma: float = 1.0
) -> Mapping[TrajectoryKey, float | np.ndarray]:
    """The advantage of every episode that carries loss; an episode that isn't in the answer carries none.

    "trajectory": one number, from the episode's reward. Else float32[num_sampled], one number a turn, compared with the same turn of the
    siblings (episodes that have one): "turn" from what the turn earned, its step's reward and for the last turn also the reward
    functions'; "return_to_go" from that plus `gamma` times the next turn's. A turn without any reward gets 0 and is in no baseline.
    """
    counted = [t for group in groups for t in group.trajectories if counts(t, train_truncated=train_truncated)]
    if per == "trajectory":
        values, valid = _estimated(estimator, [_episode_reward(t) for t in counted], [t.group for t in counted])
        return {(t.group, t.sample): float(value) for t, value, ok in zip(counted, values, valid, strict=True) if ok}
    units = [(t, turn) for t in counted for turn in (turns(t) if per == "turn" else returns_to_go(turns(t), gamma=gamma))]
    rewards = [_turn_reward(turn, t.reward_weights) for t, turn in units]
    values, valid = _estimated(estimator, rewards, [(t.group, turn.index) for t, turn in units])
    credits: dict[TrajectoryKey, float | np.ndarray] = {}
    for (t, turn), value, ok in zip(units, values, valid, strict=True):
        if ok:
            mine = np.asarray(credits.setdefault((t.group, t.sample), np.zeros(t.num_sampled, np.float32)))
            mine[turn.start : turn.end] = value
    return credits


def uncredited(groups: Sequence[Group], *, train_truncated: bool) -> Mapping[TrajectoryKey, float]:
    """0 for every episode that counts: what a batch is built with when a `TokenEstimator` fills in the advantages later."""
    members = (t for group in groups for t in group.trajectories)
    return {(t.group, t.sample): 0.0 for t in members if counts(t, train_truncated=train_truncated)}


def informative(groups: Sequence[Group], credits: Mapping[TrajectoryKey, float | np.ndarray]) -> list[Group]:
    """The groups in which some episode has an advantage other than 0: the others teach nothing, under the estimator that gave `credits`.

    Estimators with a baseline give constant groups exactly 0, so this finds them without knowing the rewards.
    """
    return [group for group in groups if any(np.any(credits.get((t.group, t.sample), 0.0)) for t in group.trajectories)]


def turns(trajectory: Trajectory) -> list[Turn]:
    """The turns of an episode that sampled something, with what each earned.

    What the reward functions gave for the whole episode belongs to the last turn. A turn that sampled nothing (a cancelled call) leaves
    what it earned to the one before it; at the start, to the first that did. An episode without steps is one turn.
    """
    lengths = [len(step.completion.ids) for step in trajectory.steps] or [trajectory.num_sampled]
    if sum(lengths) != trajectory.num_sampled:
        raise ValueError(
            f"the turns of episode {(trajectory.group, trajectory.sample)} sampled {sum(lengths)} ids, but {trajectory.num_sampled} of its "
            "ids are marked as sampled"
        )
    ends, earned = list(itertools.accumulate(lengths)), _earned(trajectory)
    speaking = [index for index, length in enumerate(lengths) if length]
    borders = [0, *speaking[1:], len(lengths)]
    return [
        Turn(index, ends[index] - lengths[index], ends[index], _added(earned[first:after]))
        for index, (first, after) in zip(speaking, itertools.pairwise(borders), strict=False)
    ]


def returns_to_go(turns: Sequence[Turn], *, gamma: float) -> list[Turn]:
    """Each turn with what it and all later ones earned, discounted by `gamma` a turn."""
    found: list[Turn] = []
    later: Mapping[str, float] = {}
    for turn in reversed(turns):
        later = _added([turn.parts, {name: gamma * value for name, value in later.items()}])
        found.append(Turn(turn.index, turn.start, turn.end, later))
    return found[::-1]


def _goes_on(trajectory: Trajectory) -> bool:
    """Whether more would have followed: a last turn that was cut, but that the environment took as the end, is worth what it was paid."""
    return trajectory.status is Status.TRUNCATED and not (trajectory.steps and trajectory.steps[-1].done)


def _earned(trajectory: Trajectory) -> list[dict[str, float]]:
    """What was given at each step, by reward function; what the functions gave stands at the last."""
    steps = [{} if step.reward is None else {ENVIRONMENT: step.reward} for step in trajectory.steps] or [{}]
    final = {name: value for name, value in trajectory.rewards.items() if value is not None and name != ENVIRONMENT}
    if not trajectory.rewards and trajectory.reward is not None:  # a reward of unknown origin: what the steps don't explain
        final = {_UNNAMED: trajectory.reward - math.fsum(value for parts in steps for value in parts.values())}
    return [*steps[:-1], steps[-1] | final]


def _added(earned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for parts in earned for name in parts)
    return {name: math.fsum(parts[name] for parts in earned if name in parts) for name in names}


def _turn_reward(turn: Turn, weights: Mapping[str, float]) -> WeightedReward | None:
    if not turn.parts:
        return None
    return WeightedReward(math.fsum(weights.get(name, 1.0) * value for name, value in turn.parts.items()), turn.parts, weights)


def _episode_reward(trajectory: Trajectory) -> WeightedReward:
    assert trajectory.reward is not None
    total = float(trajectory.reward)
    parts = {name: value for name, value in trajectory.rewards.items() if value is not None}
    return WeightedReward(total, parts or {_UNNAMED: total}, trajectory.reward_weights)


def _estimated(estimator: Estimator, rewards: Rewards, group_ids: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """What an estimator says of rewards that all count if they are there; its answer must have one value and one flag for each."""
    result = estimator(rewards, group_ids, valid=np.array([reward is not None for reward in rewards], bool))
    values, valid = np.asarray(result.values, np.float32), np.asarray(result.valid, bool)
    if values.shape != (len(rewards),) or valid.shape != values.shape:
        raise ValueError(
            f"the advantage estimator must answer {len(rewards)} rewards with values and valid of shape ({len(rewards)},); got "
            f"{values.shape} and {valid.shape}"
        )
    return values, valid


# ------------------------------------------------------------------------------------------------------------------------------ tokens


def episode_keys(groups: Sequence[Group]) -> list[TrajectoryKey]:
    """What the episodes are called, in the order in which `build_batch` numbers them: `TokenBatch.sequences` are indices into this."""
    return [(t.group, t.sample) for group in groups for t in group.trajectories]


def scored_episodes(
    groups: Sequence[Group],
    present: Collection[int],
    *,
    values: Mapping[int, np.ndarray] | None = None,
    last_values: Mapping[int, float] | None = None,
    kl: Mapping[int, np.ndarray] | None = None,
    teacher_gain: Mapping[int, np.ndarray] | None = None,
) -> list[ScoredEpisode]:
    """The episodes of a batch with their scores, which are given by sequence number as `batch.by_sequence` returns them.

    groups: those that the batch was built from. present: the numbers of the sequences that lie in it.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    return [
        ScoredEpisode(
            group=trajectories[number].group,
            sample=trajectories[number].sample,
            reward=_episode_reward(trajectories[number]),
            token_rewards=token_rewards(trajectories[number]),
            truncated=_goes_on(trajectories[number]),
            values=None if values is None else values[number],
            last_value=0.0 if last_values is None else last_values[number],
            kl=None if kl is None else kl[number],
            teacher_gain=None if teacher_gain is None else teacher_gain[number],
        )
        for number in sorted(present)
    ]


def token_rewards(trajectory: Trajectory) -> np.ndarray:
    """float32[num_sampled]: what each turn earned, on the last id that it sampled; 0 elsewhere. They sum to the episode's reward."""
    out = np.zeros(trajectory.num_sampled, np.float32)
    if not len(out):
        raise ValueError(f"episode {(trajectory.group, trajectory.sample)} sampled nothing, so its reward has no token to lie on")
    for turn in turns(trajectory):
        out[turn.end - 1] = _turn_reward(turn, trajectory.reward_weights) or 0.0
    return out


def gae(episodes: Sequence[ScoredEpisode], /, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> list[TokenAdvantages]:
    """Generalised advantage estimation for PPO with a critic, over the sampled ids of each episode.

    delta_t = r_t - kl_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns_t = A_t + V_t. After the last id V is 0, or
    `last_value` where the episode was truncated. Ids of an environment between two turns aren't actions and cost no discount. whiten:
    the advantages, not the returns, are whitened over all ids of `episodes`.
    Sources: arXiv:1506.02438 (GAE), arXiv:1707.06347 (PPO). Differs from the papers: whitening, which PPO's code has and its paper not.
    """
    advantages, returns = [], []
    for episode in episodes:
        if episode.values is None:
            raise ValueError("gae needs the critic's values: an algorithm that uses it must ask for the scores `values`")
        values = episode.values.astype(np.float64)
        following = np.append(values[1:], episode.last_value if episode.truncated else 0.0)
        advantages.append(_discounted(_penalised(episode.token_rewards, episode.kl) + gamma * following - values, gamma * lam))
        returns.append((advantages[-1] + values).astype(np.float32))
    scaled = whitened(advantages) if whiten else [a.astype(np.float32) for a in advantages]
    return [TokenAdvantages(a, r) for a, r in zip(scaled, returns, strict=True)]


def discounted_returns(episodes: Sequence[ScoredEpisode], /, *, gamma: float = 1.0, baseline: bool = False) -> list[TokenAdvantages]:
    """What follows each id, less its KL penalty, whitened over all ids of the mini-batch (REINFORCE++).

    R_t = r_t - kl_t + gamma R_{t+1}, A = R whitened. baseline: on the last id of each episode lies its reward minus its group's mean, and
    nothing on the others, as a turn alone has no mean to be compared with.
    Source: arXiv:2501.03262, whose A_t = r - beta sum_{i >= t} KL_i is this at gamma 1 with one reward at the end. Differs from the paper:
    rewards of turns lie on their turns; with `baseline` the penalty may be in the reward too (there it is a k2 loss).
    """
    placed = [episode.token_rewards for episode in episodes]
    if baseline:
        against_group = functools.partial(group_relative, scale="none")
        centred, _ = _estimated(against_group, [episode.reward for episode in episodes], [episode.group for episode in episodes])
        placed = [np.append(np.zeros(len(old) - 1), value) for old, value in zip(placed, centred, strict=True)]
    return [TokenAdvantages(a) for a in whitened([_discounted(_penalised(r, e.kl), gamma) for r, e in zip(placed, episodes, strict=True)])]


def teacher_gains(episodes: Sequence[ScoredEpisode], /, *, gamma: float = 0.0) -> list[TokenAdvantages]:
    """On-policy distillation: A_t = g_t - kl_t + gamma A_{t+1} with g_t = log p_teacher(id_t) - log p_old(id_t).

    In expectation over the student's own samples -g is the reverse KL of the student to the teacher, so at gamma 0 each token descends its
    own. Source: "On-Policy Distillation" (Lu et al., 2025); the objective: arXiv:2306.13649, arXiv:2306.08543.
    """
    gains = []
    for episode in episodes:
        if episode.teacher_gain is None:
            raise ValueError("teacher_gains needs a teacher's log-probs: an algorithm that uses it must ask for the scores `teacher`")
        gains.append(_discounted(_penalised(episode.teacher_gain, episode.kl), gamma).astype(np.float32))
    return [TokenAdvantages(gain) for gain in gains]


def kl_in_reward(episodes: Sequence[ScoredEpisode], /, *, estimator: Estimator) -> list[TokenAdvantages]:
    """An estimator over episodes, with the KL penalty taken from their rewards: A = estimator(reward - sum of kl), the same at each id.

    Sources: RLOO (arXiv:2402.14740) and its predecessors put the penalty there. `gdpo` can't be used with a penalty, which no reward
    function gave.
    """
    rewards = [e.reward if e.kl is None else e.reward - float(e.kl.sum(dtype=np.float64)) for e in episodes]
    values, _ = _estimated(estimator, rewards, [episode.group for episode in episodes])
    return [TokenAdvantages(np.full(e.token_rewards.shape, value, np.float32)) for e, value in zip(episodes, values, strict=True)]


def whitened(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All numbers of all arrays together at mean 0 and deviation 1: (x - mean) / sqrt(var + 1e-8), ddof 1. Equal numbers give 0."""
    flat = np.concatenate([np.zeros(0), *arrays]).astype(np.float64)
    if not len(flat) or flat.max() == flat.min():
        return [np.zeros(array.shape, np.float32) for array in arrays]
    mean, scale = flat.mean(), math.sqrt(flat.var(ddof=1) + 1e-8)
    return [((array - mean) / scale).astype(np.float32) for array in arrays]


def _penalised(rewards: np.ndarray, kl: np.ndarray | None) -> np.ndarray:
    """float64[T]: rewards where they lie, less the KL penalty of each id."""
    return rewards.astype(np.float64) if kl is None else rewards.astype(np.float64) - kl


def _discounted(values: np.ndarray, factor: float) -> np.ndarray:
    """x_t = values_t + factor x_{t+1}. A loop over floats: a matrix of powers would be T x T."""
    return np.array(list(itertools.accumulate(values[::-1].tolist(), lambda later, now: now + factor * later)), np.float64)[::-1]
