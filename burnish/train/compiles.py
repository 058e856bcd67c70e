"""How many programs this process has compiled: a recompilation that nobody expects is the commonest way for a step to become slow.

Owns the count, of all threads and devices; the learner reports it as `perf/compiles`. Programs that come from the compilation cache count
too, as they are traced and lowered anew.
"""

from __future__ import annotations

import functools
import threading

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"


def programs_compiled() -> int:
    """Programs since the first call, which returns 0."""
    return _counting().seen


class _Count:
    """Counts what jax reports of compilations, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen = 0

    def __call__(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILED:
            with self._lock:
                self.seen += 1


@functools.cache
def _counting() -> _Count:
    count = _Count()
    jax.monitoring.register_event_duration_secs_listener(count)
    return count
