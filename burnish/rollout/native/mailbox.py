"""How coroutines on any event loop talk to the engine's one worker thread, and how all of them are answered when it ends.

Owns the queue of posted functions and the futures that callers wait for; knows nothing of models.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# An idle worker waits this long after each arrival for the rest of its batch, since prefill of one row costs as much as of all of them; but
# no longer than the second figure, so that a trickle of arrivals doesn't hold up the first.
_GATHER_S, _LONGEST_GATHER_S = 0.005, 0.05


class Mailbox:
    """Functions for a worker to run between its programs. `post` and `ask` are for callers, `listen` and `end` for the worker."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()  # what callers wait for
        self._ending: BaseException | None = None  # why nothing more is taken

    def post(self, future: Future[Any], action: Callable[[], None]) -> None:
        """Have the worker run `action`, which sees to it that `future` is settled some day; if the worker ends before, `end` settles it."""
        with self._lock:
            if self._ending is not None:
                raise self._ending
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._inbox.put(action)

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
        self._inbox.put(lambda: None)

    def listen(self, *, wait: bool) -> None:
        """Run what was posted. `wait`: there is nothing else to do, so wait for the first, and a moment for those that come with it."""
        try:
            if wait:
                self._inbox.get()()
            deadline = time.monotonic() + _LONGEST_GATHER_S
            while time.monotonic() < deadline:
                self._inbox.get(block=wait, timeout=_GATHER_S)()
        except queue.Empty:
            return

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
