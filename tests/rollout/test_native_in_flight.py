"""Weights that change under running requests: every token says which version sampled it, and is what that version would sample."""

import asyncio
from typing import Any

import numpy as np
import pytest

from burnish.models import transformer
from burnish.types import Completion
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import forward_logits, generate, log_softmax, random_params, request, run
from tests.rollout.test_native_pages import update

pytestmark = pytest.mark.optimised

PROMPT = tuple(range(3, 73))
OTHER = random_params(seed=7)


def changed_under_way(make_engine: MakeEngine, in_flight: str, **options: Any) -> tuple[Any, list[Completion]]:
    """Requests of 40 tokens, whose weights change when some of these have been sampled."""
    engine = make_engine(in_flight=in_flight, decode_chunk=2, **options)

    async def story() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request(PROMPT, (i,), max_tokens=40))) for i in range(4)]
        while engine.stats().tokens < 20:
            await asyncio.sleep(0)
        await update(engine, {"embed": OTHER["embed"]}, 1)
        return await asyncio.gather(*tasks)

    return engine, run(story())


def apart(params: transformer.Params, out: Completion, version: int) -> float:
    """How far the log-probs of a version's tokens are from the full forward pass under its weights."""
    weights = params if version == 0 else {**params, "embed": OTHER["embed"]}
    logits = forward_logits(weights, [*PROMPT, *out.ids])[len(PROMPT) - 1 : -1]
    difference = np.abs(log_softmax(logits)[np.arange(len(out.ids)), out.ids] - out.logps)
    return float(difference[out.versions == version].max())


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_b071_requests_go_on_within_their_budget_and_tokens_say_who_sampled_them(
    params: transformer.Params, make_engine: MakeEngine, in_flight: str
) -> None:
    engine, outs = changed_under_way(make_engine, in_flight)
    for out in outs:
        assert len(out.ids) == 40 and set(out.versions.tolist()) == {0, 1} and (np.diff(out.versions) >= 0).all()
        assert apart(params, out, 0) < 1e-4
        assert (apart(params, out, 1) < 1e-4) == (in_flight == "recompute")
    fresh = make_engine(params | {"embed": OTHER["embed"]}, version=1)
    one = request(PROMPT, (9,))
    np.testing.assert_array_equal(generate(engine, [one])[0].logps, generate(fresh, [one])[0].logps)
    assert engine.stats().pages == 0


def test_recomputed_requests_may_be_swapped_out(params: transformer.Params, make_engine: MakeEngine) -> None:
    page = 2 * 2 * 2 * 8 * 64 * 4
    engine, outs = changed_under_way(make_engine, "recompute", kv_cache_bytes=5 * page)
    assert [len(out.ids) for out in outs] == [40] * 4 and engine.stats().pages == 0
    assert max(apart(params, out, version) for out in outs for version in set(out.versions.tolist())) < 1e-4


def test_lent_weights_must_wait(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="in_flight is keep, but lent weights"):
        make_engine(lent=True, in_flight="keep")
