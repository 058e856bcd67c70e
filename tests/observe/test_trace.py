"""Spans: monotonic, safe from many threads, cheap, and readable afterwards."""

import asyncio
import threading
import time

import pytest

from burnish.observe import trace


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    trace.take()


def test_span_measures_and_names_its_block() -> None:
    with trace.span("rollout", step=3, sample=None) as s:
        time.sleep(0.02)
    assert 0.02 <= s.seconds < 1
    (taken,) = trace.take()
    assert taken is s and taken.name == "rollout" and taken.ids == {"step": 3, "sample": None}
    assert trace.take() == []


def test_span_records_the_exception_and_lets_it_through() -> None:
    with pytest.raises(KeyError), trace.span("reward"):
        raise KeyError("x")
    (taken,) = trace.take()
    assert taken.error == "KeyError"


def test_coroutines_of_one_thread_lie_on_lanes_of_their_own_which_are_used_again() -> None:
    async def episode(seconds: float) -> None:
        with trace.lane("episodes"), trace.span("episode"):
            await asyncio.sleep(seconds)
            await asyncio.gather(tool(), tool())

    async def tool() -> None:
        with trace.lane("tools"), trace.span("tool"):
            await asyncio.sleep(0.01)

    async def together() -> None:
        with trace.span("rollout"):
            await asyncio.gather(episode(0.0), episode(0.02))
            await episode(0.0)

    asyncio.run(together())
    taken = trace.take()
    episodes = [s.lane for s in taken if s.name == "episode"]
    assert len({*episodes}) == 2 and episodes[2] == min(episodes), "the third has the first free place"
    assert len({s.lane for s in taken if s.name == "tool"}) == 2
    (rollout,) = [s.lane for s in taken if s.name == "rollout"]
    assert rollout is not None and rollout.group == "threads"


def test_nothing_is_recorded_while_it_is_paused() -> None:
    with trace.paused(), trace.span("unseen") as s:
        trace.count("queue", 3)
        time.sleep(0.01)
    assert s.seconds >= 0.01 and trace.events() == []


def test_no_span_is_lost_between_threads() -> None:
    together = threading.Barrier(8)

    def work(worker: int) -> None:
        together.wait(timeout=30)  # all alive at one time: the id of a thread that has ended is used again
        for i in range(500):
            with trace.span("work", worker=worker, i=i):
                pass

    threads = [threading.Thread(target=work, args=(w,)) for w in range(8)]
    for thread in threads:
        thread.start()
    taken = trace.take()
    for thread in threads:
        thread.join()
    taken += trace.take()
    assert {(s.ids["worker"], s.ids["i"]) for s in taken} == {(w, i) for w in range(8) for i in range(500)}
    assert len(taken) == 4000 and len({s.lane for s in taken}) == 8


class Empty:
    """A block that does nothing."""

    def __init__(self, name: str, **ids: object) -> None:
        self.name, self.ids = name, ids

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def test_a_span_costs_less_than_8_blocks_that_do_nothing() -> None:
    """A ratio, as the machine may have other work; bench/trace_cost.py has the microseconds."""

    def best(block: type) -> float:
        times = []
        for _ in range(10):
            start = time.thread_time()
            for i in range(2000):
                with block("x", step=i):
                    pass
            times.append(time.thread_time() - start)
            trace.take()
        return min(times)

    assert best(trace.span) < 8 * best(Empty)
