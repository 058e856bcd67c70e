"""Worker processes: where synchronous environments, tools and reward functions run, so that one that hangs can be killed.

Owns spawning, killing (with everything that was started inside), reuse and the bound on how many there are. Knows nothing of what runs in
them. A worker never has jax, hears nothing of signals and dies with this process. Called by `calls.py`; the learner opens and closes pools.

What runs in a worker is sent there by name: a function or class of a module, with arguments that pickle. Code of a notebook or of
`__main__`, closures and lambdas can't be, and run on threads of this process, which can't be killed.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import io
import itertools
import pickle
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from burnish.agentic.processes import Zygote, kill_tree
from burnish.agentic.slots import Slots
from burnish.config.errors import WorkersKeepDying

START_S = 120.0
"""Longest start of a worker, and longest import of what is sent to it."""
_KILL_ROUNDS = 20
_CLOSE_S = 5.0


class Unsendable(Exception):
    """Why something can't run in a worker."""


class WorkerDied(Exception):
    """The process ended while it was asked something."""


Fault: TypeAlias = tuple[str, Mapping[str, Any]]
"""A fault point to be passed before a call, where the call runs, and the ids of that call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """kind: "ok", "raised" (value: a line and a traceback) or "unloadable" (value: why)."""

    kind: str
    value: Any


class _Pickler(pickle.Pickler):
    """Refuses what only this process knows."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            raise Unsendable(f"{obj.__qualname__} is defined in a notebook or in the program itself; put it into a module")
        return NotImplemented


def dumps(thing: Any) -> bytes:
    """`thing` by reference and value; `Unsendable` where a worker couldn't make it again."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    except Unsendable:
        raise
    except Exception as error:
        raise Unsendable(f"{error}; only functions and classes of a module, with arguments that pickle, can be sent") from error
    return buffer.getvalue()


class Worker(abc.ABC):
    """Something that runs what it is sent and can be killed. One question at a time, from any event loop."""

    ended = False
    spent = False
    """Not to be used again: killed, dead, or grown too large."""

    async def load(self, blob: bytes) -> Answer:
        """Put what `dumps` made in place of the object that is held."""
        try:
            return await asyncio.wait_for(self.ask("load", blob), START_S)
        except TimeoutError:
            self.kill()
            raise WorkerDied(f"a worker process hadn't imported what it should run after {START_S:g} s") from None

    async def run(self, method: str, *arguments: Any, attributes: Mapping[str, Any] | None = None, fault: Fault | None = None) -> Answer:
        """Call a method of the object that is held, after setting some of its attributes."""
        return await self.ask("run", dumps((method, arguments, dict(attributes or {}), fault)))

    async def abandon(self, method: str) -> Answer:
        """Call a method although another one hangs. The worker is spent."""
        self.spent = True
        return await self.ask("abandon", dumps((method, (), {}, None)))

    @abc.abstractmethod
    async def ask(self, verb: str, blob: bytes) -> Answer:
        """What the process answers. Raises WorkerDied."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End the process and everything that it started, now. Safe at any time, from any thread."""

    @abc.abstractmethod
    def join(self, timeout_s: float) -> None:
        """Wait until the process is gone."""


class ProcessWorker(Worker):
    """A process of this machine, and the thread that starts, hears and reaps it."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: list[bytes] = []  # until the process is there
        self._connection: Connection | None = None
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, name="worker", daemon=True)
        self._thread.start()

    async def ask(self, verb: str, blob: bytes) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.ended:
                raise WorkerDied("the worker process had ended")
            number = next(self._numbers)
            self._waiting[number] = future
            self._send(pickle.dumps((number, verb, blob)))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def _send(self, question: bytes) -> None:
        """The process reads at once whatever it does, unless it is dead."""
        if self._connection is None:
            self._unsent.append(question)
            return
        with contextlib.suppress(OSError):  # it is dead: its thread tells whoever waits
            self._connection.send_bytes(question)

    def kill(self) -> None:
        self.spent = True
        with self._lock:
            if self._pid is not None and not self.ended:
                kill_tree(self._pid)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------- the worker's own thread

    def _live(self) -> None:
        """From start to end; the process dies with this thread, if it didn't before."""
        reason = "it couldn't be started"
        try:
            with self._lock:
                self._connection, self._pid = self._zygote.fork()
                for question in self._unsent:
                    self._send(question)
                if self.spent:
                    kill_tree(self._pid)
            self._hear(self._connection)
        except OSError as error:
            reason = str(error)
        with self._lock:
            self.spent = self.ended = True
            if self._pid is not None:
                kill_tree(self._pid)
                reason = _ending(self._zygote.reap(self._pid))
            if self._connection is not None:
                self._connection.close()
            waiting = list(self._waiting.values())
        for future in waiting:
            _settle(future, lambda f: f.set_exception(WorkerDied(f"its worker process ended: {reason}")))

    def _hear(self, connection: Connection) -> None:
        """Pass on answers until there will be none any more."""
        while True:
            try:
                number, kind, value, spent = connection.recv()
            except EOFError:
                return
            self.spent = self.spent or spent
            future = self._waiting.get(number)
            if future is not None:
                _settle(future, lambda f, answer=Answer(kind, value): f.set_result(answer))


class WorkerPool:
    """At most `size` workers at one time, started when they are needed and kept until `close`.

    zygote: shared with other pools, and closed by whoever made it; None makes one for this pool. elsewhere: what starts a worker on another
    machine, in place of processes of this one. killed, died: how many were killed for
    hanging, and ended by themselves. max_deaths: of the latter; when there are more, whoever asks for a worker gets `WorkersKeepDying`.
    """

    def __init__(
        self,
        size: int,
        *,
        zygote: Zygote | None = None,
        elsewhere: Callable[[], Worker] | None = None,
        max_deaths: int | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, got {size}")
        self._slots = Slots(size)
        self._zygote, self._shared = zygote or Zygote(), zygote is not None
        self._start = elsewhere or partial(ProcessWorker, self._zygote)
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._given = threading.Condition(self._lock)
        self._closed = False
        self._max_deaths = max_deaths
        self.killed = self.died = 0

    async def take(self) -> Worker:
        """A worker for the caller alone, until it gives it back."""
        await self._slots.acquire()
        with self._lock:
            if self._closed:
                self._slots.release()
                raise WorkerDied("the workers were closed")
            if self._max_deaths is not None and self.died > self._max_deaths:
                self._slots.release()
                raise WorkersKeepDying(
                    f"{self.died} worker processes have died by themselves, more than environment.limits.max_worker_deaths "
                    f"({self._max_deaths}): see what kills them (memory? a crash in a library?), or allow more"
                )
            while self._idle:
                worker = self._idle.pop()
                if not worker.spent:
                    return worker
                self._drop(worker)
            worker = self._start()
            self._workers.add(worker)
            return worker

    def give(self, worker: Worker, *, hung: bool = False) -> None:
        """Take a worker back; one that hangs is killed."""
        with self._lock:
            self.killed += hung
            self.died += worker.ended and not hung
            if hung or worker.spent:
                self._drop(worker)
            else:
                self._idle.append(worker)
            self._given.notify_all()
        self._slots.release()

    def _drop(self, worker: Worker) -> None:
        worker.kill()
        self._workers.discard(worker)

    def close(self) -> None:
        """End every worker, those in use once they are given back or after a few seconds. Whoever waits for one gets `WorkerDied`."""
        with self._lock:
            self._closed = True
            self._given.wait_for(lambda: len(self._idle) == len(self._workers), _CLOSE_S)
            workers, self._idle = list(self._workers), []
            self._workers.clear()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_CLOSE_S)
        if not self._shared:
            self._zygote.close()


def _settle(future: asyncio.Future[Answer], settle: Callable[[asyncio.Future[Answer]], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
        future.get_loop().call_soon_threadsafe(lambda: future.done() or settle(future))


def _ending(code: int | None) -> str:
    if code is None:
        return "with all others"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


__all__ = ["START_S", "Answer", "Fault", "ProcessWorker", "Unsendable", "Worker", "WorkerDied", "WorkerPool", "dumps"]
