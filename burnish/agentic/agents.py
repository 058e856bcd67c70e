"""Agents: what turns an environment's words into a conversation, and a model's words into an action.

Owns the conversation of one episode. Knows no model family, no tokens and no sampling: `trajectory.py` does those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.agentic.tools import BaseTool, Tool, ToolFunction, ToolSet
from burnish.config.errors import UserError, suggest
from burnish.text.tool_parsers import PARSERS
from burnish.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Action:
    """What the environment gets: the model's text and, of agents that have tools, its calls and what runs them."""

    text: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    tools: ToolSet | None = None


class ConversationAgentBase:
    """Keeps the history of one episode. Subclasses say how a response becomes an action.

    tools: JSON schemas of what the model may call, as chat templates take them; none unless a subclass sets it. remembers: how many of
    the last turns the model is shown beside the newest observation, 0 none; None shows all. Each turn is then a row of its own, so short
    observations stay cheap over many turns.
    """

    def __init__(self, system_prompt: str | None = None, *, remembers: int | None = None) -> None:
        if remembers is not None and (isinstance(remembers, bool) or remembers < 0):
            raise UserError(f"an agent remembers 0 or more turns, or all (None); got {remembers!r}")
        self.system_prompt, self.remembers = system_prompt, remembers
        self.messages: list[Message] = []
        self.tools: Sequence[Mapping[str, Any]] = ()

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

    def shown(self) -> list[Message]:
        """What the model is shown of the conversation: the system message, the turns that it remembers, the newest observation."""
        turns = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.remembers is None or len(turns) <= self.remembers:
            return self.messages
        cut = turns[-1 - self.remembers] + 1
        return [message for message in self.messages[:1] if message["role"] == "system"] + self.messages[cut:]

    def messages_with_tools_in_words(self) -> list[Message]:
        """What is shown, with the tools described in its system message, for chat templates that know no tools."""
        words = "You can call tools. Their JSON schemas:\n" + "\n".join(json.dumps(tool) for tool in self.tools)
        shown = self.shown()
        system, rest = shown[:1], shown[1:]
        if not system or system[0]["role"] != "system":
            return [{"role": "system", "content": words}, *shown]
        return [{**system[0], "content": f"{system[0]['content']}\n\n{words}"}, *rest]


class ModelAgent(ConversationAgentBase):
    """The plain agent: the response is the action."""

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response)


class ToolAgent(ConversationAgentBase):
    """Reads tool calls out of what the model says; the environment runs them.

    tool_parser_name: the format that the model writes calls in, one of `text.tool_parsers.PARSERS`. tool_map: name → a `BaseTool` class
    or instance, a typed function, or a `Tool` (those of `mcp.mcp_tools`); names are what the model calls them by.
    """

    def __init__(
        self,
        system_prompt: str | None = None,
        *,
        tool_parser_name: str = "qwen",
        tool_map: Mapping[str, type[BaseTool] | BaseTool | ToolFunction | Tool],
        remembers: int | None = None,
    ) -> None:
        super().__init__(system_prompt, remembers=remembers)
        if tool_parser_name not in PARSERS:
            known = suggest(tool_parser_name, PARSERS) or f"; known: {', '.join(PARSERS)}"
            raise UserError(f"there is no tool parser {tool_parser_name!r}{known}")
        self._parser = PARSERS[tool_parser_name]
        self._tools = ToolSet(tool_map)
        self.tools = self._tools.schemas

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response, self._parser.calls(response), self._tools)

    def messages_with_tools_in_words(self) -> list[Message]:
        shown = super().messages_with_tools_in_words()
        how = f"\n\nTo call one, write:\n{self._parser.example}"
        return [{**shown[0], "content": shown[0]["content"] + how}, *shown[1:]]


__all__ = ["Action", "ConversationAgentBase", "ModelAgent", "ToolAgent"]
