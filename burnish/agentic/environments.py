"""Environments: the world that an episode plays in. One instance is one episode.

Owns the base class that a user subclasses and the single-turn environment. No jax, no tokens: an environment sees text and gives text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.agentic.agents import Action
from burnish.types import Message


@dataclass(frozen=True, slots=True)
class EnvStepResult:
    """What a step gives back. `reward` None means that this step says nothing about reward; it is never read as 0."""

    observation: str | list[Message]
    reward: float | None
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class BaseTaskEnv(ABC):
    """Subclasses write `_initial_observation`, `_step_impl` and, where they hold something open, `close`; plain or `async`.

    Plain methods run on a thread of the episode's own, so they may block; the constructor may not: open things in `_initial_observation`.

    `task` is the data row as a mapping, its "seed" included: all samples of a group see the same task. `max_steps` ends the episode as
    truncated. An instance refuses a step after its end, so that a bug in a collector can't be mistaken for a reward.
    """

    def __init__(self, task: Mapping[str, Any], *, max_steps: int = 1) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.task = task
        self.max_steps = max_steps
        self.num_steps = 0
        self.done = False

    @abstractmethod
    def _initial_observation(self) -> Any:
        """The first observation: a string (the user's message) or a list of messages; or a coroutine of it."""

    @abstractmethod
    def _step_impl(self, action: Action) -> Any:
        """An `EnvStepResult`, or a coroutine of it."""

    def close(self) -> Any:
        """Release what the episode holds. Called exactly once, whatever happened."""
        return None

    def check_step(self) -> None:
        """Count a step, refusing one after the end."""
        if self.done:
            raise RuntimeError(f"{type(self).__name__} was stepped after its episode had ended")
        self.num_steps += 1


class TaskEnvironment(BaseTaskEnv):
    """One question, one answer; reward functions judge it afterwards. The task's "prompt" holds the messages.

    Its methods are coroutines, so that thousands of plain questions take no thread.
    """

    async def _initial_observation(self) -> list[Message]:
        return list(self.task["prompt"])

    async def _step_impl(self, action: Action) -> EnvStepResult:
        return EnvStepResult("", None, True)

    async def close(self) -> None:
        return None


__all__ = ["BaseTaskEnv", "EnvStepResult", "TaskEnvironment"]
