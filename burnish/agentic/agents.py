"""Agents: what turns an environment's words into a conversation, and a model's words into an action.

Owns the conversation of one episode. Knows no model family, no tokens and no sampling: `trajectory.py` does those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.types import Message


@dataclass(frozen=True, slots=True)
class Action:
    """What the environment gets: the model's text and, for agents that parse them, its tool calls."""

    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class ConversationAgentBase:
    """Keeps the history of one episode. Subclasses say how a response becomes an action."""

    def __init__(self, system_prompt: str | None = None) -> None:
        self.system_prompt = system_prompt
        self.messages: list[Message] = []

    def reset(self) -> None:
        """Begin a new episode."""
        self.messages = []
        if self.system_prompt is not None:
            self.messages.append({"role": "system", "content": self.system_prompt})

    def update_from_env(self, observation: str | Sequence[Message], *, info: Mapping[str, Any] | None = None) -> list[Message]:
        """Append what the environment said (a string is a user's message) and return the messages that were added.

        A system message of the observation gives way to the agent's own, so that no conversation has two.
        """
        said: list[Message] = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
        if self.system_prompt is not None:
            said = [message for message in said if message["role"] != "system"]
        self.messages.extend(said)
        return said

    def update_from_model(self, response: str) -> Action:
        """Append the model's text as the assistant's turn and return the action it means."""
        raise TypeError(f"{type(self).__name__} must say what a response means: define update_from_model(response) -> Action")


class ModelAgent(ConversationAgentBase):
    """The plain agent: the response is the action."""

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response)


__all__ = ["Action", "ConversationAgentBase", "ModelAgent"]
