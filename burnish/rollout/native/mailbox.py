"""How coroutines on any event loop talk to the engine's one worker thread, and how all of them are answered when it ends.

Owns the queue of posted functions and the futures that callers wait for; knows nothing of models. What one turn of a caller's loop posts
arrives as one: an idle worker that began with the first of many requests would prefill that one alone, which costs as much as all of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class Mailbox:
    """Functions for a worker to run between its programs. `post` and `ask` are for coroutines, `listen` and `end` for the worker."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Sequence[Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._posted: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}  # in this turn of each loop
        self._open: set[Future[Any]] = set()  # what callers wait for
        self._ending: BaseException | None = None  # why nothing more is taken

    def post(self, future: Future[Any], action: Callable[[], None]) -> None:
        """Have the worker run `action`, which sees to it that `future` is settled some day; if the worker ends before, `end` settles it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ending is not None:
                raise self._ending
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        if loop not in self._posted:
            self._posted[loop] = []
            loop.call_soon(lambda: self._inbox.put(self._posted.pop(loop)))
        self._posted[loop].append(action)

    async def ask(self, action: Callable[[], None]) -> None:
        """Run a quick action on the worker and wait for it; its exception is the caller's, not the worker's."""
        future: Future[None] = Future()

        def answer() -> None:
            try:
                action()
            except Exception as error:
                settle(future, error)
            else:
                settle(future, None)

        self.post(future, answer)
        await asyncio.wrap_future(future)

    def wake(self) -> None:
        """End a `listen` that waits."""
        self._inbox.put(())

    def listen(self, *, wait: bool) -> None:
        """Run what was posted. `wait`: there is nothing else to do, so wait for the first; never for more than are there."""
        first = self._inbox.get() if wait else ()
        for posted in (first, *(self._inbox.get() for _ in range(self._inbox.qsize()))):
            for action in posted:
                action()

    def end(self, ending: BaseException) -> None:
        """Give everybody who waits, and whoever comes later, this exception."""
        with self._lock:
            self._ending = ending
        for future in list(self._open):
            settle(future, ending)


def settle(future: Future[Any], outcome: Any) -> None:
    """Give a future its result or exception, unless its caller has stopped waiting."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
