"""A thread with an event loop of its own, where an engine's connections live.

Callers come from any number of loops (a learner's producer, a sync's, a notebook's), and a connection belongs to the one it was made on.
Owns the thread and its end; `remote.engine` runs everything on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from burnish.rollout.engine import EngineClosed

T = TypeVar("T")


class LoopThread:
    """Coroutines that are handed in run here; cancelling the wait for one cancels it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._taking = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something short, for who isn't asynchronous."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises EngineClosed after `close` has begun."""
        with self._lock:
            if not self._taking:
                work.close()
                raise EngineClosed("the engine was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    async def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Take nothing more, run `last` to its end, stop the thread. The second call only waits for the first."""
        with self._lock:
            first, self._taking = self._taking, False
            future = asyncio.run_coroutine_threadsafe(last, self._loop) if first else None
        if future is None:
            last.close()
        else:
            try:
                await asyncio.wrap_future(future)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
        while self._thread.is_alive():
            await asyncio.sleep(0.002)


__all__ = ["LoopThread"]
