"""An engine that says what a function tells it to: for tests of everything that waits for completions, and for replaying transcripts.

Owns no model and no jax. Budgets, stops, versions, updates, cancelling and closing behave as the protocol says
(`testing.check_engine` holds it to that); log-probs are a constant. It may be called from any number of event loops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.rollout.draft import DecodeText, Draft
from burnish.rollout.engine import EngineClosed, EngineStats
from burnish.types import Completion, Request, StopReason

_POLL_S = 0.001  # waiting is polling, so that callers on different event loops need no lock


@dataclass(slots=True, eq=False)
class _Call:
    """One request and where it stands."""

    draft: Draft
    running: bool = False
    cancelled: bool = False


def no_text(ids: Sequence[int]) -> str:
    """Of scripts whose requests name no stop strings."""
    raise ValueError(f"a request names stop strings, so ScriptedEngine needs `decode_text` to read {len(ids)} ids")


class ScriptedEngine:
    """Answers each request with `reply(request)`, cut at its stop ids, stop strings and budget, after `latency_s(request)` seconds.

    The reply is what a model would go on to say, so it should end in a stop id or be at least as long as the budget; one that runs out
    earlier is repeated. logp: the log-probability given to every id.
    """

    def __init__(
        self,
        reply: Callable[[Request], Sequence[int]],
        *,
        latency_s: Callable[[Request], float] = lambda request: 0.0,
        decode_text: DecodeText = no_text,
        context: int = 1 << 20,
        slots: int = 64,
        logp: float = -1.0,
        version: int = 0,
    ) -> None:
        self._reply, self._latency_s, self._decode_text = reply, latency_s, decode_text
        self._context, self._slots, self._logp, self._version = context, slots, logp, version
        self._calls: list[_Call] = []
        self._update: int | None = None
        self._closed = False
        self._num_tokens = 0
        self.pushed: dict[str, Any] = {}
        """The leaves of the open update, or of the last one that was committed."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def mesh(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        call = _Call(Draft.begin(request, context=self._context))
        self._calls.append(call)
        try:
            await self._until(lambda: self._free(call))
            call.running = not call.cancelled
            deadline = time.monotonic() + self._latency_s(request)
            await self._until(lambda: call.cancelled or time.monotonic() >= deadline)
        finally:
            self._calls.remove(call)
        if not call.cancelled:
            self._say(call.draft)
        return call.draft.completion()

    def _free(self, call: _Call) -> bool:
        return call.cancelled or (self._update is None and self._num_running() < self._slots)

    def _num_running(self) -> int:
        return sum(call.running for call in self._calls)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait, at least for other tasks to run, until `ready`; closing ends every wait."""
        await asyncio.sleep(0)
        while not self._closed and not ready():
            await asyncio.sleep(_POLL_S)
        if self._closed:
            raise EngineClosed("the engine was closed")

    def _say(self, draft: Draft) -> None:
        request = draft.request
        reply = list(self._reply(request))
        if not reply:
            raise ValueError(f"the script has an empty reply to {request}; a model says at least one id")
        ids = (reply * -(-draft.budget // len(reply)))[: draft.budget]
        end = next((count for count, token in enumerate(ids, 1) if token in request.params.stop_ids), len(ids))
        kept = np.asarray(ids[:end], np.int32)[:, None]
        logps = np.full(end, 0.0 if request.params.truncates else self._logp, np.float32)  # all the mass is on the one id that was kept
        draft.extend(kept[:, 0], logps, kept, version=self._version, decode_text=self._decode_text)
        self._num_tokens += len(draft.ids)

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
        """What was pushed is in `pushed` as it came; there is nothing that the checksum could be compared with."""
        version = self._opened("commit")
        if not self.pushed:
            raise RuntimeError(f"nothing was pushed for version {version}; push the changed leaves, or abort the update")
        await self._until(lambda: self._num_running() == 0)
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
