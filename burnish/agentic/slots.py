"""Bounds on how much goes on at one time: a semaphore that any number of event loops may wait at, and a bound that grows."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_S = 0.05
"""Between two looks at how much room there is: about an episode's way from its start to its first request."""


class Slots:
    """A semaphore that any number of event loops may wait at."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(future)
            if not future.cancelled():  # it was let in at the very moment
                self.release()
            raise

    def release(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                future = self._waiting.popleft()
            with contextlib.suppress(RuntimeError):  # its loop is closed: let the next one in
                future.get_loop().call_soon_threadsafe(self._let_in, future)
                return

    def _let_in(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self.release()
        else:
            future.set_result(None)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """How many episodes may play: `start` of them, more while there is room for them, at most `most`."""

    start: int
    most: int


async def grow(slots: asyncio.Semaphore, bound: Adaptive, room: Callable[[], int], *, grown: Callable[[int], None]) -> None:
    """Let more in while somebody waits at `slots` and `room()` says how many could be served at once. `grown` hears of each new bound."""
    count = bound.start
    while count < bound.most:
        await asyncio.sleep(_LOOK_S)
        more = min(room(), bound.most - count) if slots.locked() else 0
        for _ in range(more):
            slots.release()
        if more > 0:
            count += more
            grown(count)


__all__ = ["Adaptive", "Slots", "grow"]
