"""The protocol that every source of completions speaks: the native engine, vLLM, SGLang, a scripted replay.

Owns the interface, and how plain code waits for it; no jax. Requests are asynchronous and single, from the start: batching is the engine's
business. Weights arrive in two phases, so an engine is wholly on the old or wholly on the new version, never on a mix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from burnish.types import Completion, Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: `slots` rows that decode together, `running` and `waiting` requests, bytes of KV cache, tokens sampled so far.

    Of an engine with pages of KV cache: `pages` that running requests hold; and so far, tokens of prompts that were `prefilled` and tokens
    whose keys and values were `reused` instead, and how often a request was swapped out (`swaps`).
    """

    slots: int
    running: int
    waiting: int
    kv_bytes: int
    tokens: int
    pages: int = 0
    prefilled: int = 0
    reused: int = 0
    swaps: int = 0


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, for callers that are plain functions; on a thread of its own where this one runs a loop, as a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


class EngineClosed(RuntimeError):
    """The engine was closed while the request waited, or before it was made."""


@runtime_checkable
class Engine(Protocol):
    """Samples completions and takes new weights.

    `generate` raises `ValueError` for a request that can never run (prompt longer than the context) and `EngineClosed` after `close`;
    a failure of the engine itself is raised to every caller that waits. `commit_update` refuses leaves whose `sync.checksum` isn't the one
    that it is given, and stays on the old weights. `mesh` is the jax mesh that it computes on, None when remote.
    """

    @property
    def version(self) -> int: ...

    @property
    def mesh(self) -> Any | None: ...

    async def generate(self, request: Request) -> Completion: ...

    async def cancel(self, request: Request) -> None: ...

    async def begin_update(self, version: int) -> None: ...

    async def push(self, name: str, array: Any) -> None: ...

    async def commit_update(self, checksum: int | None = None) -> None: ...

    async def abort_update(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
