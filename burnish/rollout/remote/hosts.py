"""The servers of one engine: whether each lives, what it runs, and which of them gets the next request.

Owns a host's state and the choice. Starting, restarting and giving up are `remote.lives`.
"""

from __future__ import annotations

import asyncio
import enum
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.rollout.remote.http import Http
from burnish.rollout.remote.process import ServerProcess
from burnish.types import Request

MAX_HOMES = 8192
"""Episodes of which it is remembered where they were last."""


class State(enum.Enum):
    STARTING = "starting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Host:
    """One server. url: None of one that isn't started yet. lost: resolved when it goes down, so that nobody waits for its answers."""

    index: int
    url: str | None
    state: State = State.STARTING
    http: Http | None = None
    process: ServerProcess | None = None
    running: int = 0
    deaths: int = 0
    lost: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    life: asyncio.Task[None] | None = None
    """Starting or coming back."""

    @property
    def name(self) -> str:
        return self.url or f"server {self.index}"

    def connection(self) -> Http:
        assert self.http is not None, f"{self.name} is {self.state.value} and has no connection"
        return self.http


class Pool:
    """Chooses among hosts that are up and have a free slot.

    Turns of one episode, and samples of one group, go where their prefix is cached already, unless that host has much more to do than the
    idlest: `slack` requests more. slots: requests that a host may run at one time.
    """

    def __init__(self, hosts: Sequence[Host], *, slots: int) -> None:
        self.hosts = tuple(hosts)
        self._slots, self._slack = slots, max(1, slots // 8)
        self._homes: OrderedDict[tuple[object, ...], Host] = OrderedDict()

    def choose(self, request: Request) -> Host | None:
        """The host for this request; None where none has room, and until every server has started: the first to be up gets no crowd."""
        if any(host.state is State.STARTING for host in self.hosts):
            return None
        free = [host for host in self.hosts if host.state is State.UP and host.running < self._slots]
        if not free:
            return None
        # Of equally busy ones by the request's identity, so that a run's requests go the same way each time.
        turn = zlib.crc32(repr(request.seed_path).encode())
        idlest = min(free, key=lambda host: (host.running, (host.index + turn) % len(self.hosts)))
        keys = affinities(request)
        homes = (self._homes.get(key) for key in keys)
        home = next((host for host in homes if host in free and host.running <= idlest.running + self._slack), idlest)
        for key in keys:
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return home


def affinities(request: Request) -> list[tuple[object, ...]]:
    """With whom this request shares a prefix, the longest first: its session or episode, then its group."""
    if request.session is not None:
        return [("session", request.session)]
    return [("episode", *request.seed_path[:-1]), ("group", *request.seed_path[:-2])] if len(request.seed_path) > 2 else []


__all__ = ["MAX_HOMES", "Host", "Pool", "State", "affinities"]
