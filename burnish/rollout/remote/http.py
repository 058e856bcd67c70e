"""One server's HTTP: JSON out, JSON or events back, and what went wrong sorted by what can be done about it.

Owns connections and the three kinds of failure. Knows no engine's addresses or fields (`rollout.vllm`, `rollout.sglang`). Runs on the one
event loop of `remote.loop`. The client is httpx2, which is imported when the first connection is made: the extra `serve`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from burnish.config.errors import UserError


class ServerGone(Exception):
    """The server can't be reached, broke off or says that it is broken. What was asked may be asked again, of it or of another.

    status: of its answer, None where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Busy(Exception):
    """The server has no room now and says so: ask again later."""


class Refused(Exception):
    """The server understood and won't: asking again changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status


class Http:
    """Requests to one server. connections: most at one time; the engine keeps them fewer than that itself."""

    def __init__(self, url: str, *, token: str | None = None, connections: int = 128) -> None:
        library = _library()
        self.url = url.rstrip("/")
        self._library = library
        self._client = library.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=library.Limits(max_connections=connections, max_keepalive_connections=connections),
            verify=self.url.startswith("https"),  # a context for TLS takes 30 ms to make
            trust_env=False,  # a proxy that is meant for the internet has no business between an engine and its servers
        )

    async def get(self, path: str, *, timeout_s: float) -> Any:
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The answer's JSON, or its text where it isn't JSON. Raises ServerGone, Busy or Refused."""
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout_s)
        except self._library.TransportError as error:
            raise ServerGone(f"{method} {self.url}{path}: {_words(error)}") from error
        self._check(path, response.status_code, response.text)
        return _parsed(response.text)

    async def events(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> AsyncIterator[Any]:
        """The JSON of each server-sent event up to `[DONE]`; leaving early closes the connection, which ends the request there.

        timeout_s: between two events.
        """
        try:
            async with self._client.stream("POST", path, json=body, timeout=timeout_s) as response:
                if response.status_code != 200:
                    self._check(path, response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    said = line.removeprefix("data:").strip()
                    if said == "[DONE]":
                        return
                    yield json.loads(said)
        except self._library.TransportError as error:
            raise ServerGone(f"POST {self.url}{path}: {_words(error)}") from error
        raise ServerGone(f"POST {self.url}{path}: the stream ended before it was done")

    def _check(self, path: str, status: int, text: str) -> None:
        if status < 400:
            return
        message = f"{self.url}{path}: {_message(text)}"
        if status in (408, 425, 429, 503):
            raise Busy(f"{message} (status {status})")
        if status >= 500:
            raise ServerGone(f"{message} (status {status})", status)
        raise Refused(status, message)

    async def close(self) -> None:
        await self._client.aclose()


@contextlib.contextmanager
def refusing(status: int) -> Iterator[None]:
    """Take this status, which else means a broken server, for a refusal: where that is how a server says one."""
    try:
        yield
    except ServerGone as error:
        if error.status != status:
            raise
        raise Refused(status, str(error)) from error


def _library() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise UserError('an engine that is reached by HTTP needs the extra `serve`: pip install "burnish[serve]"') from error
    return httpx2


def check_installed() -> None:
    """Raise UserError where the extra isn't installed."""
    _library()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(text: str) -> str:
    """What an error's body says, whichever of the usual shapes it has."""
    found = _parsed(text)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:2000] or "no reason given"


__all__ = ["Busy", "Http", "Refused", "ServerGone", "check_installed", "refusing"]
