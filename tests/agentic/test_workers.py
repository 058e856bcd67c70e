"""Worker processes: what hangs is killed with all that it started, what can't be sent is run here and said so, nothing is left."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.agentic.calls import Calls, leaked_threads
from burnish.agentic.processes import descendants
from burnish.agentic.slots import Slots
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import CallError, CallTimeout
from burnish.text.codec import Codec
from burnish.types import Status, Trajectory
from tests.agentic import worlds
from tests.agentic.episodes import context, play, script
from tests.agentic.worlds import Planned


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(4)
    yield made
    made.close()


def call(pool: WorkerPool, fn: Callable[..., Any], *, timeout_s: float | None = 20.0, **arguments: Any) -> Any:
    return asyncio.run(Calls(pool)(fn, arguments, timeout_s=timeout_s, name=fn.__qualname__))


def test_a_function_of_a_module_runs_in_a_process_that_is_used_again(pool: WorkerPool) -> None:
    first, second = call(pool, worlds.where, x=3), call(pool, worlds.where, x=4)
    assert first[0] == second[0] != os.getpid() and (first[1], second[1]) == (3, 4)


def test_what_it_prints_is_not_this_programs_output(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(pool, worlds.prints, text="hello") == "hello"
    pool.close()
    out, err = capfd.readouterr()
    assert "hello" not in out and "hello" in err


def test_an_exception_comes_with_its_place_and_traceback(pool: WorkerPool) -> None:
    with pytest.raises(CallError, match=r"^KeyError: 'x' \(worlds.py:\d+\)$") as found:
        call(pool, worlds.fails)
    assert "in fails" in found.value.trace


def test_b085_a_hang_in_c_code_is_killed_at_its_limit(pool: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(CallTimeout, match="regex took longer than 0.3 s"):
        call(pool, worlds.regex, timeout_s=0.3)
    assert time.monotonic() - start < 10 and pool.killed == 1
    assert call(pool, worlds.where)[0] != os.getpid(), "the pool goes on"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds descendants in /proc")
def test_b141_children_and_orphaned_grandchildren_die_with_a_killed_worker(pool: WorkerPool) -> None:
    marker = f"marker-{os.getpid()}"
    with pytest.raises(CallTimeout):
        call(pool, worlds.leaves_children, marker=marker, timeout_s=2.0)
    deadline = time.monotonic() + 5
    while with_marker(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert with_marker(marker) == []


def with_marker(marker: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if marker in line and not line.startswith("Z")]


def test_r21_a_worker_that_grows_is_replaced(pool: WorkerPool) -> None:
    pids = [call(pool, worlds.leaks, megabytes=300) for _ in range(3)]
    assert pids[0] == pids[1] != pids[2]


def test_closing_ends_every_process_and_thread(pool: WorkerPool) -> None:
    threads, children = set(threading.enumerate()), set(descendants(os.getpid()))
    call(pool, worlds.where)
    assert set(descendants(os.getpid())) > children
    pool.close()
    assert set(descendants(os.getpid())) <= children and set(threading.enumerate()) <= threads
    with pytest.raises(CallError, match="the workers were closed"):
        call(pool, worlds.where)


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, os\nfrom burnish.agentic.calls import Calls\nfrom burnish.agentic.workers import WorkerPool\n"
        "from tests.agentic.worlds import where\n"
        "print(asyncio.run(Calls(WorkerPool(1))(where, {}, timeout_s=20, name='where'))[0], flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(ended.stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}/cmdline").exists() or Path(f"/proc/{pid}/cmdline").read_bytes() == b""


def test_what_cant_be_sent_runs_here_with_one_warning(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(pool)

    def closure() -> int:
        return os.getpid()

    class Grader:
        def __call__(self) -> int:
            return os.getpid()

    with caplog.at_level(logging.WARNING):
        for fn in (closure, lambda: os.getpid(), Grader(), closure):
            assert asyncio.run(calls(fn, {}, timeout_s=5.0, name=str(type(fn)))) == os.getpid()
    assert len(caplog.records) == 2 and "runs on threads of this process, which can't be killed" in caplog.text
    assert "put it into a module" in main_module_warning(pool, caplog)


def main_module_warning(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> str:
    made = type("Mine", (Planned,), {"__module__": "__main__"})
    caplog.clear()
    assert Calls(pool).sent(made({}), "environment Mine") is None
    return caplog.text


def test_a_thread_that_hangs_is_counted_until_it_ends() -> None:
    release = threading.Event()
    before = leaked_threads()
    with pytest.raises(CallTimeout):
        asyncio.run(Calls(None)(release.wait, {}, timeout_s=0.05, name="wait"))
    assert leaked_threads() == before + 1
    release.set()
    deadline = time.monotonic() + 5
    while leaked_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leaked_threads() == before


def test_coroutines_run_on_the_loop_and_are_cancelled_at_their_limit(pool: WorkerPool) -> None:
    async def slow() -> int:
        await asyncio.sleep(10)
        return 1

    with pytest.raises(CallTimeout):
        call(pool, slow, timeout_s=0.05)
    assert pool.killed == 0 and leaked_threads() == 0


def test_at_most_so_many_workers_whatever_loop_asks() -> None:
    """Two event loops on two threads share one place; whoever is cancelled while waiting leaves it to the next."""
    slots, most, inside = Slots(1), 0, 0

    async def use(count: int) -> None:
        nonlocal most, inside
        for _ in range(count):
            await slots.acquire()
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1
            slots.release()

    async def impatient() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(held(), 0.001)

    async def held() -> None:
        await slots.acquire()
        try:
            await asyncio.sleep(1)
        finally:
            slots.release()

    loops: list[Coroutine[Any, Any, None]] = [use(30), impatient(), use(30)]
    threads = [threading.Thread(target=asyncio.run, args=(work,)) for work in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads) and most == 1 and slots._free == 1


# ------------------------------------------------------------------------------------------------------------------- environments


def planned(codec: Codec, pool: WorkerPool, log: Path, *plan: str, **limits: Any) -> Trajectory:
    episode = context(script(codec, *"abcdefgh"), codec, calls=Calls(pool), limits=limits, context=4000)
    return play(episode, Planned({"plan": plan, "log": str(log)}))


def test_a_plain_environment_lives_in_one_worker_on_its_main_thread(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    got = planned(codec, pool, tmp_path / "log", "go", "go", "done")
    said = [message["content"] for message in got.messages if message["role"] == "user"]
    pid = said[0].split()[1]
    assert int(pid) != os.getpid() and said[1:] == [f"pid {pid} step {n} main True" for n in (1, 2)]
    assert [step.reward for step in got.steps] == [1.0, 1.0, 1.0] and got.status is Status.OK
    assert (tmp_path / "log").read_text() == "opened\nclosed\n"
    again = planned(codec, pool, tmp_path / "log", "done")
    assert again.messages[0]["content"] == f"pid {pid}", "the next episode takes the same worker"


def test_b081_a_hung_step_is_closed_from_beside_it_and_killed(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    got = planned(codec, pool, tmp_path / "log", "go", "hang", step_timeout_s=0.3)
    assert got.status is Status.ENV_TIMEOUT and got.error == "Planned._step_impl took longer than 0.3 s"
    assert (tmp_path / "log").read_text() == "opened\nclosed\n" and pool.killed == 1
    assert len(got.steps) == 2 and got.num_sampled == 4


def test_r25_a_worker_that_dies_is_an_environments_error(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    got = planned(codec, pool, tmp_path / "log", "kill")
    assert got.status is Status.ENV_ERROR and got.error == "its worker process ended: signal 9" and pool.died == 1
    assert planned(codec, pool, tmp_path / "log", "done").status is Status.OK


def test_an_environment_that_raises_is_closed_and_its_worker_kept(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    got = planned(codec, pool, tmp_path / "log", "raise")
    assert got.status is Status.ENV_ERROR and "in _step_impl" in got.traceback and "no board" in got.traceback
    assert (tmp_path / "log").read_text() == "opened\nclosed\n" and (pool.killed, pool.died) == (0, 0)


def test_a_worker_has_no_jax(codec: Codec, pool: WorkerPool) -> None:
    got = play(context(script(codec, "a"), codec, calls=Calls(pool)), worlds.Jaxed({}))
    assert got.status is Status.ENV_ERROR and got.error is not None and "which a worker process may not" in got.error


def test_the_whole_episode_has_a_limit_too(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    got = planned(codec, pool, tmp_path / "log", "hang", episode_timeout_s=2.0)
    assert got.status is Status.ENV_TIMEOUT and got.error == "the episode took longer than 2 s"
    assert (tmp_path / "log").read_text() == "opened\nclosed\n"


def test_b091_many_episodes_leave_nothing_behind(codec: Codec, pool: WorkerPool, tmp_path: Path) -> None:
    def state() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(descendants(os.getpid()))

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    for count in range(200):
        if count == 50:
            before, size = state(), resident_mib()
        planned(codec, pool, tmp_path / "log", "go", "done")
    assert state() == before and resident_mib() - size < 20
    assert (tmp_path / "log").read_text() == "opened\nclosed\n" * 200
