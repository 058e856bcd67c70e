"""What is particular to the scripted engine; what it shares with every engine is in test_check_engine."""

import asyncio
import time

import numpy as np
import pytest

from burnish.rollout.scripted import ScriptedEngine
from burnish.types import Request, SamplingParams, StopReason


def test_it_says_the_reply_cut_where_the_request_says() -> None:
    engine = ScriptedEngine(lambda request: [10, 11, 12, 2], decode_text=lambda ids: " ".join(map(str, ids)), logp=-0.5, version=4)

    async def story() -> None:
        stopped = await engine.generate(Request((1,), SamplingParams(8, stop_ids=(2,))))
        assert (stopped.ids.tolist(), stopped.stop) == ([10, 11, 12, 2], StopReason.STOP_ID)
        assert stopped.logps.tolist() == [-0.5] * 4 and stopped.versions.tolist() == [4] * 4
        cut = await engine.generate(Request((1,), SamplingParams(6)))
        assert (cut.ids.tolist(), cut.stop) == ([10, 11, 12, 2, 10, 11], StopReason.LENGTH)
        text = await engine.generate(Request((1,), SamplingParams(8, stop_strings=("11",))))
        assert (text.ids.tolist(), text.stop) == ([10, 11], StopReason.STOP_STRING)

    asyncio.run(story())


def test_latency_is_per_request_and_requests_overlap() -> None:
    engine = ScriptedEngine(lambda request: [1], latency_s=lambda request: 0.1 * request.prompt_ids[0])

    async def story() -> list[float]:
        start = time.monotonic()

        async def one(tenths: int) -> float:
            await engine.generate(Request((tenths,), SamplingParams(1)))
            return time.monotonic() - start

        return await asyncio.gather(*(one(tenths) for tenths in (3, 1, 2, 1)))

    ends = asyncio.run(story())
    assert np.argsort(ends, kind="stable")[-1] == 0 and all(end >= 0.1 * tenths for end, tenths in zip(ends, (3, 1, 2, 1), strict=True))
    assert ends[0] < 0.65


def test_a_script_that_is_silent_or_cannot_read_says_so() -> None:
    async def ask(engine: ScriptedEngine, params: SamplingParams) -> None:
        await engine.generate(Request((1,), params))

    with pytest.raises(ValueError, match="empty reply"):
        asyncio.run(ask(ScriptedEngine(lambda request: []), SamplingParams(1)))
    with pytest.raises(ValueError, match="needs `decode_text`"):
        asyncio.run(ask(ScriptedEngine(lambda request: [1]), SamplingParams(1, stop_strings=("x",))))
