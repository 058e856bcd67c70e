"""Devices: a program's span ends when its result is there, whoever dispatched goes on at once, and a profile covers its steps only."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.observe import trace
from burnish.observe.devices import ProfileSink, dispatched, peak_mib
from burnish.observe.sinks import StepReport


def wait_for_spans(count: int) -> list[trace.span]:
    found: list[trace.span] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline
        found += [one for one in trace.take() if one.lane is not None and one.lane.group == "devices"]
        time.sleep(0.005)
    return found


def slow(x: np.ndarray) -> np.ndarray:
    time.sleep(0.2)
    return x


def test_spans_run_from_dispatch_to_ready_one_after_the_other() -> None:
    program = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    jax.block_until_ready(program(jnp.ones(1)))  # compiled before
    trace.take()
    begun = time.monotonic_ns()
    for i in range(2):
        start = time.monotonic_ns()
        dispatched("tested", "sleep", program(jnp.ones(1)), start_ns=start, number=i)
    handed_over = time.monotonic_ns()
    first, second = wait_for_spans(2)
    assert [one.ids["number"] for one in (first, second)] == [0, 1] and first.seconds >= 0.19
    assert begun <= first.start_ns and first.start_ns + first.duration_ns <= second.start_ns + 1
    assert second.start_ns + second.duration_ns > handed_over, "the end is seen by the waiting thread, later"


def test_a_result_that_was_donated_is_no_error() -> None:
    gone = jnp.ones(3)
    gone.delete()
    dispatched("tested", "gone", gone, start_ns=time.monotonic_ns())
    (one,) = wait_for_spans(1)
    assert one.ids["error"].endswith("RuntimeError")


def test_cpus_dont_say_how_much_memory_they_used() -> None:
    assert peak_mib() is None


@pytest.mark.slow
@pytest.mark.parametrize(("first", "running"), [(1, [True, True, False]), (2, [False, True, False]), (3, [False, False, False])])
def test_a_profile_covers_its_steps(tmp_path: Path, first: int, running: list[bool]) -> None:
    sink = ProfileSink(tmp_path / "profile", first, 2)
    seen = []
    for step in (1, 2, 3):
        seen.append(sink._running)
        jax.block_until_ready(jnp.ones(8) * step)
        sink.step(StepReport(step, 3, {}))
    sink.close()
    assert seen == running and bool(list((tmp_path / "profile").rglob("*.xplane.pb"))) == any(running)
