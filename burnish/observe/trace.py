"""Spans: what ran when, on which lane, for which step, group, sample and turn.

Owns collecting events in memory; writing them down is `trace_writer.py`, reading them `trace_reader.py`. Stdlib only, so that every room
may call it; a span costs one to two microseconds. Clocks are monotonic: a clock that is set back makes no negative durations.

A *lane* is a row of the timeline on which spans nest. A span lies on its thread's lane, unless it is inside a `lane(...)`, as what many
coroutines of one thread do at a time must be, or names one. *Flows* are numbers that tie spans of different lanes together.
"""

from __future__ import annotations

import collections
import contextvars
import heapq
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple

CAPACITY = 400_000
"""Events kept until they are taken; beyond it the oldest go."""


class Lane(NamedTuple):
    """A row of the timeline: the heading it stands under, its name there, and what tells it from others of that name."""

    group: str
    name: str
    number: int = 0


class Event(NamedTuple):
    """Something that happened: a span begins or ends, or, with a name, a quantity has a new value."""

    time_ns: int
    kind: Literal["begin", "end", "count"]
    what: Any
    """The span; of a count (name, value)."""


# Plain tuples, which cost a third of records; `events` makes them.
_events: collections.deque[tuple[int, str, Any]] = collections.deque(maxlen=CAPACITY)
_lane: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("lane", default=None)
_thread = threading.local()
_free: dict[str, tuple[list[int], list[int]]] = {}  # group -> numbers given back, and how many there are
_free_lock = threading.Lock()
_recording = True


class span:
    """Record the block as a span `name` with the ids given; `.seconds` is its length once it is left.

    lane: where it lies, if not where the surrounding code does. flows: that begin here or pass through; ends: that end here. A block that
    is left by an exception is recorded with the exception's type.
    """

    __slots__ = ("duration_ns", "ends", "error", "flows", "ids", "lane", "name", "notes", "start_ns")

    def __init__(self, name: str, *, lane: Lane | None = None, flows: Sequence[int] = (), ends: Sequence[int] = (), **ids: Any) -> None:
        self.name = name
        self.ids = ids
        self.lane = lane
        self.flows, self.ends = flows, ends
        self.notes: dict[str, object] | None = None
        self.start_ns = 0
        self.duration_ns = 0
        self.error: str | None = None

    @property
    def seconds(self) -> float:
        return self.duration_ns / 1e9

    def note(self, **found: object) -> None:
        """What is known only in the course of it: how much, with what result."""
        self.notes = found if self.notes is None else self.notes | found

    def start(self) -> span:
        """Begin, where a `with` block can't: whoever begins a span must stop it."""
        if self.lane is None:
            self.lane = _lane.get() or _thread_lane()
        self.start_ns = now = time.monotonic_ns()
        if _recording:
            _events.append((now, "begin", self))  # appending to a deque is atomic
        return self

    def stop(self) -> None:
        now = time.monotonic_ns()
        self.duration_ns = now - self.start_ns
        if _recording:
            _events.append((now, "end", self))

    def __enter__(self) -> span:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.error = kind.__name__
        self.stop()


def _thread_lane() -> Lane:
    try:
        return _thread.lane
    except AttributeError:
        thread = threading.current_thread()
        _thread.lane = Lane("threads", thread.name, thread.ident or 0)
        return _thread.lane


class lane:
    """Spans of the block, and of the coroutines that it starts, lie on a lane of `group` that nobody else is using."""

    __slots__ = ("_group", "_number", "_token")

    def __init__(self, group: str) -> None:
        self._group = group

    def __enter__(self) -> Lane:
        self._number = _take_number(self._group)
        mine = Lane(self._group, f"{self._group.rstrip('s')} {self._number:03}")
        self._token = _lane.set(mine)
        return mine

    def __exit__(self, *_: object) -> None:
        _lane.reset(self._token)
        _give_number(self._group, self._number)


class passage:
    """A span on a free lane of `group` that one thread begins and another ends: a wait in a queue."""

    __slots__ = ("_number", "_group", "span")

    def __init__(self, group: str, name: str, *, flows: Sequence[int] = (), **ids: Any) -> None:
        self._group, self._number = group, _take_number(group)
        place = Lane(group, f"{group.rstrip('s')} {self._number:03}")
        self.span = span(name, lane=place, flows=flows, **ids).start()

    def stop(self) -> None:
        self.span.stop()
        _give_number(self._group, self._number)


def _take_number(group: str) -> int:
    with _free_lock:
        given_back, count = _free.setdefault(group, ([], [0]))
        if given_back:
            return heapq.heappop(given_back)
        count[0] += 1
        return count[0]


def _give_number(group: str, number: int) -> None:
    with _free_lock:
        heapq.heappush(_free[group][0], number)


def record(name: str, place: Lane, start_ns: int, end_ns: int, **ids: Any) -> None:
    """A span whose end was seen elsewhere, by `time.monotonic_ns`; one after the other on its lane."""
    if _recording:
        done = span(name, lane=place, **ids)
        done.start_ns, done.duration_ns = start_ns, end_ns - start_ns
        _events.append((start_ns, "begin", done))
        _events.append((end_ns, "end", done))


def count(name: str, value: float) -> None:
    """A quantity, such as the length of a queue, has this value from now on."""
    if _recording:
        _events.append((time.monotonic_ns(), "count", (name, value)))


def flow(step: int, mini_batch: int) -> int:
    """The number of the flow of a mini-batch, from its episodes through the queue to its update. step: from 0, as groups have it."""
    return (step << 12) + mini_batch + 1


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is recorded inside the block, by any thread; spans still measure themselves. For comparing a run with one without."""
    global _recording
    _recording = False
    try:
        yield
    finally:
        _recording = True


def events() -> list[Event]:
    """What happened since the last call of this or of `take`, in order on each lane."""
    found: list[Event] = []
    while True:
        try:
            found.append(Event._make(_events.popleft()))
        except IndexError:
            return found


def take() -> list[span]:
    """The spans that ended since the last call, in the order in which they ended; whatever else happened is forgotten."""
    return [event.what for event in events() if event.kind == "end"]


__all__ = ["CAPACITY", "Event", "Lane", "count", "events", "flow", "lane", "passage", "paused", "record", "span"]
__all__ += ["take"]
