"""Spans: what ran when, on which thread, for which step, group and sample.

Owns collecting spans in memory and writing them as JSON lines. Stdlib only, so that every room may call it; a span costs about a
microsecond. Clocks are monotonic: a clock that is set back makes no negative durations.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType

CAPACITY = 200_000
"""Spans kept until they are written; beyond it the oldest go."""


class span:
    """Record the block as a span `name` with the ids given; `.seconds` is its length once it is left.

    Spans of one thread nest by time. A block that is left by an exception is recorded with the exception's type.
    """

    __slots__ = ("duration_ns", "error", "ids", "name", "start_ns", "thread")

    def __init__(self, name: str, **ids: object) -> None:
        self.name = name
        self.ids = ids
        self.start_ns = 0
        self.duration_ns = 0
        self.thread = 0
        self.error: str | None = None

    @property
    def seconds(self) -> float:
        return self.duration_ns / 1e9

    def __enter__(self) -> span:
        self.thread = threading.get_ident()
        self.start_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.duration_ns = time.monotonic_ns() - self.start_ns
        if kind is not None:
            self.error = kind.__name__
        _finished.append(self)  # appending to a deque is atomic


_finished: collections.deque[span] = collections.deque(maxlen=CAPACITY)


def take() -> list[span]:
    """The spans that ended since the last call, in the order in which they ended."""
    spans = []
    while True:
        try:
            spans.append(_finished.popleft())
        except IndexError:
            return spans


def write_jsonl(path: str | Path) -> int:
    """Append the spans that ended since the last call to `path`, one JSON object a line; returns how many."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    spans = take()
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(_line(s, names.get(s.thread, "ended")) for s in spans)
    return len(spans)


def _line(s: span, thread_name: str) -> str:
    record = {"name": s.name, "start_ns": s.start_ns, "duration_ns": s.duration_ns, "pid": os.getpid(), "thread": s.thread}
    record |= {"thread_name": thread_name, "ids": s.ids}
    if s.error is not None:
        record["error"] = s.error
    return json.dumps(record, default=str) + "\n"
