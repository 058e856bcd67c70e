"""Device spans: from the dispatch of a program to the moment its results are ready, as a thread sees it that waits for nothing else.

Owns the waiting threads, one for each role; whoever dispatches goes on at once. A device does one thing after another, so a program that
is dispatched while the one before still runs begins when that ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from burnish.observe import trace
from burnish.observe.trace import Lane


class _Dispatched(NamedTuple):
    name: str
    start_ns: int
    result: Any
    ids: Mapping[str, Any]


_waiters: dict[str, queue.SimpleQueue[_Dispatched]] = {}
_lock = threading.Lock()


def dispatched(role: str, name: str, result: Any, *, start_ns: int, **ids: Any) -> None:
    """Record the program that makes `result` as a span of the role's device lane. Returns at once.

    result: small arrays that nobody donates; they are kept until they are ready. start_ns: `time.monotonic_ns()` before the dispatch.
    """
    with _lock:
        if role not in _waiters:
            _waiters[role] = queue.SimpleQueue()
            threading.Thread(target=_wait, args=(role, _waiters[role]), name=f"ready-{role}", daemon=True).start()
    _waiters[role].put(_Dispatched(name, start_ns, result, ids))


def _wait(role: str, asked: queue.SimpleQueue[_Dispatched]) -> None:
    place, free_ns = Lane("devices", role), 0
    while True:
        name, start_ns, result, ids = asked.get()
        failed = {}
        try:
            jax.block_until_ready(result)
        except Exception as error:  # the one who uses the result is told; here it only marks the span
            failed = {"error": type(error).__name__}
        del result
        end_ns = time.monotonic_ns()
        trace.record(name, place, max(start_ns, free_ns), end_ns, **ids, **failed)
        free_ns = end_ns


__all__ = ["dispatched"]
