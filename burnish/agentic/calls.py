"""Calling an environment's methods: a coroutine on the event loop, anything else on a thread of the episode's own.

Owns that thread, the time limit, and telling the environment's failures apart from everybody else's. One episode holds one `EnvCalls`.
A pool would not do: one hung thread takes its place for good, and the process waits for it at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish import faults


class EnvError(Exception):
    """What an environment did wrong: an exception, `SystemExit` included, with the place where it was raised if it was."""

    def __init__(self, cause: BaseException) -> None:
        frames = traceback.extract_tb(cause.__traceback__)
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        super().__init__(f"{type(cause).__name__}: {cause}{place}")


class EnvTimeout(Exception):
    """A call didn't end within its limit."""


class EnvCalls:
    """Calls of one environment, one after the other, each within `timeout_s`.

    All plain functions run on the same thread, as what an environment opens (a database, a browser) may ask for. A call that is
    given up can't be killed: its thread is left behind, and later calls get another.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: queue.SimpleQueue[Callable[[], None] | None] | None = None

    async def __call__(self, point: str, fn: Callable[..., Any], *args: Any) -> Any:
        """What `fn` returns; raises `EnvError` or `EnvTimeout`. point: the name of the fault point that it passes."""
        work = _awaited(point, fn, args) if inspect.iscoroutinefunction(fn) else self._on_thread(point, fn, args)
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            self.end()
            raise EnvTimeout(f"{fn.__qualname__} took longer than {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.end()
            raise

    def end(self) -> None:
        """Let the thread go, once it returns from what it does."""
        if self._thread is not None:
            self._thread.put(None)
            self._thread = None

    def _on_thread(self, point: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                faults.point(point)
                settle = functools.partial(done.set_result, fn(*args))
            except BaseException as error:
                settle = functools.partial(done.set_exception, EnvError(error))
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(lambda: done.done() or settle())

        if self._thread is None:
            self._thread = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._thread,), name=f"env {fn.__qualname__}", daemon=True).start()
        self._thread.put(work)
        return done


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


async def _awaited(point: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        faults.point(point)
        return await fn(*args)
    except (Exception, SystemExit) as error:
        raise EnvError(error) from error
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise EnvError(error) from error  # something that it awaited was cancelled, not the episode
