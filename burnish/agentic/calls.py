"""Calling code that isn't ours (environments, tools, reward functions): within a time limit, its failures told apart from everybody else's.

Owns where a call runs. A coroutine runs on the event loop and is cancelled. Anything else runs in a worker process that can be killed
(`workers.py`), or, where it can't be sent to one, on a thread: one that hangs there is left behind and counted, since a thread can't be
killed (and a pool of them would lose a place for good). One episode holds one `EnvCalls`; tools and rewards share a `Calls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import queue
import threading
import time
import types
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from burnish import faults
from burnish.agentic.worker_process import describe
from burnish.agentic.workers import Answer, Fault, Unsendable, Worker, WorkerDied, WorkerPool, dumps
from burnish.config.errors import CallError, CallLost, CallTimeout
from burnish.observe.trace import span

log = logging.getLogger(__name__)

_CLOSE_S = 1.0
"""How long an environment whose step hangs gets to close, before it is killed."""
_METHODS = ("_initial_observation", "_step_impl")


# ----------------------------------------------------------------------------------------------------------------- one call at a time


class Calls:
    """Calls of functions that have nothing to do with each other. pool: None runs plain functions on threads."""

    def __init__(self, pool: WorkerPool | None) -> None:
        self._pool = pool
        self._warned: dict[str, str] = {}

    def check(self, fn: Callable[..., Any], name: str) -> None:
        """Warn where a plain function can't run in a worker; to be called before a run begins."""
        if self._pool is not None and not _is_async(fn):
            self._sent(fn, name)

    async def __call__(
        self, fn: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float | None, name: str, fault: Fault | None = None
    ) -> Any:
        """What `fn(**arguments)` returns; raises `CallError` or `CallTimeout`. A call without a limit stays in this process.

        name: what it is called in errors. fault: the fault point that it passes, with its ids.
        """
        call = functools.partial(fn, **arguments)
        try:
            if _is_async(fn):
                return await asyncio.wait_for(_awaited(lambda: _past(fault, call)), timeout_s)
            blob = None if timeout_s is None or self._pool is None else self._sent(call, name)
            if blob is not None and (worker := await self.loaded(blob, name)) is not None:
                return await self._in_worker(worker, timeout_s, fault)
            return await _on_thread(lambda: _past(fault, call), timeout_s)
        except TimeoutError:
            raise CallTimeout(f"{name} took longer than {timeout_s:g} s") from None

    def check_environment(self, env_class: Callable[..., Any]) -> None:
        """The same for an environment's class."""
        if isinstance(env_class, type) and _is_plain(env_class):
            self.sent(env_class, f"environment {env_class.__qualname__}")

    def killable(self, fn: Callable[..., Any], name: str) -> bool:
        """Whether a call that is given up leaves nothing behind."""
        return _is_async(fn) or (self._pool is not None and self._sent(fn, name) is not None)

    def sent(self, env: Any, name: str) -> bytes | None:
        """An object for a worker; None, with a warning the first time, where it can't be sent to one."""
        if self._pool is None or name in self._warned:
            return None
        try:
            return dumps(env)
        except Unsendable as error:
            return self._warn(name, str(error))

    def _sent(self, call: Callable[..., Any], name: str) -> bytes | None:
        if not isinstance(_unwrapped(call), types.FunctionType | types.BuiltinFunctionType):
            return self._warn(name, "only a function of a module can be sent to a worker process, and this is an object or a method")
        return self.sent(call, name)

    async def loaded(self, blob: bytes, name: str) -> Worker | None:
        """A worker that holds the object; None, with a warning, where its code can't be imported in one."""
        assert self._pool is not None
        try:
            worker = await self._pool.take()
        except WorkerDied as error:
            raise CallLost(str(error)) from None
        try:
            answer = await worker.load(blob)
        except WorkerDied as error:
            self._pool.give(worker)
            raise CallLost(str(error)) from None
        except BaseException:
            self._pool.give(worker, hung=True)
            raise
        if answer.kind == "ok":
            return worker
        self._pool.give(worker)
        return self._warn(name, f"a worker process can't import it: {answer.value}")

    def give(self, worker: Worker, *, hung: bool = False) -> None:
        """Take a worker back from whoever got it by `loaded`."""
        assert self._pool is not None
        self._pool.give(worker, hung=hung)

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._warned:
            self._warned[name] = reason
            log.warning("%s runs on threads of this process, which can't be killed if it hangs: %s", name, reason)

    async def _in_worker(self, worker: Worker, timeout_s: float | None, fault: Fault | None) -> Any:
        hung = True
        try:
            answer = await asyncio.wait_for(worker.run("__call__", fault=fault), timeout_s)
            hung = False
            return _value(answer)
        except WorkerDied as error:
            hung = False
            raise CallLost(str(error)) from None
        except Unsendable as error:
            hung = False
            raise CallError(str(error)) from None
        finally:
            self.give(worker, hung=hung)


# ------------------------------------------------------------------------------------------------------------------- one environment


class EnvCalls:
    """Calls of one environment, one after the other, each within `timeout_s`. ids: of its fault points.

    An environment whose methods are all plain lives in a worker, from its reset to its close. Where it can't (see `workers.py`), all plain
    methods run on the same thread, as what an environment opens (a database, a browser) may ask for.
    """

    def __init__(self, env: Any, calls: Calls, *, timeout_s: float | None, ids: Mapping[str, int]) -> None:
        self._env, self._calls, self._timeout_s, self._ids = env, calls, timeout_s, dict(ids)
        self._worker: Worker | None = None
        self._thread: _Thread | None = None
        self._hung = False
        self.seconds = 0.0

    async def open(self) -> None:
        """Find out where the environment lives; importing its code there has a limit of its own."""
        if not _is_plain(type(self._env)):
            return
        name = f"environment {type(self._env).__qualname__}"
        blob = self._calls.sent(self._env, name)
        if blob is not None:
            self._worker = await self._calls.loaded(blob, name)

    async def __call__(self, point: str, method: str, *args: Any) -> Any:
        """What the method returns; raises `CallError` or `CallTimeout`. point: the fault point that it passes."""
        fn, fault, start = getattr(self._env, method), (point, self._ids), time.monotonic()
        try:
            with span(point, turn=self._env.num_steps):
                return await asyncio.wait_for(self._called(fn, method, args, fault), self._timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._hung = True
            if self._thread is not None:
                self._thread.leave()
                self._thread = None
            if isinstance(error, TimeoutError):
                raise CallTimeout(f"{fn.__qualname__} took longer than {self._timeout_s:g} s") from None
            raise
        finally:
            self.seconds += time.monotonic() - start

    async def _called(self, fn: Callable[..., Any], method: str, args: tuple[Any, ...], fault: Fault) -> Any:
        if inspect.iscoroutinefunction(fn):
            return await _awaited(lambda: _past(fault, lambda: fn(*args)))
        if self._worker is None:
            self._thread = self._thread or _Thread(f"env {fn.__qualname__}")
            return await self._thread.run(lambda: _past(fault, lambda: fn(*args)))
        try:
            if self._hung:  # another method still runs: this is the last one, from beside it
                return _value(await asyncio.wait_for(self._worker.abandon(method), _CLOSE_S))
            return _value(await self._worker.run(method, *args, attributes={"num_steps": self._env.num_steps}, fault=fault))
        except WorkerDied as error:
            raise CallLost(str(error)) from None
        except Unsendable as error:
            raise CallError(str(error)) from None

    def end(self) -> None:
        """Let the thread go once it returns from what it does; give the worker back, or have it killed."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
        if self._worker is not None:
            self._calls.give(self._worker, hung=self._hung)
            self._worker = None


# ---------------------------------------------------------------------------------------------------------------------------- threads

_left: set[_Thread] = set()


def leaked_threads() -> int:
    """How many threads hang in calls that were given up."""
    _left.difference_update([thread for thread in list(_left) if not thread.busy])
    return len(_left)


class _Thread:
    """A thread that runs one function after another."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def run(self, fn: Callable[[], Any]) -> asyncio.Future[Any]:
        """What `fn` returns; its exceptions as `CallError`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                settle = functools.partial(done.set_result, fn())
            except BaseException as error:
                settle = functools.partial(done.set_exception, CallError(*describe(error)))
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(lambda: done.done() or settle())

        self._calls.put(work)
        return done

    def end(self) -> None:
        """Let it go, once it returns from what it does."""
        self._calls.put(None)

    def leave(self) -> None:
        """Let it go although it may hang."""
        self.end()
        _left.add(self)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def _on_thread(fn: Callable[[], Any], timeout_s: float | None) -> Any:
    """A thread of its own for one call."""
    thread = _Thread("call")
    try:
        result = await asyncio.wait_for(thread.run(fn), timeout_s)
    except (TimeoutError, asyncio.CancelledError):
        thread.leave()
        raise
    except CallError:
        thread.end()
        raise
    thread.end()
    return result


# ---------------------------------------------------------------------------------------------------------------------------- helpers


async def _awaited(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What the coroutine returns. Caught in here: a `SystemExit` that left the task would end the loop."""
    try:
        return await call()
    except (CallError, CallTimeout):  # of what it called in turn: told in full already
        raise
    except (Exception, SystemExit) as error:
        raise CallError(*describe(error)) from error
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise CallError(*describe(error)) from error  # something that it awaited was cancelled, not the episode


def _value(answer: Answer) -> Any:
    if answer.kind == "raised":
        raise CallError(*answer.value)
    if answer.kind == "unloadable":
        raise CallError(f"a worker process can't import it: {answer.value}")
    return answer.value


def _past(fault: Fault | None, call: Callable[[], Any]) -> Any:
    """The call, after its fault point."""
    if fault is not None:
        faults.point(fault[0], **fault[1])
    return call()


def _is_async(fn: Callable[..., Any]) -> bool:
    fn = _unwrapped(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _is_plain(env_class: type) -> bool:
    """Whether no method of an environment is a coroutine."""
    return not any(inspect.iscoroutinefunction(getattr(env_class, name)) for name in _METHODS)


def _unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


__all__ = ["Calls", "EnvCalls", "leaked_threads"]
