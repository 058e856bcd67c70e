"""Compiled programs: kept on disk for the next process, and counted in this one.

Owns the place of jax's compilation cache, which whoever makes programs asks for first (`RLCluster`, `Trainer`), and the count, of all
threads and devices, which the learner reports as `perf/compiles`: a recompilation that nobody expects is the commonest way for a step to
become slow. Programs that come from the cache count too, as they are traced and lowered anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
from pathlib import Path

import jax
import jax.monitoring

from burnish.models.locate import cache_folder

CACHE_BYTES = 4 << 30
"""Beyond it the programs that weren't used for longest are deleted."""
_WORTH_KEEPING_S = 0.1
_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Have jax keep what it compiles in `cache_folder()`, for later processes on processors of this kind.

    Whoever has said where (`JAX_COMPILATION_CACHE_DIR`, `jax.config`), or that nothing is kept (`JAX_ENABLE_COMPILATION_CACHE=0`), is
    obeyed. Where nothing can be written, nothing is kept.
    """
    said = jax.config.values
    if said["jax_compilation_cache_dir"] is not None or not said["jax_enable_compilation_cache"]:
        return
    folder = cache_folder() / "compiled" / _processor()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _processor() -> str:
    """A name for this kind of processor: XLA's code for one may hold instructions that another lacks, and jax doesn't tell them apart."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text(encoding="utf-8") if listed.is_file() else ""
    features = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.blake2b(features.encode(), digest_size=6).hexdigest()}"


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
