"""What an agent asks and what it is told, whichever interface it speaks.

Owns these records and the protocol of who answers (`agentic.sessions.Sessions`); no HTTP, no jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from burnish.config.errors import BurnishError
from burnish.types import Completion, Message, SamplingParams, ToolCall


class CannotAnswer(BurnishError):
    """A request that can't be answered; the client is told why, with this status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation, up to where the model speaks, and how it is to be sampled; None leaves that to the endpoint. tools: JSON schemas, as
    chat templates take them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said. text: all of it. content: what isn't a tool call. calls: (id, call), empty where there are none or where what
    was written can't be read as calls."""

    text: str
    content: str
    completion: Completion
    num_prompt_tokens: int
    calls: Sequence[tuple[str, ToolCall]] = field(default_factory=tuple)


class Backend(Protocol):
    """Who answers. A session is named by the client; None is a request that nobody remembers."""

    @property
    def model(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    async def chat(self, session: str | None, turn: Turn) -> Reply: ...

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, seed_path: Sequence[int] | None) -> Completion: ...

    async def finish(self, session: str, rewards: Mapping[str, float | None]) -> Mapping[str, Any]:
        """End a session with what it earned; returns what its record comes to."""
        ...


__all__ = ["Backend", "CannotAnswer", "Reply", "Turn"]
