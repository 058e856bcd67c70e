"""Listening: who may call, how much they may send and how long they may take, and the server's beginning and end.

Owns the token, the limits and the sockets; the routes are `app`. A listener that others can reach is refused without a token.
A connection that hasn't sent a whole request in time is closed, whether it is idle, slow or part of a crowd.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError


@dataclass(frozen=True, slots=True)
class Guards:
    """token: what every request must bring, None asks for none. body_bytes: of one request. request_s: from a connection, or the end of its
    last answer, to the end of its next request. connections: at one time; more are closed at once."""

    token: str | None
    body_bytes: int = 32 << 20
    request_s: float = 20.0
    connections: int = 512


def check_bind(host: str, token: str | None) -> None:
    """Raise UserError for an address that others can reach, unless there is a token."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not token:
        raise UserError(f"{host} can be reached by others, so it needs a token: set one, or listen on 127.0.0.1")


class Guarded:
    """An ASGI application behind a token and a limit on the body."""

    def __init__(self, app: Any, guards: Guards) -> None:
        self._app, self._guards = app, guards

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._allowed(headers) and scope["path"] != "/health":
            return await _refuse(send, 401, "a token is needed: `Authorization: Bearer TOKEN`, or `x-api-key: TOKEN`")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._guards.body_bytes:
            return await _refuse(send, 413, f"a request may have {self._guards.body_bytes} bytes")
        try:
            body = await asyncio.wait_for(self._whole(receive), self._guards.request_s)
        except TimeoutError:
            return await _refuse(send, 408, f"the request wasn't there within {self._guards.request_s:g} s")
        if body is None:
            return await _refuse(send, 413, f"a request may have {self._guards.body_bytes} bytes")
        given = False

        async def replay() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _allowed(self, headers: dict[str, str]) -> bool:
        if self._guards.token is None:
            return True
        given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self._guards.token.encode())

    async def _whole(self, receive: Any) -> bytes | None:
        """The body; None where it is too long."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._guards.body_bytes:
                return None
            if not message.get("more_body"):
                return b"".join(parts)


async def _refuse(send: Any, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(app: Any, guards: Guards, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """Serve on this loop until the block is left; gives the address. port: 0 takes a free one."""
    check_bind(host, guards.token)
    try:
        import uvicorn
    except ImportError as error:
        raise UserError('the endpoint needs the extra `serve`: pip install "burnish[serve]"') from error

    from burnish.rollout.server.protocol import timed

    try:
        listener = socket.create_server((host, port), backlog=128, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"can't listen on {host}:{port}: {error}") from error
    config = uvicorn.Config(
        Guarded(app, guards),
        http=timed(guards.request_s, guards.connections),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=int(guards.request_s) or 1,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=64 << 10,
        server_header=False,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # signals are the command's
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=10.0)
        listener.close()


__all__ = ["Guarded", "Guards", "check_bind", "listening"]
