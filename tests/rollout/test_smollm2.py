"""On the real model: the engine says what transformers says, and its log-probs are those of the training forward pass."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models import transformer
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.weights import load
from burnish.rollout.native.engine import NativeEngine
from tests.rollout.reference import generate, log_softmax, request, run

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

GOLDEN = json.loads((Path(__file__).parents[1] / "models" / "golden" / "smollm2_greedy.json").read_text())["continuations"]


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, transformer.Params]:
    return load(locate("smollm2-135m"))


@pytest.fixture(scope="module")
def engine(model: tuple[ModelConfig, transformer.Params]) -> Iterator[NativeEngine]:
    one = NativeEngine(*model, decode_text=str, context=128, slots=8, prefill_rows=4)
    yield one
    run(one.close())


def test_greedy_continuations_are_those_of_transformers(engine: NativeEngine) -> None:
    outs = generate(engine, [request(row["prompt_ids"], max_tokens=32, temperature=0.0) for row in GOLDEN])
    assert [out.ids.tolist() for out in outs] == [row["continuation_ids"] for row in GOLDEN]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampler_and_full_forward_log_probs_agree(
    model: tuple[ModelConfig, transformer.Params], engine: NativeEngine, top_p: float
) -> None:
    """Mean difference at most 1e-4 in f32, at temperatures 0.7, 1.0 and 1.3."""
    requests = [request(GOLDEN[0]["prompt_ids"], (i,), max_tokens=32, temperature=t, top_p=top_p) for i, t in enumerate((0.7, 1.0, 1.3))]
    for one, out in zip(requests, generate(engine, requests), strict=True):
        logits = next_logits(model, [*one.prompt_ids, *out.ids])[len(one.prompt_ids) - 1 : -1] / one.params.temperature
        if out.kept_ids is not None:
            outside = np.ones(logits.shape, bool)
            np.put_along_axis(outside, np.where(out.kept_ids < 0, out.kept_ids[:, :1], out.kept_ids), False, axis=1)
            logits = np.where(outside, -np.inf, logits)
        difference = np.abs(log_softmax(logits)[np.arange(len(out.ids)), out.ids] - out.logps)
        assert difference.mean() <= 1e-4


def next_logits(model: tuple[ModelConfig, transformer.Params], ids: list[int]) -> np.ndarray:
    config, params = model
    segments = jnp.ones((1, len(ids)), jnp.int32)
    visibility = Visibility(segments, jnp.zeros_like(segments))
    hidden = transformer.forward(config, params, jnp.asarray([ids], jnp.int32), jnp.arange(len(ids))[None], visibility)
    return np.asarray(hidden[0] @ transformer.head_matrix(config, params).T)


def test_the_same_request_has_the_same_bits_alone_and_among_others(engine: NativeEngine) -> None:
    batch = [request(row["prompt_ids"], (i,), max_tokens=4 + 5 * i) for i in range(4) for row in GOLDEN]
    for one, out in zip(batch, generate(engine, batch[::-1])[::-1], strict=True):
        alone = generate(engine, [one])[0]
        np.testing.assert_array_equal(out.ids, alone.ids)
        np.testing.assert_array_equal(out.logps, alone.logps)
