"""SGLang's engine against a protocol double (`sglang_double.py`) only: the real server needs a GPU."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.rollout.remote.dialect import ServerSetup
from burnish.rollout.remote.editions import Kind
from burnish.rollout.remote.engine import Connections, RemoteEngine
from burnish.rollout.sglang import SglangDialect
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from burnish.types import Completion, StopReason
from tests.rollout.sglang_double import SglangDouble
from tests.rollout.test_vllm import FIRST, LEAF, Written, ask, unmarked, update
from tests.rollout.vllm_double import served

Make = Callable[..., RemoteEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def engine(*doubles: SglangDouble, kind: Kind = "model", **options: Any) -> RemoteEngine:
            urls = [stack.enter_context(served(double)) for double in doubles]
            setup = ServerSetup(Path("base"), lambda ids: " ".join(map(str, ids)), kind, **options)
            made = RemoteEngine(
                SglangDialect(setup),
                Connections(urls, slots=4),
                writer=Written(kind),
                decode_text=setup.decode_text,
                context=128,
                start=FIRST,
            )
            stack.callback(lambda: asyncio.run(made.close()))
            return made

        yield engine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, make: Make) -> None:
    engine = make(SglangDouble(), SglangDouble(latency_s=0.01), kind="adapter")
    asyncio.run(run_check(check, Subject(engine, (5, 6, 7), tuple(range(128)), LEAF)))


def test_log_probs_are_those_over_the_kept_set(make: Make) -> None:
    """The double's ids have -2 each, so that over three of them each has a third."""
    double = SglangDouble()
    engine = make(double)
    out = asyncio.run(engine.generate(ask(3, top_k=3)))
    assert np.allclose(out.logps, np.log(1 / 3)) and double.answered[-1]["top_logprobs_num"] == 3
    assert out.kept_ids is not None and out.kept_ids.tolist() == [[i, i + 1, i + 2] for i in out.ids]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9}])
def test_what_it_cannot_say_the_support_of_is_refused_or_accepted_as_biased(make: Make, cut: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="doesn't say which ids these keep"):
        asyncio.run(make(SglangDouble()).generate(ask(3, **cut)))
    out = asyncio.run(make(SglangDouble(), support="biased").generate(ask(3, **cut)))
    assert (out.support, out.kept_ids, out.logps.tolist()) == ("full", None, [-2.0] * 3)


def test_stop_strings_are_found_in_a_stream_that_repeats_itself(make: Make) -> None:
    engine = make(SglangDouble())
    whole = asyncio.run(engine.generate(ask(20))).ids.tolist()
    out = asyncio.run(engine.generate(ask(20, stop_strings=(f"{whole[3]} {whole[4]}",))))
    assert (out.ids.tolist(), out.stop) == (whole[:5], StopReason.STOP_STRING)


def test_weights_come_with_a_version_which_answers_must_have(make: Make) -> None:
    double = SglangDouble()
    engine = make(double)

    async def story() -> Completion:
        await update(engine, 1)
        double.version = "default"  # somebody started it anew
        return await engine.generate(ask())

    assert asyncio.run(story()).versions.tolist() == [1] * 4
    assert unmarked([*double.loaded, double.version]) == ["burnish-1-1"] * 3


def test_servers_go_back_to_the_weights_that_they_started_with(make: Make) -> None:
    """One has those of an earlier run at first; then an update fails on the other."""
    good, bad = SglangDouble(version="burnish-40-40"), SglangDouble(refusals=1)
    engine = make(good, bad)

    async def story() -> Completion:
        await asyncio.gather(*(engine.generate(ask(4, i)) for i in range(2)))
        assert good.loaded == [str(FIRST)] and not bad.loaded
        with pytest.raises(RuntimeError, match="doesn't take version 1, version 0 stays"):
            await update(engine, 1)
        return await engine.generate(ask())

    assert asyncio.run(story()).versions.tolist() == [0] * 4
    assert good.loaded[::2] == [str(FIRST)] * 2 and unmarked(good.loaded[1:2]) == ["burnish-1-1"]
    assert not bad.loaded and (good.version, bad.version) == ("start", "default")


def test_adapters_change_and_never_more_than_two_are_there(make: Make) -> None:
    double = SglangDouble()
    engine = make(double, kind="adapter")

    async def story() -> None:
        for version in (1, 2, 3):
            await update(engine, version)
            await engine.generate(ask())

    asyncio.run(story())
    assert unmarked(double.adapters) == ["burnish-3-3"] and double.most_adapters == 2
    assert double.answered[-1]["lora_path"] in double.adapters


def test_a_request_that_it_aborts_is_asked_again(make: Make) -> None:
    double = SglangDouble()
    engine = make(double)
    asyncio.run(engine.generate(ask()))
    double.aborts = 1
    assert len(asyncio.run(engine.generate(ask())).ids) == 4
