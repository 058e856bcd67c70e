"""Several processes as one run: joined through jax's coordination service, watching each other, ending together.

Owns `joined`, the start and the end of that, and the watch: a thread in every process that says "I am here", hears the others, and passes
on who has failed and who was asked to stop. What the processes say to each other goes through the service's key-value store, on the host's
network: no collective, so any thread may wait for it, and a wait can be ended. What they agree on is `rl.fleet`'s.

jax's own watch ends a process from C++, without any clean-up, as soon as process 0 is gone, and else after twice
`heartbeat_timeout_s`: then this one, which can say what happened, has not been able to.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed as jax_distributed  # the store has no public name; orbax reaches it in the same way

from burnish.config.errors import BurnishError, UserError
from burnish.config.schema import DistributedConfig
from burnish.rl.fleet import ALONE, Fleet, PeerFailed, PeerLost
from burnish.rl.pathways import start_pathways
from burnish.rollout.engine import wait_for

_ROOT, _STATE = "burnish", "burnish/state/"
_SILENCE, _BEATS, _PAUSE_S = 0.7, 20, 1.0
"""Of `heartbeat_timeout_s`: the part after which a silent process is lost, and how often it speaks in the whole; at most so far apart."""
_FROM_A_PEERS_END = ("Gloo", "NCCL", "UNAVAILABLE", "coordination service")
"""What errors of collectives say whose other side is gone."""


class Processes(Fleet):
    """The processes that have joined. client: of jax's coordination service. limit_s: see `DistributedConfig.heartbeat_timeout_s`."""

    def __init__(self, client: Any, *, index: int, count: int, limit_s: float) -> None:
        self.index, self.count = index, count
        self._client, self._limit_s, self._pause_s = client, limit_s, min(limit_s / _BEATS, _PAUSE_S)
        self._turns: dict[str, int] = {}
        self._verdict: BurnishError | None = None
        self._lost_peer: int | None = None
        self._stopping = False
        self._listener: Callable[[], None] | None = None
        self._last_words: Callable[[int, str], None] = lambda code, cause: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._thread.start()

    async def gather(self, topic: str, value: bytes) -> list[bytes]:
        turn = self._turns[topic] = self._turns.get(topic, -1) + 1
        self._client.key_value_set_bytes(_key(topic, turn, self.index), value)
        found = [value if other == self.index else await self._get(_key(topic, turn, other)) for other in range(self.count)]
        if turn > 0:  # all have answered this turn, so nobody reads the one before any more
            self._client.key_value_delete(_key(topic, turn - 1, self.index))
        return found

    def ask_to_stop(self) -> None:
        self._stopping = True

    def on_stop(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def on_leaving(self, last_words: Callable[[int, str], None]) -> None:
        self._last_words = last_words

    def cause_of(self, error: BaseException) -> BaseException:
        """Of an error that a broken connection makes, waits for what the watch finds."""
        if isinstance(error, PeerFailed | PeerLost):
            return error
        if self._verdict is None and any(word in str(error) for word in _FROM_A_PEERS_END):
            deadline = time.monotonic() + self._limit_s
            while self._verdict is None and time.monotonic() < deadline:
                time.sleep(self._pause_s)
        return error if self._verdict is None else self._verdict

    async def _get(self, key: str) -> bytes:
        pause = 0.001
        while True:
            if self._verdict is not None:
                raise self._verdict
            try:
                return self._client.key_value_try_get_bytes(key)
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" not in str(error):
                    raise self._lost(0, str(error)) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    # ------------------------------------------------------------------------------------------------------------- the watch

    def _watch(self) -> None:
        heard: dict[int, tuple[str, float]] = {i: ("", time.monotonic()) for i in range(self.count) if i != self.index}
        beat, told = 0, False
        while not self._ended.wait(self._pause_s):
            beat += 1
            try:
                self._say("beat", str(beat))
                if self._stopping:
                    self._say("stop", "")
                state = self._state()
            except jax.errors.JaxRuntimeError as error:
                self._verdict = self._verdict or self._lost(0, str(error))
                state = {}
            if not told and self._listener is not None and any(key.startswith("stop/") for key in state):
                told = True
                self._listener()
            for peer, (last, since) in heard.items():
                if (now := state.get(f"beat/{peer}", last)) != last:
                    heard[peer] = now, time.monotonic()
                elif time.monotonic() - since > _SILENCE * self._limit_s:
                    self._lost_peer = peer
                    self._verdict = self._verdict or self._lost(peer, f"no word for {time.monotonic() - since:.1f} s")
                if (cause := state.get(f"failed/{peer}")) is not None:
                    self._verdict = self._verdict or PeerFailed(f"process {peer} of {self.count} has failed, so this one ends: {cause}")
            if self._verdict is not None:
                self._leave_at_once_unless_ended(self._verdict)
                return

    def _leave_at_once_unless_ended(self, verdict: BurnishError) -> None:
        """The threads that wait in `gather` raise the verdict. A main thread that is stuck in a collective can't."""
        if self._ended.wait((1 - _SILENCE) * self._limit_s):
            return
        self._last_words(verdict.exit_code, str(verdict))
        print(f"error: {verdict}", file=sys.stderr, flush=True)
        os._exit(verdict.exit_code)

    def _say(self, what: str, value: str) -> None:
        self._client.key_value_set(f"{_STATE}{what}/{self.index}", value, allow_overwrite=True)

    def _state(self) -> dict[str, str]:
        return {key.removeprefix(_STATE): value for key, value in self._client.key_value_dir_get(_STATE)}

    def _lost(self, peer: int, why: str) -> PeerLost:
        return PeerLost(
            f"process {peer} of {self.count} is gone ({why.splitlines()[0][:200]}), so this one ends; its output may say why. The run "
            "goes on with --resume"
        )

    # --------------------------------------------------------------------------------------------------------------- the end

    def leave(self) -> None:
        """End in order, when all do."""
        wait_for(self.gather("end", b""))
        self._end()
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """End after a failure, and tell the others, unless it is theirs."""
        if not isinstance(error, PeerFailed | PeerLost):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._say("failed", f"{type(error).__name__}: {error} (on {socket.gethostname()})"[:2000])
        self._end()
        if isinstance(error, PeerLost):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._say("left", "")
                self._let_others_leave()
            atexit.register(_leave_without_goodbye, error.exit_code)  # jax's own end waits for the process that is gone
        else:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.distributed.shutdown()

    def _let_others_leave(self) -> None:
        """With the first process the store goes, and jax ends whoever is still there."""
        deadline = time.monotonic() + (1 - _SILENCE) * self._limit_s
        staying = {f"left/{other}" for other in range(self.count) if other != self._lost_peer}
        while self.leads and time.monotonic() < deadline and staying - self._state().keys():
            time.sleep(self._pause_s)

    def _end(self) -> None:
        self._ended.set()
        self._thread.join()


def _leave_without_goodbye(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _key(topic: str, turn: int, index: int) -> str:
    return f"{_ROOT}/{topic}/{turn}/{index}"


@contextlib.contextmanager
def joined(config: DistributedConfig | None) -> Iterator[Fleet]:
    """The processes of this run; this one alone where `config` is None, or where it has all devices through Pathways. To be entered before
    any device is asked for.

    An error inside ends all processes: the others raise PeerFailed with its text. Whoever is silent for `heartbeat_timeout_s` is lost;
    then all raise PeerLost, and one that can't within that time, stuck on a device, leaves after its last words (`Fleet.on_leaving`).
    """
    if start_pathways(config) or config is None:
        yield ALONE
        return
    # Else SIGTERM would be swallowed by a thread of jax's, also before our handlers are there. They save; nobody asks jax's service.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments(config))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"cluster.distributed: {error} No launcher that jax knows (Slurm, Kubernetes, Cloud TPU, Open MPI) fills in what is null: set "
            "coordinator, num_processes and process_id"
        ) from error
    client = jax_distributed.global_state.client
    fleet = Processes(client, index=jax.process_index(), count=jax.process_count(), limit_s=config.heartbeat_timeout_s)
    try:
        yield fleet
    except BaseException as error:
        cause = fleet.cause_of(error)
        fleet.fail(cause)
        if cause is error:
            raise
        raise cause from error
    else:
        fleet.leave()


def arguments(config: DistributedConfig) -> dict[str, Any]:
    """What `jax.distributed.initialize` is called with."""
    given = {"coordinator_address": config.coordinator, "num_processes": config.num_processes, "process_id": config.process_id}
    # jax's detection, where it runs, also cuts each process down to one device under Slurm.
    detection = {"cluster_detection_method": "deactivate"} if None not in given.values() else {}
    limit = math.ceil(config.heartbeat_timeout_s)
    return given | detection | {"heartbeat_timeout_seconds": 2 * limit, "shutdown_timeout_seconds": limit}


__all__ = ["Processes", "arguments", "joined"]
