"""Tools of MCP servers, over stdio or HTTP, with the official SDK (1.x and 2.x). Needs the extra `mcp`.

Owns connections: one for each server and run, on a thread with an event loop of its own, shared by all episodes and opened again once it
has broken. A server's tools become tools like any other, with its schemas and the run's limits on time and output; what a server says is
text to the model, never more. Made once, before a run begins, so that a server that isn't there is found out then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.agentic.tools import Tool
from burnish.config.errors import UserError

_START_S = 60.0


class McpServer:
    """A connection to one server. command: what starts it, which then speaks over its standard input and output; or url: where it listens.

    environment: of the process; nothing of this one's goes there but what the SDK passes on (PATH, HOME and the like).
    """

    def __init__(self, command: Sequence[str] = (), *, url: str | None = None, environment: Mapping[str, str] = {}) -> None:
        if bool(command) == (url is not None) or isinstance(command, str):
            raise UserError(f"an MCP server is started by a `command` (a list of words) or found at a `url`; got {command!r} and {url!r}")
        _sdk()
        self._command, self._url, self._environment = list(command), url, dict(environment)
        self._loop = asyncio.new_event_loop()
        self._session: Any = None
        self._leave: asyncio.Event | None = None
        self._connecting = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __str__(self) -> str:
        return self._url or " ".join(self._command)

    def tools(self, prefix: str = "") -> dict[str, Tool]:
        """The server's tools, by the name that a model calls them by."""
        try:
            listed = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result(_START_S)
        except Exception as error:
            self.close()
            raise UserError(f"the MCP server {self} doesn't answer: {_reason(error)}") from error
        return dict(self._tool(prefix, described) for described in listed)

    def _tool(self, prefix: str, described: Mapping[str, Any]) -> tuple[str, Tool]:
        own = described["name"]
        name = re.sub(r"\W", "_", f"{prefix}{own}", flags=re.ASCII)[:64]

        async def call(**arguments: Any) -> str:
            # Awaited on the caller's loop; cancelling it there, at its time limit, cancels the request.
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(own, arguments), self._loop))

        schema = described.get("inputSchema") or {}
        parameters = {"type": "object", "properties": {}, "required": [], **schema}
        return name, Tool(name, described.get("description") or "", parameters, call)

    async def _list(self) -> list[dict[str, Any]]:
        session = await self._connected()
        answer = (await session.list_tools()).model_dump(by_alias=True, mode="json")
        return answer["tools"]

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        session = await self._connected()
        answer = (await session.call_tool(name, arguments)).model_dump(by_alias=True, mode="json")
        text = "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in answer.get("content", ()))
        return f"error: {text}" if answer.get("isError") else text

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._session is None:
                ready: asyncio.Future[Any] = self._loop.create_future()
                self._leave = asyncio.Event()
                self._task = self._loop.create_task(self._live(ready, self._leave))
                self._session = await ready
            return self._session

    async def _live(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """Hold the connection open until `leave`; its contexts must be entered and left in one task. A broken one is made anew."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                session = await stack.enter_async_context(await self._open(stack))
                await session.initialize()
                ready.set_result(session)
                await leave.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else ConnectionError(str(error)))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._session = None

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        sdk = _sdk()
        if self._url is not None:
            http = importlib.import_module("mcp.client.streamable_http")
            # By its name in 2.x, else by that of 1.x; the latter also gives a third value.
            connect = vars(http).get("streamable_http_client") or vars(http)["streamablehttp_client"]
            read, write, *_ = await stack.enter_async_context(connect(self._url))
        else:
            stdio = importlib.import_module("mcp.client.stdio")
            how = sdk.StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._environment or None)
            read, write = await stack.enter_async_context(stdio.stdio_client(how))
        stack.push_async_callback(self._forget)
        return _Watched(sdk.ClientSession(read, write), self)

    async def _forget(self) -> None:
        self._session = None

    def broke(self) -> None:
        """Whoever calls next connects again."""
        self._session = None
        if self._leave is not None:
            self._leave.set()

    def close(self) -> None:
        """Leave the server; one that was started ends."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            if self._leave is not None:
                self._leave.set()
                await asyncio.wait({self._task}, timeout=5)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()
        atexit.unregister(self.close)


class _Watched:
    """A session of which a failure other than the server's own answer means that the connection is gone."""

    def __init__(self, session: Any, server: McpServer) -> None:
        self._session, self._server = session, server

    async def __aenter__(self) -> _Watched:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *what: Any) -> Any:
        return await self._session.__aexit__(*what)

    async def initialize(self) -> Any:
        return await self._session.initialize()

    async def list_tools(self) -> Any:
        return await self._session.list_tools()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._session.call_tool(name, arguments)
        except Exception as error:
            if "closed" in f"{type(error).__name__} {error}".lower():
                self._server.broke()
            raise


def mcp_tools(*servers: McpServer) -> dict[str, Tool]:
    """A `tool_map` of all tools of some servers; two tools of one name are an error."""
    found: dict[str, Tool] = {}
    for server in servers:
        for name, tool in server.tools().items():
            if name in found:
                raise UserError(f"two tools are called {name!r}, the second of {server}: give its server a `prefix`")
            found[name] = tool
    return found


def _sdk() -> Any:
    try:
        return importlib.import_module("mcp")
    except ImportError as error:
        raise UserError(f'MCP servers need the extra `mcp`: pip install "burnish[mcp]" ({error})') from error


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")


__all__ = ["McpServer", "mcp_tools"]
