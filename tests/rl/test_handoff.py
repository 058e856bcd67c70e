"""Between the two threads: whatever happens on either side, both leave soon, and the first cause is what is reported."""

import threading
import time
from collections.abc import Callable

import pytest

from burnish.rl.handoff import Closed, Handoff, VersionGate

PATIENCE_S = 5.0


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_chunks_come_in_order_and_then_the_end() -> None:
    handoff: Handoff[int] = Handoff(3)

    def produce() -> None:
        for i in range(50):
            handoff.put(i)
        handoff.finish()

    thread = in_thread(produce)
    got = []
    while (chunk := handoff.get()) is not None:
        got.append(chunk)
    assert got == list(range(50)) and ended(thread)
    assert handoff.get() is None, "the end stays the end"


def test_room_is_bounded_and_the_last_place_is_for_the_end() -> None:
    handoff: Handoff[int] = Handoff(3)
    taken = threading.Event()

    def produce() -> None:
        for i in range(3):
            handoff.put(i)
        taken.set()

    thread = in_thread(produce)
    assert not taken.wait(0.1), "the third chunk took the place of the end"
    handoff.get()
    assert taken.wait(PATIENCE_S) and ended(thread)


def test_the_end_gets_through_a_full_queue_without_waiting() -> None:
    handoff: Handoff[int] = Handoff(2)
    handoff.put(1)
    handoff.finish()
    assert (handoff.get(), handoff.get()) == (1, None)


def test_a_failure_is_raised_after_the_chunks_before_it_with_its_traceback() -> None:
    handoff: Handoff[int] = Handoff(2)

    def lay_eggs() -> None:
        raise ValueError("no hay")

    def produce() -> None:
        try:
            handoff.put(1)
            lay_eggs()
        except ValueError as failure:
            handoff.finish(failure)

    assert ended(in_thread(produce))
    assert handoff.get() == 1
    with pytest.raises(ValueError, match="no hay") as caught:
        handoff.get()
    assert "lay_eggs" in [entry.name for entry in caught.traceback]


def test_a_producer_that_waits_for_room_leaves_when_the_consumer_does() -> None:
    handoff: Handoff[int] = Handoff(2)
    left = threading.Event()

    def produce() -> None:
        try:
            handoff.put(1)
            handoff.put(2)
        except Closed:
            left.set()

    thread = in_thread(produce)
    time.sleep(0.02)
    handoff.close()
    assert ended(thread) and left.is_set()
    with pytest.raises(Closed):
        handoff.put(3)


@pytest.mark.parametrize("failing", ["producer, queue full", "consumer, queue empty", "both at once"])
def test_r33_both_sides_leave_and_the_first_cause_is_reported(failing: str) -> None:
    """R33, 100 times each."""
    for _ in range(100):
        handoff: Handoff[int] = Handoff(3)
        gate = VersionGate()
        causes: list[BaseException] = []

        def produce(handoff: Handoff[int] = handoff, gate: VersionGate = gate) -> None:
            try:
                handoff.put(1)
                handoff.put(2)
                if failing != "consumer, queue empty":
                    raise OSError("producer")
                gate.wait_for_step(1)
            except Closed:
                handoff.finish()
            except OSError as failure:
                handoff.finish(failure)

        thread = in_thread(produce)
        try:
            if failing == "both at once":
                raise KeyError("consumer")
            assert (handoff.get(), handoff.get()) == (1, 2)
            if failing == "consumer, queue empty":
                raise KeyError("consumer")
            handoff.get()
        except (KeyError, OSError) as failure:
            causes.append(failure)
        finally:
            handoff.close()
            gate.close()
        assert ended(thread)
        assert [str(cause) for cause in causes] == [{"producer, queue full": "producer"}.get(failing, "'consumer'")]


def test_a_gate_holds_a_step_until_the_weights_are_new_enough() -> None:
    for staleness, version, step, passes in [(0, 0, 0, True), (0, 0, 1, False), (0, 1, 1, True), (2, 0, 2, True), (2, 0, 3, False)]:
        gate = VersionGate(staleness)
        gate.publish(version)
        passed = threading.Event()

        def wait(gate: VersionGate = gate, step: int = step, passed: threading.Event = passed) -> None:
            try:
                gate.wait_for_step(step)
                passed.set()
            except Closed:
                return

        thread = in_thread(wait)
        assert passed.wait(PATIENCE_S if passes else 0.05) == passes, (staleness, version, step)
        gate.close()
        assert ended(thread)


def test_publishing_opens_the_gate() -> None:
    gate = VersionGate()
    thread = in_thread(lambda: gate.wait_for_step(3))
    for version in (1, 2):
        gate.publish(version)
        time.sleep(0.01)
        assert thread.is_alive()
    gate.publish(3)
    assert ended(thread)


def test_a_handoff_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity >= 2, got 1"):
        Handoff(1)
