"""An engine whose sampling happens in servers: requests spread over them, repeated where a server dies, weights changed in two phases.

Owns the protocol of `rollout.engine` for servers of any kind: which requests wait and which run, that each is answered once, and that all
servers are wholly on the old or wholly on the new weights. What is said to a server is its `Dialect`, whether it lives `remote.lives`,
what a folder of weights holds `editions.WeightWriter`. Everything runs on one event loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from burnish import faults
from burnish.observe.trace import span
from burnish.rollout.draft import DecodeText, Draft
from burnish.rollout.engine import EngineClosed, EngineStats
from burnish.rollout.remote.dialect import Dialect, WrongWeights
from burnish.rollout.remote.editions import PUSHED, START, Edition, WeightWriter
from burnish.rollout.remote.hosts import Host, Pool, State
from burnish.rollout.remote.http import Busy, Refused, ServerGone, check_installed
from burnish.rollout.remote.lives import LifeLimits, Lives, ServerFailed
from burnish.rollout.remote.loop import LoopThread
from burnish.types import Completion, Request, SamplingParams, StopReason

T = TypeVar("T")

MAX_BUSY = 8
"""How often a server may say that it has no room before that counts as its failure; the wait doubles from 50 ms."""
MAX_ERRORS = 2
"""How often a request that a living server fails at is asked again."""
_FIRST_WAIT_S = 0.05


@dataclass(slots=True, eq=False)
class _Call:
    """One request and where it stands. seat: the host that it got. cancelled: resolved by `cancel`."""

    draft: Draft
    cancelled: asyncio.Future[None]
    seat: asyncio.Future[Host] | None = None
    runs: bool = False


@dataclass(slots=True, eq=False)
class _Update:
    version: int
    leaves: dict[str, Any] = field(default_factory=dict)
    commits: bool = False


@dataclass(frozen=True, slots=True)
class Connections:
    """Where servers are: `urls` that are there, or how many to `launch`. token: sent with every request. slots: requests that one server
    may run at one time. logs: folder of what launched servers say."""

    urls: Sequence[str] = ()
    launch: int = 0
    token: str | None = None
    slots: int = 64
    logs: Path = Path()


class RemoteEngine:
    """See `rollout.engine.Engine` for the protocol.

    writer: of the weights that are pushed. folder: where it writes, as the servers see it too; None makes a temporary one. context: the
    most tokens of prompt and completion together. decode_text: ids → text, for stop strings. start: the folder of the weights that the
    servers begin with.
    """

    def __init__(
        self,
        dialect: Dialect,
        connections: Connections,
        *,
        writer: WeightWriter,
        decode_text: DecodeText,
        context: int,
        start: Path,
        folder: Path | None = None,
        limits: LifeLimits = LifeLimits(),
        version: int = 0,
    ) -> None:
        check_installed()
        self._dialect, self._writer, self._decode_text, self._context = dialect, writer, decode_text, context
        self._temporary = Path(tempfile.mkdtemp(prefix="burnish-weights-")) if folder is None else None
        self._folder = self._temporary or folder or Path()
        self._edition = Edition(version, START, writer.kind, start if writer.kind == "model" else None)
        self._mark = secrets.token_hex(3)  # a server that an earlier run has left knows its names
        self._num_pushed = self._num_tokens = 0
        self._calls: list[_Call] = []
        self._queue: deque[_Call] = deque()
        self._update: _Update | None = None
        self._settled = asyncio.Event()
        self._loop = LoopThread(f"{dialect.name}-engine")
        self._loop.wait_for(self._begin(connections, limits))

    async def _begin(self, connections: Connections, limits: LifeLimits) -> None:
        self._ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        urls = [*connections.urls, *[None] * connections.launch]
        self._pool = Pool([Host(index, url) for index, url in enumerate(urls)], slots=connections.slots)
        self._slots = connections.slots * len(urls)
        self._lives = Lives(
            self._dialect,
            limits,
            token=connections.token,
            connections=connections.slots + 8,
            logs=connections.logs,
            give_weights=self._give_current,
            came_up=self._changed,
            give_up=self._end,
        )
        for host in self._pool.hosts:
            self._lives.begin(host, launched=host.url is None)

    # ---------------------------------------------------------------------------------------------------------- the protocol

    @property
    def version(self) -> int:
        return self._edition.version

    @property
    def mesh(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        self._dialect.check(request.params)
        draft = Draft.begin(request, context=self._context)
        return await self._loop.run(self._generate(draft))

    async def cancel(self, request: Request) -> None:
        """End this request; what was streamed of it (a request with stop strings) is its completion, else that is empty."""

        async def action() -> None:
            for call in self._calls:
                if call.draft.request is request and not call.cancelled.done():
                    call.cancelled.set_result(None)

        await self._loop.run(action())

    async def begin_update(self, version: int) -> None:
        async def action() -> None:
            self._refuse_when_ended()
            if self._update is not None:
                raise RuntimeError(f"the update to version {self._update.version} is still open; commit or abort it before {version}")
            self._update = _Update(version)

        await self._loop.run(action())

    async def push(self, name: str, array: Any) -> None:
        """Hand in one leaf; leaves that aren't pushed keep their value. A bad one ends the update: the old weights stay as a whole."""

        async def action() -> None:
            update = self._opened("push")
            try:
                faults.point("engine.push", leaf=name, version=update.version)
                self._writer.check(name, array)
            except Exception:
                self._close_update()
                raise
            update.leaves[name] = array

        await self._loop.run(action())

    async def commit_update(self, checksum: int | None = None) -> None:
        """Wait until the running requests have finished, write the weights down, give them to every server, use them.

        What fails before the servers change leaves the old weights in use, and what fails then brings them back.
        """

        async def action() -> None:
            update = self._opened("commit")
            if not update.leaves:
                raise RuntimeError(f"nothing was pushed for version {update.version}; push the changed leaves, or abort the update")
            update.commits = True
            try:
                await self._unless_ended(self._commit(update, checksum))
            finally:
                self._close_update()

        await self._loop.run(action())

    async def abort_update(self) -> None:
        async def action() -> None:
            if self._update is not None and not self._update.commits:
                self._close_update()

        await self._loop.run(action())

    def stats(self) -> EngineStats:
        running = sum(call.runs for call in self._calls)
        return EngineStats(self._slots, running, len(self._calls) - running, 0, self._num_tokens)

    async def close(self) -> None:
        """Callers that wait get `EngineClosed`; servers that were started here end. Closing twice is fine."""

        async def last() -> None:
            self._end(EngineClosed("the engine was closed"))
            await self._lives.close(self._pool.hosts)
            self._writer.close()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

        await self._loop.close(last())

    # ---------------------------------------------------------------------------------------------------------- one request

    async def _generate(self, draft: Draft) -> Completion:
        self._refuse_when_ended()
        call = _Call(draft, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        try:
            if not await self._unless_ended(self._answer(call), call.cancelled):
                call.draft.stop = StopReason.CANCELLED
        finally:
            self._calls.remove(call)
            self._changed()
        self._num_tokens += len(call.draft.ids)
        out = call.draft.completion()
        return out if self._dialect.keeps(draft.request.params) else replace(out, support="full", kept_ids=None)

    async def _answer(self, call: _Call) -> bool:
        """Fill the draft, on one host after another until one has answered. Every attempt begins with an empty draft, and the one before
        is over: its connection is closed, by which a server ends a request."""
        num_busy = num_errors = 0
        while True:
            host = await self._seat(call)
            try:
                await self._attempt(call, host)
                return True
            except Busy as error:
                num_busy += 1
                if num_busy > MAX_BUSY:
                    self._lives.lose(host, str(error))
            except ServerGone as error:
                num_errors += error.status is not None
                if error.status is None or not await self._lives.is_healthy(host):
                    self._lives.lose(host, str(error))
                elif num_errors > MAX_ERRORS:
                    raise RuntimeError(f"a server that is healthy fails at one request {num_errors} times: {error}") from error
            except WrongWeights as error:
                self._lives.lose(host, str(error))
            except Refused as error:
                raise ValueError(f"the {self._dialect.name} server {host.name} refuses a request: {error}") from error
            finally:
                call.runs = False
                host.running -= 1
                self._changed()
            call.draft = Draft.begin(call.draft.request, context=self._context)
            if num_busy:
                await asyncio.sleep(_FIRST_WAIT_S * 2 ** min(num_busy - 1, MAX_BUSY))

    async def _seat(self, call: _Call) -> Host:
        """Wait for a place on a host; it is taken when this returns."""
        call.seat = asyncio.get_running_loop().create_future()
        self._queue.append(call)
        self._changed()
        try:
            return await call.seat
        except asyncio.CancelledError:
            if call.seat.done() and not call.seat.cancelled():  # it got one at the very moment
                call.seat.result().running -= 1
            elif call in self._queue:
                self._queue.remove(call)
            call.runs = False
            raise

    async def _attempt(self, call: _Call, host: Host) -> None:
        """Ask the host, for as long as it lives."""
        faults.point("engine.request", host=host.index)
        with span("engine.request", host=host.index, version=self.version):
            sampling = asyncio.create_task(self._sample(host, call.draft))
            try:
                await asyncio.wait({sampling, host.lost}, return_when=asyncio.FIRST_COMPLETED)
                if not sampling.done():
                    raise ServerGone(f"{host.name} was lost while it sampled")
                return sampling.result()
            finally:
                await _ended(sampling)

    async def _sample(self, host: Host, draft: Draft) -> None:
        await self._dialect.sample(host.connection(), draft, self._edition)
        _fit_length(draft)

    def _changed(self) -> None:
        """A place may be free, a host up, an update over: seat who waits, first come first served; wake who waits for that."""
        while self._queue and self._update is None:
            call = self._queue[0]
            if call.seat is None or call.seat.done():  # its caller left
                self._queue.popleft()
                continue
            host = self._pool.choose(call.draft.request)
            if host is None:
                break
            self._queue.popleft()
            host.running += 1
            call.runs = True
            call.seat.set_result(host)
        self._settled.set()

    # ---------------------------------------------------------------------------------------------------------- weights

    async def _commit(self, update: _Update, checksum: int | None) -> bool:
        await self._until(lambda: not any(call.runs for call in self._calls))
        faults.point("engine.commit", version=update.version)
        old = self._edition
        self._num_pushed += 1
        name = f"{PUSHED}{update.version}-{self._num_pushed}-{self._mark}"
        new = Edition(update.version, name, self._writer.kind, self._folder / name)
        last = old.folder if self._num_pushed > 1 or old.kind == "model" else None
        try:
            with span("engine.write_weights", version=update.version):
                await asyncio.to_thread(self._write, new, update, last, checksum)
            with span("engine.load_weights", version=update.version):
                await self._everywhere(new, use=False)
                await self._switch(old, new)
        except BaseException:
            await asyncio.gather(*(self._retire(host, new) for host in self._pool.hosts))
            await asyncio.to_thread(self._writer.remove, self._folder / name)
            raise
        self._edition = new
        await asyncio.gather(*(self._retire(host, old) for host in self._pool.hosts))
        if old.name != START and old.folder is not None:
            await asyncio.to_thread(self._writer.remove, old.folder)
        return True

    def _write(self, new: Edition, update: _Update, last: Path | None, checksum: int | None) -> None:
        assert new.folder is not None
        self._writer.remove(new.folder)  # what an earlier run has left there
        self._writer.write(new.folder, update.leaves, last=last, checksum=checksum)

    async def _switch(self, old: Edition, new: Edition) -> None:
        """All servers on the new weights; where one fails for good, all on the old ones again."""
        try:
            await self._everywhere(new, use=True)
        except Exception:
            for host in self._pool.hosts:
                if host.state is State.UP:
                    try:
                        await self._load(host, old, use=True)
                    except (ServerGone, Busy, Refused, WrongWeights) as error:
                        self._lives.lose(host, f"it couldn't go back to version {old.version}: {error}")
            raise

    async def _everywhere(self, edition: Edition, *, use: bool) -> None:
        """Make an edition ready on every server, and `use` it there; together. Raises the first failure, when all are done."""
        results = await asyncio.gather(*(self._there(host, edition, use=use) for host in self._pool.hosts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _there(self, host: Host, edition: Edition, *, use: bool) -> None:
        """On one server. If it is lost in the middle it is brought back, with the old weights, and asked again."""
        while True:
            await self._until(lambda: host.state is State.UP)
            try:
                return await self._load(host, edition, use=use)
            except (ServerGone, Busy, WrongWeights) as error:
                self._lives.lose(host, str(error))
            except Refused as error:
                raise RuntimeError(
                    f"the {self._dialect.name} server {host.name} doesn't take version {edition.version}, version {self.version} stays: "
                    f"{error}"
                ) from error

    async def _load(self, host: Host, edition: Edition, *, use: bool) -> None:
        """Each step may be repeated. What can be sampled from before it is used, is tried."""
        if edition.name != START:
            await self._dialect.prepare(host.connection(), edition)
        if use:
            await self._dialect.activate(host.connection(), edition)
        if use == (edition.kind == "model"):
            trial = Draft.begin(Request((0,), SamplingParams(1, temperature=0.0)), context=self._context)
            await self._dialect.sample(host.connection(), trial, edition)
            if not bool(np.isfinite(trial.logps).all()):
                raise RuntimeError(f"version {edition.version} gives the log-probs {trial.logps} on {host.name}: the old weights stay")

    async def _retire(self, host: Host, edition: Edition) -> None:
        if host.state is State.UP:
            try:
                await self._dialect.retire(host.connection(), edition)
            except (ServerGone, Busy, Refused) as error:
                self._lives.lose(host, f"it couldn't free version {edition.version}: {error}")

    async def _give_current(self, host: Host) -> None:
        """The weights that requests are answered with, to a server that has just started or come back."""
        await self._load(host, self._edition, use=True)

    def _opened(self, verb: str) -> _Update:
        self._refuse_when_ended()
        if self._update is None:
            raise RuntimeError(f"there is no update to {verb}: begin_update wasn't called, or a bad push or an abort ended the update")
        return self._update

    def _close_update(self) -> None:
        self._update = None
        self._changed()

    # ---------------------------------------------------------------------------------------------------------- the end

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for something that `_changed` tells of."""
        while not ready():
            self._settled.clear()
            await self._settled.wait()

    async def _unless_ended(self, work: Coroutine[Any, Any, T], cancelled: asyncio.Future[None] | None = None) -> T | None:
        """The work's result, None where it was cancelled; raises how the engine ended, should that come first."""
        task = asyncio.create_task(work)
        others = [self._ended] if cancelled is None else [self._ended, cancelled]
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            await _ended(task)
        self._refuse_when_ended()
        return None

    def _end(self, reason: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def _refuse_when_ended(self) -> None:
        if self._ended.done():
            reason = self._ended.result()
            raise EngineClosed(str(reason)) if isinstance(reason, EngineClosed) else ServerFailed(str(reason)) from reason


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel it, unless it is done, and wait until it is."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def _fit_length(draft: Draft) -> None:
    """A server whose own context is smaller may have stopped early."""
    if draft.stop is None:
        draft.stop = StopReason.CONTEXT


__all__ = ["Connections", "RemoteEngine"]
