"""Environments: the world that an episode plays in. One instance is one episode.

Owns the base class that a user subclasses, the single-turn environment and the one that runs tools. No jax, no tokens: an environment sees
text and gives text.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.agentic.agents import Action, ConversationAgentBase
from burnish.agentic.calls import Calls
from burnish.config.errors import UserError
from burnish.types import Message

if TYPE_CHECKING:
    from burnish.agentic.trajectory import EpisodeContext


@dataclass(frozen=True, slots=True)
class EnvStepResult:
    """What a step gives back. `reward` None means that this step says nothing about reward; it is never read as 0."""

    observation: str | list[Message]
    reward: float | None
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class EpisodeId(NamedTuple):
    """Identity of an episode: its group (step, draw), its place among the `samples` of the group, and which attempt at it this is."""

    group: tuple[int, int]
    sample: int
    samples: int
    attempt: int


class BaseTaskEnv(ABC):
    """Subclasses write `_initial_observation`, `_step_impl` and, where they hold something open, `close`; plain or `async`.

    Plain methods may block: they run in a process of the episode's own, which is killed if it hangs, or where that can't be (see
    `workers.py`) on a thread. The constructor runs in the trainer and must be quick: open things in `_initial_observation`.

    `task` is the data row as a mapping, its "seed" included: all samples of a group see the same task. `max_steps` ends the episode as
    truncated; None leaves that to the run's limits. An instance refuses a step after its end, so that a bug in a collector can't be
    mistaken for a reward.
    """

    calls: Calls = Calls(None)
    """Where what an environment of coroutines calls may run; whoever plays the episode sets it."""
    episode: EpisodeId = EpisodeId((0, 0), 0, 1, 0)
    """Which of its group's episodes this is; whoever plays it sets it."""

    def __init__(self, task: Mapping[str, Any], *, max_steps: int | None = None) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.task = task
        self.max_steps = max_steps
        self.num_steps = 0
        self.done = False

    def stage(self, agent: ConversationAgentBase, context: EpisodeContext) -> tuple[ConversationAgentBase, EpisodeContext]:
        """Who speaks in its episode, and what that runs in: those given, unless an environment has to see the model's requests
        themselves. Called before anything else of the episode, in the trainer."""
        return agent, context

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


class ToolEnvironment(TaskEnvironment):
    """A question, and tools to answer it with: runs the calls of a `ToolAgent` and says what they returned. A message without a call is
    the answer, and the end.

    timeout_s: for one call; max_characters: of one result. Both can't fail an episode: the model is told. Calls of one message run
    together.
    """

    def __init__(
        self, task: Mapping[str, Any], *, max_steps: int | None = None, timeout_s: float = 10.0, max_characters: int = 4000
    ) -> None:
        super().__init__(task, max_steps=max_steps)
        if isinstance(timeout_s, bool) or not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise UserError(f"timeout_s of a tool's call must be finite and > 0, got {timeout_s!r}")
        if max_characters < 1:
            raise UserError(f"max_characters of a tool's result must be at least 1, got {max_characters}")
        self.timeout_s, self.max_characters = timeout_s, max_characters

    async def _step_impl(self, action: Action) -> EnvStepResult:
        if not action.tool_calls:
            return EnvStepResult("", None, True)
        if action.tools is None:
            raise TypeError("ToolEnvironment needs an agent with tools: use agent_class=ToolAgent")
        limits = {"timeout_s": self.timeout_s, "max_characters": self.max_characters}
        results = await asyncio.gather(*(action.tools.run(call, calls=self.calls, **limits) for call in action.tool_calls))
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(action.tool_calls, results, strict=True)
        ]
        failed = sum(result.startswith("error: ") for result in results)
        return EnvStepResult(messages, None, False, {"tool_calls": len(results), "tool_errors": failed})


SINGLE_PROMPT: tuple[Callable[..., BaseTaskEnv], ...] = (TaskEnvironment, ToolEnvironment)
"""Environments whose episodes begin with the data's own prompt, which so can be measured before a run, and that give no reward."""

__all__ = ["SINGLE_PROMPT", "BaseTaskEnv", "EnvStepResult", "EpisodeId", "TaskEnvironment", "ToolEnvironment"]
