"""Lives of servers: started, waited for, watched, and restarted within a budget with the weights that they must have.

Owns the deaths. A server of somebody else isn't restarted but waited for, by the same budget. `remote.engine` says which weights are
current and is told when a host is up, and when all is lost. Runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import BurnishError
from burnish.rollout.remote.dialect import Dialect, WrongWeights
from burnish.rollout.remote.hosts import Host, State
from burnish.rollout.remote.http import Busy, Http, Refused, ServerGone
from burnish.rollout.remote.process import ServerProcess, free_port

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0
"""For one look, by default. Generous, as a starved machine isn't a dead server."""
_LOOK_S = 0.25


class ServerFailed(BurnishError):
    """A server is gone for good: it died more often than it may, or didn't come up."""


@dataclass(frozen=True, slots=True)
class LifeLimits:
    """restarts: deaths of one server that are made good. start_timeout_s: until a server answers. health_every_s: between two looks at a
    server; after `health_misses` of them without an answer it counts as dead."""

    restarts: int = 3
    start_timeout_s: float = 600.0
    health_every_s: float = 10.0
    health_misses: int = 3
    health_timeout_s: float = HEALTH_TIMEOUT_S


class Lives:
    """give_weights: makes the current weights a server's. came_up: a host takes requests again. give_up: the engine is at its end."""

    def __init__(
        self,
        dialect: Dialect,
        limits: LifeLimits,
        *,
        token: str | None,
        connections: int,
        logs: Path,
        give_weights: Callable[[Host], Awaitable[None]],
        came_up: Callable[[], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._dialect, self._limits, self._token, self._connections, self._logs = dialect, limits, token, connections, logs
        self._give_weights, self._came_up, self._give_up = give_weights, came_up, give_up
        self._watches: list[asyncio.Task[None]] = []

    def begin(self, host: Host, *, launched: bool) -> None:
        """Start the server, or only wait for it; then watch it."""
        host.life = asyncio.create_task(self._live(host, launched=launched))
        self._watches.append(asyncio.create_task(self._watch(host)))

    def lose(self, host: Host, why: str) -> None:
        """A host that was up isn't: whoever waits for its answers asks elsewhere, and it is brought back."""
        if host.state is not State.UP:
            return
        host.state = State.DOWN
        host.lost.set_result(None)
        ending = host.process.ending_within(0.3) if host.process is not None else None
        reason = f"the server {ending}" if ending is not None else why
        host.deaths += 1
        if host.deaths > self._limits.restarts:
            self._give_up(self._failure(host, f"failed {host.deaths} times and may be brought back {self._limits.restarts} times", reason))
            return
        log.warning("%s %s is lost (%d of %d): %s", self._dialect.name, host.name, host.deaths, self._limits.restarts, reason)
        host.life = asyncio.create_task(self._live(host, launched=host.process is not None))

    async def _live(self, host: Host, *, launched: bool) -> None:
        """Until the host is up with the current weights, or given up."""
        try:
            while True:
                try:
                    await self._connect(host, launched=launched)
                    await self._give_weights(host)
                    break
                except (ServerGone, Busy, WrongWeights) as error:
                    if host.process is not None and host.process.ending is not None and host.deaths == 0:
                        raise self._failure(host, "didn't start", str(error)) from error
                    host.deaths += 1
                    if host.deaths > self._limits.restarts:
                        raise self._failure(host, f"failed {host.deaths} times", str(error)) from error
            host.lost = asyncio.get_running_loop().create_future()
            host.state = State.UP
            self._came_up()
        except Exception as error:  # whatever it is, nobody else would see it, and requests would wait for ever
            self._give_up(error if isinstance(error, BurnishError) else self._failure(host, "can't be used", repr(error)))

    async def _connect(self, host: Host, *, launched: bool) -> None:
        if host.http is not None:
            await host.http.close()
        if launched:
            if host.process is not None:
                await asyncio.to_thread(host.process.stop)
            port = free_port()
            host.url = f"http://127.0.0.1:{port}"
            command, environment = self._dialect.command(port, host.index)
            # Not in a thread of the pool: the server dies with the thread that starts it.
            host.process = ServerProcess(command, environment=environment, log=self._logs / f"{self._dialect.name}-{host.index}.log")
            log.info("%s server %d started as process %d, %s", self._dialect.name, host.index, host.process.pid, host.url)
        assert host.url is not None, "a server that isn't started has an address"
        host.http = Http(host.url, token=self._token, connections=self._connections)
        await self._until_healthy(host)

    async def _until_healthy(self, host: Host) -> None:
        deadline = time.monotonic() + self._limits.start_timeout_s
        while True:
            if host.process is not None and (ending := host.process.ending) is not None:
                raise ServerGone(f"the server {ending} before it answered")
            if await self.is_healthy(host):
                return
            if time.monotonic() > deadline:
                raise self._failure(
                    host, f"gave no answer within {self._limits.start_timeout_s:g} s", "is it started, and at this address?"
                )
            await asyncio.sleep(_LOOK_S)

    async def is_healthy(self, host: Host) -> bool:
        """Whether it answers now."""
        try:
            return await self._dialect.is_healthy(host.connection(), timeout_s=self._limits.health_timeout_s)
        except (ServerGone, Busy, Refused):
            return False

    async def _watch(self, host: Host) -> None:
        """Find a server that hangs, or is gone while nobody asks it anything."""
        misses = 0
        while True:
            await asyncio.sleep(self._limits.health_every_s)
            if host.state is not State.UP:
                misses = 0
                continue
            misses = 0 if await self.is_healthy(host) else misses + 1
            gone = host.process is not None and host.process.ending is not None
            if host.state is State.UP and (gone or misses >= self._limits.health_misses):
                self.lose(host, f"it didn't answer {misses} health checks in a row")

    def _failure(self, host: Host, what: str, why: str) -> ServerFailed:
        said = host.process.last_words() if host.process is not None else ""
        where = f"; its log, {host.process.log}, ends with\n{said}" if host.process is not None and said else ""
        return ServerFailed(f"the {self._dialect.name} server {host.name} {what}: {why}{where}")

    async def close(self, hosts: tuple[Host, ...]) -> None:
        """Stop watching, close connections, end what was started."""
        tasks = [*self._watches, *(host.life for host in hosts if host.life is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in hosts:
            if host.http is not None:
                await host.http.close()
        await asyncio.gather(*(asyncio.to_thread(host.process.stop) for host in hosts if host.process is not None))


__all__ = ["LifeLimits", "Lives", "ServerFailed"]
