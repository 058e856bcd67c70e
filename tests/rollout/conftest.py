"""Engines over a tiny random model, closed when the test ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from burnish.models import transformer
from burnish.models.config import ModelConfig
from burnish.rollout.native.engine import NativeEngine
from tests.rollout.reference import CONFIG, OPTIONS, random_params, run

MakeEngine = Callable[..., NativeEngine]


@pytest.fixture(scope="session")
def params() -> transformer.Params:
    return random_params()


@pytest.fixture
def make_engine(params: transformer.Params) -> Iterator[MakeEngine]:
    engines: list[NativeEngine] = []

    def make(weights: transformer.Params = params, config: ModelConfig = CONFIG, **options: Any) -> NativeEngine:
        engines.append(NativeEngine(config, weights, **(OPTIONS | options)))
        return engines[-1]

    yield make
    for engine in engines:
        run(engine.close())
