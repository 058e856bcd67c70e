"""What lies between the thread that makes batches and the thread that trains on them.

Owns a bounded queue whose end always gets through, and the gate that holds the producer to the allowed staleness. Plain threading, no jax.
Every wait here ends: by a chunk, by the end of the data, by the other side's failure, or by `close`; a long one says what it waits for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from burnish.observe import trace

T = TypeVar("T")
log = logging.getLogger(__name__)

_REMIND_S = 60.0


class Closed(Exception):
    """The other side is gone; stop quietly."""


class Interrupted(Exception):
    """The run was asked to stop."""


class Handoff(Generic[T]):
    """A queue of at most `capacity` chunks, the last place of which is kept for the end of the stream.

    One producer calls `put` and finally `finish`; one consumer calls `get` until it returns None. A failure given to `finish` is raised by
    `get` after the chunks before it, on the consumer's thread.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"a handoff needs room for one chunk and the end, capacity >= 2, got {capacity}")
        self._capacity = capacity
        self._chunks: deque[tuple[T, trace.passage]] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._failure: BaseException | None = None
        self._closed = False
        self._interrupted = False

    @property
    def waiting(self) -> int:
        """How many chunks lie in the queue."""
        return len(self._chunks)

    def put(self, chunk: T, *, flows: Sequence[int] = ()) -> None:
        """Wait for room, then hand the chunk on. Raises `Closed` once the consumer has left. flows: of its wait in the queue, as a span."""
        with self._changed:
            while len(self._chunks) >= self._capacity - 1 and not self._closed:
                _wait(self._changed, "the trainer to take a batch")
            if self._closed:
                raise Closed
            self._chunks.append((chunk, trace.passage("queue", "queued", flows=flows)))
            trace.count("queue", len(self._chunks))
            self._changed.notify_all()

    def finish(self, failure: BaseException | None = None) -> None:
        """End the stream, cleanly or by a failure. Never waits."""
        with self._changed:
            self._finished, self._failure = True, failure
            self._changed.notify_all()

    def get(self) -> T | None:
        """The next chunk, or None at the end; raises the producer's failure in its place, `Interrupted` after `interrupt`."""
        with self._changed:
            while not self._chunks and not self._finished and not self._interrupted:
                _wait(self._changed, "the producer to finish a batch of episodes")
            if self._interrupted:
                raise Interrupted
            if self._chunks:
                chunk, waited = self._chunks.popleft()
                waited.stop()
                trace.count("queue", len(self._chunks))
                self._changed.notify_all()
                return chunk
            if self._failure is not None:
                raise self._failure
            return None

    def interrupt(self) -> None:
        """Whoever waits in `get`, and every later call of it, gets `Interrupted`. A signal's handler may call it, in any thread."""
        with self._changed:  # re-entrant, so the thread that the handler has interrupted may hold it
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """The consumer leaves: a producer that waits for room gets `Closed`."""
        with self._changed:
            self._closed = True
            for _, waited in self._chunks:
                waited.stop()
            self._chunks.clear()
            self._changed.notify_all()


class VersionGate:
    """Lets the producer begin a step only when the weights are new enough: at most `max_staleness` versions behind the trainer.

    version: that of the weights which the engine has at the start.
    """

    def __init__(self, max_staleness: int = 0, *, version: int = 0) -> None:
        self._max_staleness = max_staleness
        self._version = version
        self._changed = threading.Condition()
        self._closed = False

    def publish(self, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def wait_for_step(self, step: int) -> None:
        """Return when episodes of `step` may start. Raises `Closed` when the run ends first."""
        with self._changed:
            while self._version < step - self._max_staleness and not self._closed:
                _wait(self._changed, f"weights of version {step - self._max_staleness} (now {self._version}) before step {step}")
            if self._closed:
                raise Closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _wait(changed: threading.Condition, what: str) -> None:
    if not changed.wait(_REMIND_S):
        log.warning("still waiting for %s", what)
