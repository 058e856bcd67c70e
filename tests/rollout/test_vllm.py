"""vLLM's engine against a protocol double (`vllm_double.py`); against the real server: `test_vllm_server.py`, `make test-vllm`."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.rollout.remote.dialect import ServerSetup, seed_of
from burnish.rollout.remote.editions import Kind
from burnish.rollout.remote.engine import Connections, RemoteEngine
from burnish.rollout.remote.lives import LifeLimits, ServerFailed
from burnish.rollout.vllm import TIES, VllmDialect
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from burnish.types import Completion, Request, SamplingParams, StopReason
from tests.rollout.vllm_double import Double, served

LEAF = ("layers.q", np.zeros(3))
FIRST = Path(__file__).parent
"""The folder of the weights that servers start with, which nobody reads."""
QUICK = LifeLimits(start_timeout_s=20.0)
NO_RESTARTS = LifeLimits(restarts=0, start_timeout_s=20.0)


class Written:
    """A writer of folders that nobody reads."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.fails = False

    def check(self, name: str, array: Any) -> None:
        if not name.startswith("layers."):
            raise ValueError(f"no leaf {name}")

    def write(self, folder: Path, leaves: Mapping[str, Any], *, last: Path | None, checksum: int | None) -> None:
        folder.mkdir(parents=True)
        if self.fails:
            raise RuntimeError("the disk is full")

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None: ...


Make = Callable[..., RemoteEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines over doubles; both end with the test."""
    with ExitStack() as stack:

        def engine(*doubles: Double, kind: Kind = "model", slots: int = 4, limits: LifeLimits = QUICK, **options: Any) -> RemoteEngine:
            urls = [stack.enter_context(served(double)) for double in doubles]
            setup = ServerSetup(Path("base"), lambda ids: " ".join(map(str, ids)), kind, **options)
            made = RemoteEngine(
                VllmDialect(setup),
                Connections(urls, slots=slots),
                writer=Written(kind),
                decode_text=setup.decode_text,
                context=128,
                start=FIRST,
                limits=limits,
            )
            stack.callback(lambda: asyncio.run(made.close()))
            return made

        yield engine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_conformance(check: Check, kind: Kind, make: Make) -> None:
    engine = make(Double(), Double(latency_s=0.01), kind=kind)
    asyncio.run(run_check(check, Subject(engine, (5, 6, 7), tuple(range(128)), LEAF)))


def ask(max_tokens: int = 4, *path: int, prompt: tuple[int, ...] = (5, 6), **params: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens, **params), path or (1, 2, 3, 4, 0))


def unmarked(names: Iterable[str]) -> list[str]:
    """Of editions, or of their folders, without what tells runs apart."""
    return [Path(name).name.rpartition("-")[0] for name in names]


async def update(engine: RemoteEngine, version: int) -> None:
    await engine.begin_update(version)
    await engine.push(*LEAF)
    await engine.commit_update()


# ------------------------------------------------------------------------------------------------------------------- asking again


@pytest.mark.parametrize("status", [500, 503])
def test_a_request_that_failed_is_asked_again_and_answered_once(make: Make, status: int) -> None:
    double = Double()
    engine = make(double, limits=NO_RESTARTS)

    async def story() -> Completion:
        await engine.generate(ask())
        double.fails["/inference/v1/generate"] = [status, status]
        return await engine.generate(ask(6))

    out = asyncio.run(story())
    assert len(out.ids) == 6 and engine.stats().tokens == 10
    assert (double.begun, len(double.answered)) == (5, 3)  # the trial at the start, two answers, two failures


def test_a_request_that_a_healthy_server_fails_at_is_given_up(make: Make) -> None:
    double = Double(fails={"/inference/v1/generate": []})
    engine = make(double, limits=NO_RESTARTS)
    asyncio.run(engine.generate(ask()))
    double.fails["/inference/v1/generate"] = [500] * 9
    with pytest.raises(RuntimeError, match=r"fails at one request 3 times: .*planned \(status 500\)"):
        asyncio.run(engine.generate(ask()))
    double.fails.clear()
    assert len(asyncio.run(engine.generate(ask())).ids) == 4


def test_what_the_server_refuses_is_not_asked_again(make: Make) -> None:
    double = Double(context=20)
    engine = make(double)
    with pytest.raises(ValueError, match=r"refuses a request: .*longer than the maximum model length.* \(status 400\)"):
        asyncio.run(engine.generate(ask(prompt=tuple(range(30)))))
    assert double.begun == 2 and len(asyncio.run(engine.generate(ask())).ids) == 4


def test_a_cancelled_request_is_ended_at_the_server_too(make: Make) -> None:
    double = Double()
    engine = make(double)

    async def story() -> Completion:
        await engine.generate(ask())
        double.latency_s = 30.0
        request = ask()
        answer = asyncio.create_task(engine.generate(request))
        while double.begun < 3:
            await asyncio.sleep(0.005)
        await engine.cancel(request)
        return await answer

    out = asyncio.run(story())
    assert out.stop is StopReason.CANCELLED and len(out.ids) == 0 and engine.stats().running == 0


def test_stop_strings_are_found_as_they_come(make: Make) -> None:
    engine = make(Double())
    whole = asyncio.run(engine.generate(ask(20))).ids.tolist()
    out = asyncio.run(engine.generate(ask(20, stop_strings=(f"{whole[3]} {whole[4]}",))))
    assert (out.ids.tolist(), out.stop) == (whole[:5], StopReason.STOP_STRING)


# --------------------------------------------------------------------------------------------------------------- what is sampled from


def test_the_body_says_all_that_a_server_might_have_a_default_for(make: Make) -> None:
    double = Double()
    engine = make(double)
    asyncio.run(engine.generate(ask(9, 1, 2, temperature=0.5, stop_ids=(198,))))
    body = double.answered[-1]
    sampling = body.pop("sampling_params")
    seed = sampling.pop("seed")
    assert body == {"model": None, "token_ids": [5, 6], "cache_salt": "start"}
    assert sampling == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "stop_token_ids": [198],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert seed == seed_of((1, 2)) != seed_of((1, 3)) and 0 <= seed < 2**63


def test_a_nucleus_is_cut_to_the_kept_set_and_the_set_is_asked_for(make: Make) -> None:
    double = Double()
    engine = make(double, max_kept=24, support="biased")
    biased = asyncio.run(engine.generate(ask(top_p=0.5)))
    assert double.answered[-1]["sampling_params"]["logprobs"] == 0 and (biased.support, biased.kept_ids) == ("full", None)
    kept = make(double, max_kept=11)
    out = asyncio.run(kept.generate(ask(top_k=3)))
    assert double.answered[-1]["sampling_params"]["logprobs"] == 3 + TIES and out.support == "truncated"
    assert out.kept_ids is not None and out.kept_ids.tolist() == [[i, i + 1, i + 2] for i in out.ids]
    with pytest.raises(ValueError, match=r"top_k 4 needs a kept set of up to 12 ids, and rollout.max_kept is 11"):
        asyncio.run(kept.generate(ask(top_k=4)))


def test_a_kept_set_that_is_not_whole_is_refused(make: Make) -> None:
    engine = make(Double(), max_kept=20)
    with pytest.raises(ValueError, match="the kept set has 2 ids with 1.213 of|the kept set has .* of the probability"):
        asyncio.run(engine.generate(ask(top_k=1)))  # the double gives its one kept id a log-prob of -0.5


# --------------------------------------------------------------------------------------------------------------------------- updates


def test_adapters_come_under_new_names_and_old_ones_go(make: Make) -> None:
    doubles = [Double(), Double()]
    engine = make(*doubles, kind="adapter")

    async def story() -> list[int]:
        seen = []
        for version in (1, 2, 3):
            await update(engine, version)
            out = await engine.generate(ask())
            seen += out.versions.tolist()
        return seen

    assert asyncio.run(story()) == [1] * 4 + [2] * 4 + [3] * 4
    for double in doubles:
        assert unmarked(double.adapters) == ["burnish-3-3"] and double.most_adapters == 2
        assert unmarked(folder.name for folder in Path(*double.adapters.values()).parent.iterdir()) == ["burnish-3-3"]
    names = [body["model"] for double in doubles for body in double.answered]
    assert sorted(unmarked({name for name in names if name})) == ["burnish-1-1", "burnish-2-2", "burnish-3-3"]
    assert all(body["cache_salt"] == (body["model"] or "start") for double in doubles for body in double.answered)


@pytest.mark.parametrize(
    ("kind", "path"), [("model", "/collective_rpc"), ("adapter", "/v1/load_lora_adapter"), ("model", None), ("adapter", None)]
)
def test_an_update_that_fails_leaves_every_server_on_the_old_weights(make: Make, kind: Kind, path: str | None) -> None:
    """On one of two servers, or already when it is written (path None)."""
    good, bad = Double(), Double()
    engine = make(good, bad, kind=kind)

    async def story() -> None:
        await update(engine, 1)
        if path is None:
            engine._writer.fails = True  # type: ignore[attr-defined]
        else:
            bad.fails[path] = [500]
        with pytest.raises(RuntimeError, match="the disk is full|doesn't take version 2, version 1 stays"):
            await update(engine, 2)
        assert engine.version == 1
        for _ in range(4):
            assert (await engine.generate(ask())).versions.tolist() == [1] * 4
        engine._writer.fails = False  # type: ignore[attr-defined]
        await update(engine, 3)
        assert (await engine.generate(ask())).versions.tolist() == [3] * 4

    asyncio.run(story())
    for double in (good, bad):
        if kind == "adapter":
            assert [name.split("-")[1] for name in double.adapters] == ["3"] and double.most_adapters <= 2
        else:
            assert double.version.startswith("burnish-3-")


def test_servers_go_back_to_the_weights_that_they_started_with(make: Make) -> None:
    """The first update fails on one of two. What they started with is read again only where something else was read meanwhile."""
    good, bad = Double(), Double(fails={"/collective_rpc": [500]})
    engine = make(good, bad)

    async def story() -> Completion:
        await engine.generate(ask())
        assert not good.reloaded and not bad.reloaded
        with pytest.raises(RuntimeError, match="doesn't take version 1, version 0 stays"):
            await update(engine, 1)
        return await engine.generate(ask())

    assert asyncio.run(story()).versions.tolist() == [0] * 4
    assert unmarked(good.reloaded[:1]) == ["burnish-1-1"] and good.reloaded[1:] == bad.reloaded == [str(FIRST)]
    assert (good.version, bad.version) == ("start", "start")


@pytest.mark.parametrize("label", ["burnish-40-40", "burnish-changing"])
def test_a_server_that_an_earlier_run_has_left_begins_with_the_first_weights(make: Make, label: str) -> None:
    double = Double(version=label)
    assert asyncio.run(make(double).generate(ask())).versions.tolist() == [0] * 4
    assert double.reloaded == [str(FIRST)] and double.version == "start"


def test_an_adapter_of_an_earlier_run_does_not_pass_for_one_of_this_run(make: Make) -> None:
    """That run was killed, and left it; both called their first push version 1."""
    double = Double()
    killed, engine = make(double, kind="adapter"), make(double, kind="adapter")

    async def story() -> None:
        await update(killed, 1)
        await update(engine, 1)
        await engine.generate(ask())

    asyncio.run(story())
    used = double.adapters[double.answered[-1]["model"]]
    assert Path(used).parent == engine._folder != killed._folder


def test_a_server_that_somebody_restarted_gets_its_weights_again(make: Make) -> None:
    model, adapter = Double(), Double()
    for double, kind in ((model, "model"), (adapter, "adapter")):
        engine = make(double, kind=kind)

        async def story(engine: RemoteEngine = engine, double: Double = double) -> Completion:
            await update(engine, 1)
            double.version, double.adapters = "default", {}  # what a fresh one has
            return await engine.generate(ask())

        assert asyncio.run(story()).versions.tolist() == [1] * 4
    assert len(model.reloaded) == 2 and unmarked([model.version, *adapter.adapters]) == ["burnish-1-1"] * 2


# ------------------------------------------------------------------------------------------------------------------ several servers


def test_two_servers_answer_nearly_twice_as_fast_as_one(make: Make) -> None:
    def seconds(*doubles: Double) -> float:
        engine = make(*doubles)

        async def story() -> float:
            await engine.generate(ask())
            for double in doubles:
                double.latency_s, double.seats = 0.25, asyncio.Semaphore(4)
            start = time.monotonic()
            await asyncio.gather(*(engine.generate(ask(4, 1, 2, group, sample, 0)) for group in range(6) for sample in range(4)))
            return time.monotonic() - start

        return asyncio.run(story())

    ratios: list[float] = []  # a busy machine adds to both times, so it is asked thrice
    while len(ratios) < 3 and max(ratios, default=0.0) < 1.7:
        ratios.append(seconds(Double()) / seconds(Double(), Double()))
    assert max(ratios) >= 1.7, ratios


def test_a_group_stays_where_its_prompt_is_cached_and_the_load_is_even(make: Make) -> None:
    doubles = [Double(latency_s=0.01), Double(latency_s=0.01)]
    engine = make(*doubles, slots=16)

    async def story() -> None:
        await asyncio.gather(*(engine.generate(ask(1, 9, group, i, 0, prompt=(group,))) for group in range(8) for i in range(2)))

    asyncio.run(story())
    served = [[body["token_ids"][0] for body in double.answered[1:]] for double in doubles]
    assert [len(groups) for groups in served] == [8, 8] and not {*served[0]} & {*served[1]}


def test_a_server_that_hangs_is_left(make: Make) -> None:
    good, hung = Double(), Double()
    engine = make(good, hung, limits=LifeLimits(restarts=1, health_every_s=0.05, health_misses=2, health_timeout_s=0.1))

    async def story() -> list[int]:
        await asyncio.gather(*(engine.generate(ask(1, i)) for i in range(4)))
        hung.latency_s, hung.healthy = 60.0, False
        outs = await asyncio.gather(*(engine.generate(ask(2, i)) for i in range(8)))
        return [len(out.ids) for out in outs]

    assert asyncio.run(story()) == [2] * 8


# -------------------------------------------------------------------------------------------------------- servers that burnish starts


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Make]:
    """An engine that starts doubles as processes of their own: its interpreter is a script that runs one, whatever it is told to run."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("vllm_double.py")}" --latency 0.2 "$@"\n')
    program.chmod(0o755)
    with ExitStack() as stack:

        def engine(kind: Kind, restarts: int, **limits: float) -> RemoteEngine:
            setup = ServerSetup(Path("base"), str, kind, python=str(program))
            made = RemoteEngine(
                VllmDialect(setup),
                Connections(launch=1, slots=4, logs=tmp_path / "logs"),
                writer=Written(kind),
                decode_text=str,
                context=128,
                start=FIRST,
                limits=LifeLimits(restarts=restarts, start_timeout_s=30.0, **limits),
            )
            stack.callback(lambda: asyncio.run(made.close()))
            return made

        yield engine


def pid_of(engine: RemoteEngine) -> int:
    process = engine._pool.hosts[0].process
    assert process is not None
    return process.pid


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_server_killed_in_mid_batch_is_restarted_and_the_batch_done(launched: Make, kind: Kind) -> None:
    """R29, and its budget: killed once more, the run is told which server, and how it ended."""
    engine = launched(kind, 1)

    async def batch() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(ask(4, 1, i, 0, 0, 0)) for i in range(8)))

    async def kill_while_it_runs() -> int:
        while engine.stats().running == 0:
            await asyncio.sleep(0.005)
        os.kill(pid := pid_of(engine), signal.SIGKILL)
        return pid

    async def story() -> None:
        await update(engine, 7)
        before = await batch()
        outs, first = await asyncio.gather(batch(), kill_while_it_runs())
        assert [out.ids.tolist() for out in outs] == [out.ids.tolist() for out in before]
        assert all(out.versions.tolist() == [7] * 4 for out in outs)
        assert pid_of(engine) != first and engine.stats().tokens == 64
        with pytest.raises(
            ServerFailed, match=r"vllm server http.* failed 2 times and may be brought back 1 times: .*was killed by SIGKILL"
        ):
            await asyncio.gather(batch(), kill_while_it_runs())
        with pytest.raises(ServerFailed):
            await engine.generate(ask())
        with pytest.raises(ServerFailed):
            await update(engine, 8)

    asyncio.run(story())


def test_r58_a_server_that_starves_for_a_while_isnt_taken_for_dead(launched: Make) -> None:
    """Looked at twenty times a second, by the time limits that a run has: it doesn't run for a second, and no death may be made good."""
    engine = launched("model", 0, health_every_s=0.05)

    async def story() -> None:
        await engine.generate(ask())
        os.kill(pid := pid_of(engine), signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        assert len((await engine.generate(ask())).ids) == len((await engine.generate(ask())).ids)
        assert pid_of(engine) == pid and engine._pool.hosts[0].deaths == 0

    asyncio.run(story())


def test_a_server_ends_with_its_engine(launched: Make) -> None:
    engine = launched("model", 1)
    asyncio.run(engine.generate(ask()))
    pid = pid_of(engine)
    assert alive(pid)
    asyncio.run(engine.close())
    assert not alive(pid)


def test_a_server_that_does_not_start_says_why(launched: Make, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no such GPU; exit 3\n")
    engine = launched("model", 5)
    with pytest.raises(ServerFailed, match=r"(?s)didn't start: the server exited with 3 before it answered; its log, .*no such GPU"):
        asyncio.run(engine.generate(ask()))
