"""burnish: post-training for language models in JAX.

The public names, imported when they are first used, so that `import burnish` costs nothing and never starts JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.agentic.agents import Action, ConversationAgentBase, ModelAgent, ToolAgent
    from burnish.agentic.environments import BaseTaskEnv, EnvStepResult, TaskEnvironment, ToolEnvironment
    from burnish.agentic.orchestrator import RolloutOrchestrator
    from burnish.agentic.tools import BaseTool
    from burnish.agentic.trajectory import TrajectoryCollectEngine
    from burnish.checkpoint.saver import Saver
    from burnish.config.algorithms import GRPOConfig, PPOConfig
    from burnish.config.loader import load_config
    from burnish.config.schema import ClusterConfig, Config, EpisodeLimits, LoraConfig, RolloutConfig, TrainingConfig
    from burnish.rl.cluster import RLCluster
    from burnish.rl.learner import RLLearner
    from burnish.rl.learners import GRPOLearner, PPOLearner
    from burnish.rl.placement import Role
    from burnish.train.trainers.named import DistillationTrainer, DPOTrainer, PeftTrainer, RewardModelTrainer

_HOMES = {
    "burnish.agentic.agents": ("Action", "ConversationAgentBase", "ModelAgent", "ToolAgent"),
    "burnish.agentic.environments": ("BaseTaskEnv", "EnvStepResult", "TaskEnvironment", "ToolEnvironment"),
    "burnish.agentic.orchestrator": ("RolloutOrchestrator",),
    "burnish.agentic.tools": ("BaseTool",),
    "burnish.agentic.trajectory": ("TrajectoryCollectEngine",),
    "burnish.checkpoint.saver": ("Saver",),
    "burnish.config.algorithms": ("GRPOConfig", "PPOConfig"),
    "burnish.config.loader": ("load_config",),
    "burnish.config.schema": ("ClusterConfig", "Config", "EpisodeLimits", "LoraConfig", "RolloutConfig", "TrainingConfig"),
    "burnish.rl.cluster": ("RLCluster",),
    "burnish.rl.learner": ("RLLearner",),
    "burnish.rl.learners": ("GRPOLearner", "PPOLearner"),
    "burnish.rl.placement": ("Role",),
    "burnish.train.trainers.named": ("DPOTrainer", "DistillationTrainer", "PeftTrainer", "RewardModelTrainer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "BaseTaskEnv",
    "BaseTool",
    "ClusterConfig",
    "Config",
    "ConversationAgentBase",
    "DPOTrainer",
    "DistillationTrainer",
    "EnvStepResult",
    "EpisodeLimits",
    "GRPOConfig",
    "GRPOLearner",
    "LoraConfig",
    "ModelAgent",
    "PPOConfig",
    "PPOLearner",
    "PeftTrainer",
    "RLCluster",
    "RLLearner",
    "RewardModelTrainer",
    "Role",
    "RolloutConfig",
    "RolloutOrchestrator",
    "Saver",
    "TaskEnvironment",
    "ToolAgent",
    "ToolEnvironment",
    "TrainingConfig",
    "TrajectoryCollectEngine",
    "load_config",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
