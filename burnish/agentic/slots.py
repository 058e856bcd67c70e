"""A semaphore that any number of event loops may wait at: training's and an evaluation's share one pool of workers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading


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


__all__ = ["Slots"]
