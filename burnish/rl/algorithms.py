"""An algorithm is a record of values: which advantage, which loss, which mean, what it needs to be told.

Owns `Algorithm` and how a configuration becomes one. Functions only, bound to their options; nothing here runs a model. The learner asks
the record what to collect and the training step calls what it holds; neither knows an algorithm's name.

A user's own loss or advantage is one function: handed to `from_config`, or named by `algorithm.loss` and `algorithm.advantage`. Any other
change is `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from burnish.config import algorithms as options
from burnish.config.algorithms import AnyAlgorithmConfig, FunctionConfig
from burnish.config.errors import UserError
from burnish.config.resolve import check_options, resolve
from burnish.rl import aggregate, losses, off_policy
from burnish.rl.advantages import Estimator, batch_normalised, gdpo, group_relative, leave_one_out, maxrl
from burnish.rl.aggregate import Aggregate
from burnish.rl.credit import TokenEstimator, discounted_returns, gae, kl_in_reward, teacher_gains
from burnish.rl.kl import KLEstimator, k1, k2, k3, with_kl
from burnish.rl.losses import Loss, ValueLoss
from burnish.rl.off_policy import Reject

Score = Literal["old", "reference", "values", "teacher"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardKL:
    """A KL penalty that is taken from the rewards: beta times the estimator, token by token, of the anchor to the reference."""

    beta: float
    estimator: KLEstimator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a policy-gradient method is.

    advantage: from rewards alone, or (`TokenEstimator`) from scores too. advantage_scope: what it must see at once, one group or the whole
    mini-batch. credit, gamma: what a reward is credited to, and the discount a
    turn. loss: the policy's, with its weights, penalties and bonuses. reject: which tokens leave loss and denominator. value_loss: the
    critic's, None without one. scores_needed: passes over a batch before its first update, by the policy as it then is ("old"), by the
    reference, by the critic ("values"). old: what the ratio compares with. reward_kl: a penalty inside the rewards. entropy_gradient:
    whether the loss has a gradient through the policy's entropy, which costs one. num_iterations: updates from each mini-batch.
    zero_signal: what becomes of groups whose rewards are all equal (`rl.producer`), with max_resample_rounds and on_shortage.
    warmup_steps: first steps in which only the critic learns.
    """

    name: str
    advantage: Estimator | TokenEstimator
    advantage_scope: Literal["group", "batch"]
    loss: Loss
    aggregate: Aggregate
    num_generations: int
    num_iterations: int = 1
    scores_needed: frozenset[Score] = frozenset()
    credit: Literal["trajectory", "turn", "return_to_go"] = "trajectory"
    gamma: float = 1.0
    old: Literal["auto", "sampler", "recomputed"] = "auto"
    reject: Reject | None = None
    reward_kl: RewardKL | None = None
    value_loss: ValueLoss | None = None
    warmup_steps: int = 0
    entropy_gradient: bool = False
    train_truncated: bool = True
    zero_signal: Literal["keep", "drop", "resample"] = "keep"
    max_resample_rounds: int = 3
    on_shortage: Literal["error", "train_short"] = "error"


def from_config(
    config: AnyAlgorithmConfig,
    *,
    loss: Loss | None = None,
    advantage: Estimator | TokenEstimator | None = None,
    max_tokens: int | None = None,
    base: Path = Path(),
) -> Algorithm:
    """The algorithm that a configuration describes, with the policy loss or the advantage replaced by the user's own if given.

    A user's loss still gets importance weights, the KL penalty of `beta` and the entropy bonus. max_tokens: the longest completion, which
    `fixed_length_mean` divides by where `fixed_length` isn't set. base: the folder that `./file.py:fn` names start from. Raises
    `UserError` for options that contradict each other or that nothing would read, before anything is sampled.
    """
    loss = loss or _users(config.loss, "loss", base, reserved=())
    advantage = advantage or _users(config.advantage, "advantage", base, reserved=("valid",))
    in_reward = config.beta > 0 and config.kl_in == "reward"
    estimator = _advantage(config, in_reward=in_reward) if advantage is None else advantage
    _check(config, estimator, own_advantage=advantage is not None, in_reward=in_reward)
    _check_unread(config, own_loss=loss is not None, own_advantage=advantage is not None)
    if in_reward and not isinstance(estimator, TokenEstimator):
        estimator = TokenEstimator(functools.partial(kl_in_reward, estimator=estimator))
    kl = {"k1": k1, "k2": k2, "k3": k3}[config.kl_estimator]
    policy_loss = _policy_loss(config) if loss is None else losses.one_a_token(loss)
    if config.importance is not None and config.old != "sampler":
        policy_loss = off_policy.weighted(policy_loss, **config.importance.model_dump())
    if config.beta > 0 and not in_reward:
        policy_loss = with_kl(policy_loss, beta=config.beta, estimator=kl)
    if config.entropy_bonus > 0:
        policy_loss = losses.with_entropy_bonus(policy_loss, coefficient=config.entropy_bonus)
    critic = config if isinstance(config, options.PPOConfig) else None
    return Algorithm(
        name=config.name,
        advantage=estimator,
        advantage_scope="group" if advantage is None and _by_group(config) else "batch",
        loss=policy_loss,
        aggregate=aggregation(config, max_tokens=max_tokens),
        num_generations=config.num_generations,
        num_iterations=config.num_iterations,
        scores_needed=_scores_needed(config),
        credit=config.credit,
        gamma=config.gamma,
        old=config.old,
        reject=None if config.rejection is None else functools.partial(off_policy.rejecting, **config.rejection.model_dump()),
        reward_kl=RewardKL(beta=config.beta, estimator=kl) if in_reward else None,
        value_loss=None if critic is None else functools.partial(losses.clipped_value, clip=critic.value_clip),
        warmup_steps=0 if critic is None else critic.critic.warmup_steps,
        entropy_gradient=config.entropy_bonus > 0,
        train_truncated=config.train_truncated,
        zero_signal=config.zero_signal,
        max_resample_rounds=config.max_resample_rounds,
        on_shortage=config.on_shortage,
    )


def aggregation(config: AnyAlgorithmConfig, *, max_tokens: int | None = None) -> Aggregate:
    """The mean that a configuration names."""
    match config.aggregation:
        case "token_mean":
            return aggregate.token_mean
        case "sequence_mean":
            return aggregate.sequence_mean
        case "prompt_mean":
            return aggregate.prompt_mean
    length = config.fixed_length or max_tokens
    if length is None:
        raise UserError("algorithm.aggregation is fixed_length_mean, which needs algorithm.fixed_length, a number of tokens")
    return functools.partial(aggregate.fixed_length_mean, length=length)


def _advantage(config: AnyAlgorithmConfig, *, in_reward: bool) -> Estimator | TokenEstimator:
    match config:
        case options.GRPOConfig():
            return functools.partial(group_relative, scale=config.scale_rewards)
        case options.DrGRPOConfig():
            return functools.partial(group_relative, scale="none")
        case options.RLOOConfig():
            return leave_one_out
        case options.GDPOConfig():
            return gdpo
        case options.MaxRLConfig():
            return maxrl
        case options.ReinforcePPConfig() if in_reward or config.gamma < 1:
            return TokenEstimator(functools.partial(discounted_returns, gamma=config.gamma, baseline=config.baseline))
        case options.ReinforcePPConfig():
            return functools.partial(batch_normalised, baseline=config.baseline)
        case options.OnPolicyDistillationConfig():
            return TokenEstimator(functools.partial(teacher_gains, gamma=config.gamma))
        case options.PPOConfig():
            return TokenEstimator(functools.partial(gae, gamma=config.gamma, lam=config.gae_lambda, whiten=config.whiten))
    return group_relative


def _by_group(config: AnyAlgorithmConfig) -> bool:
    """Whether an advantage depends on its own group only, so that a group can be credited as soon as it is complete."""
    match config:
        case options.GRPOConfig():
            return config.scale_rewards != "batch"
        case options.ReinforcePPConfig() | options.GDPOConfig() | options.PPOConfig() | options.OnPolicyDistillationConfig():
            return False
    return True


def _policy_loss(config: AnyAlgorithmConfig) -> Loss:
    match config:
        case options.GSPOConfig():
            return functools.partial(losses.gspo, level=config.level, **_clips(config))
        case options.CISPOConfig():
            return functools.partial(losses.cispo, epsilon=config.epsilon, epsilon_high=config.epsilon_high)
        case options.SAPOConfig():
            temperatures = {"temperature_positive": config.temperature_positive, "temperature_negative": config.temperature_negative}
            return functools.partial(losses.sapo, **temperatures)
        case options.DPPOConfig():
            usual = {"tv": 0.15, "kl": 0.05}[config.divergence]
            threshold = usual if config.threshold is None else config.threshold
            return functools.partial(losses.dppo, divergence=config.divergence, threshold=threshold)
        case options.GMPOConfig():
            return functools.partial(losses.gmpo, log_clip=config.log_clip)
        case options.ClippedConfig():
            return functools.partial(losses.clipped, **_clips(config))
    raise UserError(f"algorithm {config.name} has no policy loss: set algorithm.loss, or pass one")


def _clips(config: options.ClippedConfig) -> dict[str, float | None]:
    return {"epsilon": config.epsilon, "epsilon_high": config.epsilon_high, "dual_clip": config.dual_clip}


def _scores_needed(config: AnyAlgorithmConfig) -> frozenset[Score]:
    """The passes that follow from the options. How many updates a step makes, and so whether "auto" needs "old", is the learner's."""
    needed: set[Score] = set()
    if config.old == "recomputed" or (config.old == "auto" and config.num_iterations > 1):
        needed.add("old")
    if config.beta > 0:
        needed.add("reference")
    if isinstance(config, options.PPOConfig):
        needed.add("values")
    if isinstance(config, options.OnPolicyDistillationConfig):
        needed.add("teacher")
    return frozenset(needed)


def _check(config: AnyAlgorithmConfig, estimator: Estimator | TokenEstimator, *, own_advantage: bool, in_reward: bool) -> None:
    """Refuse what would fail later, or quietly do nothing."""
    alone = isinstance(config, options.PPOConfig | options.OnPolicyDistillationConfig)
    alone = alone or (isinstance(config, options.ReinforcePPConfig) and not config.baseline)
    by_token = isinstance(estimator, TokenEstimator)
    if config.num_generations < 2 and not alone and not own_advantage:
        raise UserError(
            f"algorithm.num_generations is {config.num_generations}, but {config.name} compares the completions of a prompt with each "
            "other, so every advantage would be 0: use at least 2"
        )
    if config.zero_signal != "keep" and (alone or by_token or config.num_generations < 2):
        why = "compares no group" if alone or by_token else f"has groups of {config.num_generations}"
        raise UserError(f"algorithm.zero_signal is {config.zero_signal}, but {config.name} {why}: use keep")
    if config.credit != "trajectory" and (by_token or in_reward):
        raise UserError(
            f"algorithm.credit is {config.credit}, but "
            + (f"{config.name} credits every token by itself" if by_token else "a KL penalty in the reward is credited to whole episodes")
            + ": use trajectory, or kl_in: loss"
        )
    if own_advantage and isinstance(config, options.PPOConfig) and not by_token:
        raise UserError(
            f"algorithm.advantage is your own, but the critic of {config.name} learns the returns that GAE gives beside the advantages: "
            "use an algorithm without a critic, or pass a TokenEstimator that gives returns"
        )
    if own_advantage and isinstance(config, options.OnPolicyDistillationConfig):
        raise UserError(f"algorithm.advantage is your own, so the teacher of {config.name} would say nothing: use another algorithm")
    if config.gamma < 1 and config.credit != "return_to_go" and not by_token:
        raise UserError(f"algorithm.gamma is {config.gamma}, but credit by {config.credit} discounts nothing: use return_to_go, or gamma 1")
    if in_reward and isinstance(config, options.GDPOConfig) and not own_advantage:
        raise UserError("gdpo normalises each reward function by itself, so a KL penalty can't be taken from their sum: use kl_in: loss")
    if in_reward and isinstance(config, options.MaxRLConfig) and not own_advantage:
        raise UserError("maxrl divides by the group's mean reward, which a KL penalty would take below 0: use kl_in: loss")
    if config.rejection is not None and config.old == "sampler":
        raise UserError("algorithm.rejection compares the anchor with the sampler, but algorithm.old is sampler: they are the same")


_LOSS_OPTIONS = ("epsilon", "epsilon_high", "dual_clip", "level", "temperature_positive", "temperature_negative", "divergence")
_LOSS_OPTIONS += ("threshold", "log_clip")
_ADVANTAGE_OPTIONS = ("scale_rewards", "baseline", "gae_lambda", "whiten")


def _check_unread(config: AnyAlgorithmConfig, *, own_loss: bool, own_advantage: bool) -> None:
    """Refuse options, other than the defaults, that only a function reads which another one replaces."""
    changed = {name for name, info in type(config).model_fields.items() if getattr(config, name) != info.get_default()}
    for own, names, what in ((own_loss, _LOSS_OPTIONS, "loss"), (own_advantage, _ADVANTAGE_OPTIONS, "advantage")):
        unread = [f"algorithm.{name}" for name in names if name in changed]
        if own and unread:
            raise UserError(
                f"{', '.join(unread)}: only the {what} of {config.name} reads that, and yours replaces it; give it as an option"
            )
    if config.old == "sampler" and config.importance is not None and "importance" in changed:
        raise UserError("algorithm.importance weighs the anchor against the sampler, but algorithm.old is sampler: they are the same")


def _users(config: FunctionConfig | None, kind: str, base: Path, *, reserved: tuple[str, ...]) -> Callable[..., Any] | None:
    """The function that `algorithm.loss` or `algorithm.advantage` names, bound to its options."""
    if config is None:
        return None
    fn = resolve(config.fn, kind=kind, base=base)
    given = [*inspect.signature(fn).parameters][:2]  # by position, so under any name
    check_options(fn, config.options, what=f"{kind} `{config.fn}`", reserved={*given, *reserved}, complete=True)
    return functools.partial(fn, **config.options)
