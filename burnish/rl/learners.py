"""The learners that users name: an `RLLearner` whose algorithm is described by options.

Owns how options and a policy become a record and a cluster, a critic included. The loop is `rl.learner`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from burnish.agentic.agents import ConversationAgentBase, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, TaskEnvironment
from burnish.config.algorithms import AnyAlgorithmConfig, GRPOConfig, OnPolicyDistillationConfig, PPOConfig
from burnish.config.errors import UserError
from burnish.config.schema import EpisodeLimits, RayConfig, RolloutConfig, RunSection, TrainingConfig
from burnish.data.stream import PromptStream
from burnish.models.model import Model
from burnish.observe.sinks import Sink
from burnish.rewards.manager import RewardSpec
from burnish.rl.algorithms import from_config
from burnish.rl.cluster import RLCluster
from burnish.rl.learner import RLLearner
from burnish.types import Prompt


class ConfiguredLearner(RLLearner):
    """`RLLearner` with the algorithm that `config` describes, or else with the one of the class. The other arguments are `RLLearner`'s."""

    default: ClassVar[AnyAlgorithmConfig]

    def __init__(
        self,
        policy: RLCluster | Model | str | Path,
        config: AnyAlgorithmConfig | None = None,
        *,
        reward_fns: Sequence[Callable[..., Any] | RewardSpec] = (),
        train_ds: PromptStream | Iterable[Any],
        eval_ds: Sequence[Prompt] | Iterable[Any] | None = None,
        agent_class: Callable[..., ConversationAgentBase] = ModelAgent,
        agent_kwargs: Mapping[str, Any] = {},
        env_class: Callable[..., BaseTaskEnv] = TaskEnvironment,
        env_kwargs: Mapping[str, Any] = {},
        limits: EpisodeLimits = EpisodeLimits(),
        ray: RayConfig | None = None,
        training: TrainingConfig | None = None,
        rollout: RolloutConfig | None = None,
        run: RunSection | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        chosen = self.default if config is None else config
        sampling = policy.rollout_config if isinstance(policy, RLCluster) else rollout or RolloutConfig()
        algorithm = from_config(chosen, max_tokens=sampling.sampling.max_tokens)
        critic = chosen.critic if isinstance(chosen, PPOConfig) else None
        if critic is not None and isinstance(policy, RLCluster) and policy.critic_config != critic:
            has = "none" if policy.critic_config is None else "one of other options, which these would not replace"
            raise UserError(f"PPO needs a critic, and this cluster has {has}: build it with RLCluster(..., critic=config.critic)")
        if isinstance(chosen, OnPolicyDistillationConfig) and not (isinstance(policy, RLCluster) and policy.has_teacher):
            raise UserError("on-policy distillation needs a teacher: build the cluster with RLCluster(..., teacher=config.teacher)")
        super().__init__(
            policy,
            algorithm,
            reward_fns=reward_fns,
            train_ds=train_ds,
            eval_ds=eval_ds,
            agent_class=agent_class,
            agent_kwargs=agent_kwargs,
            env_class=env_class,
            env_kwargs=env_kwargs,
            limits=limits,
            ray=ray,
            training=training,
            rollout=rollout,
            critic=critic,
            run=run,
            sinks=sinks,
        )


class GRPOLearner(ConfiguredLearner):
    """Group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300) and its kin: any options of `burnish.config.algorithms`."""

    default = GRPOConfig()


class PPOLearner(ConfiguredLearner):
    """Proximal policy optimisation with a critic (Schulman et al., 2017, arXiv:1707.06347)."""

    default = PPOConfig()


__all__ = ["ConfiguredLearner", "GRPOLearner", "PPOLearner"]
