"""uvicorn's HTTP protocol with the two limits that it lacks: on the time that a request may take to come, and on connections.

Owns these; imported where the endpoint begins to listen.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def timed(request_s: float, connections: int) -> type[H11Protocol]:
    """A protocol that closes a connection which sends no request within `request_s`, and at once all beyond `connections`."""

    class Timed(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > connections:
                transport.abort()
                return
            self._late = self.loop.call_later(request_s, self._close_if_silent)

        def _close_if_silent(self) -> None:
            if self.cycle is None and not self.transport.is_closing():  # not even the head of a first request
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._late is not None:
                self._late.cancel()
            super().connection_lost(exc)

    return Timed


__all__ = ["timed"]
