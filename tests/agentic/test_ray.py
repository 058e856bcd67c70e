"""Workers that are actors of a real Ray: the contract of `test_workers.py`, on a cluster of one machine. `make test-ray`."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from burnish.agentic.calls import Calls
from burnish.agentic.ray_workers import ray_workers
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import CallError, CallLost, CallTimeout, UserError, WorkersKeepDying
from burnish.config.schema import RayConfig
from tests.agentic import worlds

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own


def test_without_a_cluster_it_is_said_so() -> None:
    with pytest.raises(UserError, match=r"there is no Ray cluster at auto: .*`ray start --head` begins one"):
        ray_workers(RayConfig())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayConfig]:
    """One of this machine, which begins with the first who connects to it."""
    yield RayConfig(address="local", cpus=0.25)
    import ray

    ray.shutdown()


Make = Callable[..., WorkerPool]


@pytest.fixture
def make(cluster: RayConfig) -> Iterator[Make]:
    made: list[WorkerPool] = []

    def pool(size: int = 2, *, max_deaths: int | None = None) -> WorkerPool:
        made.append(WorkerPool(size, elsewhere=ray_workers(cluster), max_deaths=max_deaths))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def call(pool: WorkerPool, fn: Callable[..., Any], *, timeout_s: float = 60.0, **arguments: Any) -> Any:
    return asyncio.run(Calls(pool)(fn, arguments, timeout_s=timeout_s, name=fn.__qualname__))


def until(ready: Callable[[], bool], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, "it didn't come"
        time.sleep(0.05)


def test_a_function_runs_in_a_process_of_the_cluster_that_is_used_again(make: Make) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    pool = make()
    first, second = call(pool, worlds.where, x=3), call(pool, worlds.where, x=4)
    assert first[0] == second[0] != os.getpid() and (first[1], second[1]) == (3, 4)
    assert signal.getsignal(signal.SIGTERM) is handler, "Ray would end the run without saving it"
    with pytest.raises(CallError, match=r"^KeyError: 'x' \(worlds.py:\d+\)$") as found:
        call(pool, worlds.fails)
    assert "in fails" in found.value.trace
    assert (pool.killed, pool.died) == (0, 0)


def test_as_many_run_at_one_time_as_the_pool_has(make: Make) -> None:
    pool = make(2)

    async def both() -> list[Any]:
        calls = Calls(pool)
        return await asyncio.gather(*(calls(worlds.where, {"x": x}, timeout_s=60.0, name="where") for x in range(4)))

    found = asyncio.run(both())
    assert [x for _, x in found] == [0, 1, 2, 3] and len({pid for pid, _ in found}) == 2


def test_a_hang_in_c_code_is_killed_at_its_limit(make: Make) -> None:
    pool = make()
    call(pool, worlds.where)
    with pytest.raises(CallTimeout, match="regex took longer than 0.3 s"):
        call(pool, worlds.regex, timeout_s=0.3)
    assert (pool.killed, pool.died) == (1, 0)
    assert call(pool, worlds.where, x=5)[1] == 5, "the pool goes on"


def test_children_and_orphaned_grandchildren_die_with_a_killed_worker(make: Make) -> None:
    pool, marker = make(), f"ray-marker-{os.getpid()}"
    call(pool, worlds.where)
    with pytest.raises(CallTimeout):
        call(pool, worlds.leaves_children, marker=marker, timeout_s=5.0)
    until(lambda: not with_marker(marker))


def with_marker(marker: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if marker in line and not line.startswith("Z")]


def test_deaths_are_told_and_counted(make: Make) -> None:
    pool = make(max_deaths=0)
    with pytest.raises(CallLost, match="its worker process ended: signal 9"):
        call(pool, worlds.dies)
    assert (pool.killed, pool.died) == (0, 1)
    with pytest.raises(WorkersKeepDying):
        call(pool, worlds.where)


def test_an_actor_that_is_gone_is_told(make: Make) -> None:
    pool = make()

    async def story() -> None:
        worker = await pool.take()
        asked = asyncio.create_task(worker.ask("load", b"never read"))
        await asyncio.sleep(0)
        worker._ray.kill(worker._actor)  # type: ignore[attr-defined]  # as with its machine
        with pytest.raises(Exception, match="its Ray actor is gone|its worker process ended"):
            await asyncio.wait_for(asked, 60)
            await asyncio.wait_for(worker.ask("load", b"never read"), 60)
        pool.give(worker)

    asyncio.run(story())
    assert (pool.killed, pool.died) == (0, 1)


def test_closing_ends_every_process(make: Make) -> None:
    pool = make()
    pid = call(pool, worlds.where)[0]
    pool.close()
    until(lambda: not alive(pid))
    with pytest.raises(CallError, match="the workers were closed"):
        call(pool, worlds.where)


def alive(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(found) and not found.startswith("Z")
