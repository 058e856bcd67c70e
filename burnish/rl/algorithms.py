"""An algorithm is a record of values: which advantage, which loss, which mean, what it needs to be told.

Owns `Algorithm` and how a configuration becomes one. Functions only, bound to their options; nothing here runs a model. The learner asks
the record what to collect and the training step calls what it holds; neither knows an algorithm's name.

A user's own loss or advantage is one function handed to `from_config`; any other change is `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from burnish.config.algorithms import AlgorithmConfig, GRPOConfig
from burnish.config.errors import UserError
from burnish.rl import aggregate, kl, losses
from burnish.rl.advantages import Estimator, group_relative
from burnish.rl.aggregate import Aggregate
from burnish.rl.losses import Loss, ValueLoss
from burnish.rl.off_policy import Reject

Score = Literal["old", "reference"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a policy-gradient method is.

    advantage_scope: what the estimator must see at once, one group or the whole mini-batch. scores_needed: passes over a batch before its
    first update, by the policy as it then is ("old") and by the reference. num_iterations: updates from each mini-batch. reject: which
    tokens leave loss and denominator. entropy_gradient: whether the loss has a gradient through the policy's entropy, which costs one.
    value_loss: what the critic learns by, None where there is none.
    """

    name: str
    advantage: Estimator
    advantage_scope: Literal["group", "batch"]
    loss: Loss
    aggregate: Aggregate
    scores_needed: frozenset[Score]
    num_generations: int
    num_iterations: int
    train_truncated: bool
    reject: Reject | None = None
    value_loss: ValueLoss | None = None
    entropy_gradient: bool = False


def from_config(config: GRPOConfig, *, loss: Loss | None = None, advantage: Estimator | None = None) -> Algorithm:
    """The algorithm that a configuration describes, with the policy loss or the advantage replaced by the user's own if given.

    A user's loss still gets the KL penalty of `beta`. With one update a step the policy is still the one that sampled, its own log-probs
    are the anchor, and "old" isn't needed; it is with several iterations, and a learner adds it when its plan has several mini-batches a
    step. Raises `UserError` for a group of one under a baseline that needs others.
    """
    if advantage is None and config.num_generations < 2:
        raise UserError(
            f"algorithm.num_generations is {config.num_generations}, but {config.name} compares the completions of a prompt with each "
            "other, so every advantage would be 0: use at least 2"
        )
    policy_loss = loss or functools.partial(losses.clipped, epsilon=config.epsilon, epsilon_high=config.epsilon_high)
    if config.beta > 0:
        estimator = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[config.kl_estimator]
        policy_loss = kl.with_kl(policy_loss, beta=config.beta, estimator=estimator)
    needed: set[Score] = set()
    if config.num_iterations > 1:
        needed.add("old")
    if config.beta > 0:
        needed.add("reference")
    return Algorithm(
        name=config.name,
        advantage=advantage or functools.partial(group_relative, scale=config.scale_rewards),
        advantage_scope="batch" if advantage is not None or config.scale_rewards == "batch" else "group",
        loss=policy_loss,
        aggregate=aggregation(config),
        scores_needed=frozenset(needed),
        num_generations=config.num_generations,
        num_iterations=config.num_iterations,
        train_truncated=config.train_truncated,
    )


def aggregation(config: AlgorithmConfig) -> Aggregate:
    """The mean that a configuration names."""
    match config.aggregation:
        case "token_mean":
            return aggregate.token_mean
        case "sequence_mean":
            return aggregate.sequence_mean
        case "prompt_mean":
            return aggregate.prompt_mean
        case "fixed_length_mean" if config.fixed_length is not None:
            return functools.partial(aggregate.fixed_length_mean, length=config.fixed_length)
    raise UserError("algorithm.aggregation is fixed_length_mean, which needs algorithm.fixed_length, a number of tokens")
