"""What the engines that answer requests one by one have in common: slots, versions, updates, cancelling and closing, as the protocol says.

Owns no model and no jax. An engine brings `_answer`, and `_take` where it has weights; `testing.check_engine` holds both of this package's
to the protocol (`rollout.scripted`, `rollout.recomputing`). They may be called from any number of event loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.rollout.draft import Draft
from burnish.rollout.engine import EngineClosed, EngineStats
from burnish.types import Completion, Request, StopReason

_POLL_S = 0.001  # waiting is polling, so that callers on different event loops need no lock


@dataclass(slots=True, eq=False)
class Call:
    """One request and where it stands. Once it is cancelled, its draft has a reason to stop."""

    draft: Draft
    running: bool = False
    cancelled: bool = False


class SlottedEngine:
    """An engine that lacks only its answers. At most `slots` requests run at a time, and none while weights change."""

    def __init__(self, *, context: int, slots: int, version: int = 0) -> None:
        self._context, self._slots, self._version = context, slots, version
        self._calls: list[Call] = []
        self._update: int | None = None
        self._closed = False
        self._num_tokens = 0
        self.pushed: dict[str, Any] = {}
        """The leaves of the open update, or of the last one that was committed."""

    async def _answer(self, call: Call) -> None:
        """Extend the draft until it has a reason to stop."""
        raise NotImplementedError

    def _take(self, leaves: Mapping[str, Any], checksum: int | None) -> None:
        """Take new weights; nothing runs. Raises for those that can't be taken, and then keeps the old ones."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def mesh(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        call = Call(Draft.begin(request, context=self._context))
        self._calls.append(call)
        try:
            await self._until(lambda: self._free(call))
            if not call.cancelled:
                call.running = True
                await self._answer(call)
        finally:
            self._calls.remove(call)
        self._num_tokens += len(call.draft.ids)
        return call.draft.completion()

    def _free(self, call: Call) -> bool:
        return call.cancelled or (self._update is None and self._num_running() < self._slots)

    def _num_running(self) -> int:
        return sum(call.running for call in self._calls)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait, at least for other tasks to run, until `ready`; closing ends every wait."""
        await asyncio.sleep(0)
        while not self._closed and not ready():
            await asyncio.sleep(_POLL_S)
        self._refuse_when_closed()

    async def cancel(self, request: Request) -> None:
        for call in self._calls:
            if call.draft.request is request:
                call.cancelled = True
                call.draft.stop = StopReason.CANCELLED

    async def begin_update(self, version: int) -> None:
        self._refuse_when_closed()
        if self._update is not None:
            raise RuntimeError(f"the update to version {self._update} is still open; commit or abort it before {version}")
        self._update, self.pushed = version, {}

    async def push(self, name: str, array: Any) -> None:
        self._opened("push")
        self.pushed[name] = array

    async def commit_update(self, checksum: int | None = None) -> None:
        version = self._opened("commit")
        if not self.pushed:
            raise RuntimeError(f"nothing was pushed for version {version}; push the changed leaves, or abort the update")
        await self._until(lambda: self._num_running() == 0)
        self._take(self.pushed, checksum)
        self._version, self._update = version, None

    async def abort_update(self) -> None:
        self._update = None

    def _opened(self, verb: str) -> int:
        self._refuse_when_closed()
        if self._update is None:
            raise RuntimeError(f"there is no update to {verb}: begin_update wasn't called, or the update was aborted")
        return self._update

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed")

    def stats(self) -> EngineStats:
        running = self._num_running()
        return EngineStats(self._slots, running, len(self._calls) - running, 0, self._num_tokens)

    async def close(self) -> None:
        self._closed = True
        while self._calls:
            await asyncio.sleep(_POLL_S)
