"""The conformance suite holds for both engines, and notices an engine that doesn't."""

import asyncio

import numpy as np
import pytest

from burnish.models import transformer
from burnish.rollout.scripted import ScriptedEngine
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from burnish.types import Completion, Request, StopReason
from tests.rollout.conftest import MakeEngine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_native(check: Check, params: transformer.Params, make_engine: MakeEngine) -> None:
    engine = make_engine()
    asyncio.run(run_check(check, Subject(engine, (5, 6, 7), tuple(range(128)), ("layers.q", params["layers"]["q"]))))


def counting(request: Request) -> list[int]:
    return [sum(request.seed_path) + i for i in range(24)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_scripted(check: Check, latency_s: float) -> None:
    engine = ScriptedEngine(counting, latency_s=lambda request: latency_s, context=128, slots=4)
    asyncio.run(run_check(check, Subject(engine, (5, 6, 7), tuple(range(128)), ("layers.q", np.zeros(3)))))


class DropsTheLastToken(ScriptedEngine):
    async def generate(self, request: Request) -> Completion:
        out = await super().generate(request)
        return Completion(out.ids[:-1], out.logps[:-1], out.versions[:-1], StopReason.LENGTH)


@pytest.mark.parametrize("name", ["budgets_are_kept", "stop_ids_end_and_are_included", "truncated_support_says_what_was_kept"])
def test_the_suite_notices_a_wrong_engine(name: str) -> None:
    check = next(check for check in CHECKS if check.__name__ == name)
    with pytest.raises(AssertionError):
        asyncio.run(run_check(check, Subject(DropsTheLastToken(counting, context=128), (5,), tuple(range(128)), ("a", np.zeros(1)))))
