"""Device spans: from the dispatch of a program to the moment its results are ready, as a thread sees it that waits for nothing else.

Owns the waiting threads, one for each role; whoever dispatches goes on at once. A device does one thing after another, so a program that
is dispatched while the one before still runs begins when that ends. Owns too what else jax knows of devices: memory, peaks, a profile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from burnish.observe import trace
from burnish.observe.sinks import EvalReport, StepReport
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


class ProfileSink:
    """JAX's own profiler, over the steps `first` to `last`, into `folder`: what XLA did, operation by operation (TensorBoard, xprof)."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last, self._running = folder, first, last, False
        self._begin(0)

    def step(self, report: StepReport) -> None:
        if report.step >= self._last:
            self.close()
        self._begin(report.step)

    def evaluation(self, report: EvalReport) -> None:
        """Those between the steps are in it."""

    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def _begin(self, step: int) -> None:
        if not self._running and self._first <= step + 1 <= self._last:
            self._running = True
            jax.profiler.start_trace(str(self._folder))


def peak_mib() -> float | None:
    """Most memory that this process's fullest device has had in use; None where the platform doesn't say."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in found if peak is not None]
    return max(known) / 2**20 if known else None


PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}
"""Products of dense bf16 operands a second, by how the name of a device begins, as its maker states them."""


def peak_flops(kind: str) -> float | None:
    """Of one device, by `jax.Device.device_kind`; None for one that isn't in the table, CPUs among them."""
    return next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)


__all__ = ["ProfileSink", "dispatched", "peak_flops", "peak_mib"]
