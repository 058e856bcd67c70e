"""The engine without a cache is an engine, and says what the native one says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.models import transformer
from burnish.models.model import Model
from burnish.rollout.recomputing import RecomputingEngine
from burnish.sync.checksum import checksum
from burnish.testing.byte_tokenizer import make_tiny_tokenizer
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from burnish.text.codec import Codec
from burnish.types import Completion
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import CONFIG, request, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, params: transformer.Params) -> Model:
    folder: Path = tmp_path_factory.mktemp("text")
    make_tiny_tokenizer(folder, "0123456789")
    return Model(CONFIG, params, Codec.load(folder), folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_does_what_every_engine_must(check: Check, model: Model) -> None:
    subject = Subject(
        RecomputingEngine(model, context=128, slots=4), (5, 6, 7), tuple(range(128)), ("layers.q", model.params["layers"]["q"])
    )
    asyncio.run(run_check(check, subject))


def ask(engine: Any, **options: Any) -> Completion:
    return run(engine.generate(request((5, 6, 7), (1, 2), 6, **options)))


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_it_says_what_the_native_engine_says(options: dict[str, Any], model: Model, make_engine: MakeEngine) -> None:
    native, ours = ask(make_engine(), **options), ask(RecomputingEngine(model, max_kept=8), **options)
    np.testing.assert_array_equal(ours.ids, native.ids)
    np.testing.assert_allclose(ours.logps, native.logps, atol=1e-4)
    assert (ours.kept_ids is None) == (native.kept_ids is None)


def test_it_keeps_a_copy_and_takes_whole_leaves_only(model: Model) -> None:
    engine, before = RecomputingEngine(model), model.params["layers"]["q"]
    first = ask(engine)
    moved = before * 3.0

    async def update(name: str, leaf: Any, total: int | None) -> None:
        await engine.begin_update(engine.version + 1)
        await engine.push(name, leaf)
        try:
            await engine.commit_update(total)
        except BaseException:
            await engine.abort_update()
            raise

    with pytest.raises(UserError, match="which has no adapter.q.a of that shape"):
        run(update("adapter.q.a", moved, None))
    with pytest.raises(RuntimeError, match="the old ones stay"):
        run(update("layers.q", moved, 1))
    np.testing.assert_array_equal(ask(engine).ids, first.ids)
    run(update("layers.q", moved, checksum({"layers.q": moved})))
    moved.delete()  # as a trainer that donates it does
    second = ask(engine)
    assert engine.version == 1 and np.abs(second.logps - first.logps).max() > 1e-3
