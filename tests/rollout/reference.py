"""A tiny random model, an engine over it, and the full forward pass that the engine must agree with."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models import transformer
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig, RopeConfig
from burnish.rollout.native.engine import NativeEngine
from burnish.types import Completion, Request, SamplingParams

T = TypeVar("T")

CONFIG = ModelConfig("llama", 97, 32, 2, 4, 2, 8, 48, RopeConfig(1e4), qkv_bias=True, qk_norm="head", max_positions=256)
OPTIONS: dict[str, Any] = {
    "decode_text": lambda ids: "".join(chr(33 + i) for i in ids),
    "context": 128,
    "slots": 8,
    "prefill_rows": 2,
    "decode_chunk": 4,
}


def random_params(config: ModelConfig = CONFIG, seed: int = 0) -> transformer.Params:
    """Every leaf away from its initial value, and large enough that the distributions are far from uniform."""
    params = transformer.init(config, jax.random.key(seed))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    grown = [np.asarray(leaf) * (6.0 if leaf.ndim > 2 else 1.0) for leaf in leaves]
    return jax.tree.unflatten(treedef, [jnp.asarray(leaf + rng.normal(0, 0.2, leaf.shape), jnp.float32) for leaf in grown])


def random_adapter(config: ModelConfig = CONFIG, seed: int = 1) -> transformer.Adapter:
    rng = np.random.default_rng(seed)
    shapes = {name: transformer.spec(config)["layers"][name].shape for name in ("q", "o", "down")}
    pairs = {
        name: {
            "a": jnp.asarray(rng.normal(0, 0.1, (layers, rows, 3)), jnp.float32),
            "b": jnp.asarray(rng.normal(0, 0.1, (layers, 3, columns)), jnp.float32),
        }
        for name, (layers, rows, columns) in shapes.items()
    }
    return transformer.Adapter(pairs, 2.0)


def forward_logits(
    params: transformer.Params,
    ids: Sequence[int],
    adapter: transformer.Adapter | None = None,
    config: ModelConfig = CONFIG,
    length: int = 128,
) -> np.ndarray:
    """[T, V] logits of one sequence by the full forward pass, without a cache. Padded to one length so that it compiles once."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    segments = jnp.asarray((np.arange(length) < len(ids))[None].astype(np.int32))
    visibility = Visibility(segments, jnp.zeros_like(segments))
    hidden = transformer.forward(config, params, jnp.asarray(tokens), jnp.arange(length)[None], visibility, adapter=adapter)
    return np.asarray(hidden[0] @ transformer.head_matrix(config, params).T)[: len(ids)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def request(prompt: Sequence[int] = (5, 6, 7), seed: Sequence[int] = (0,), max_tokens: int = 12, **options: Any) -> Request:
    return Request(tuple(prompt), SamplingParams(max_tokens, **options), tuple(seed))


def generate(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    return run(all_of_them())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end; a test that hangs fails instead."""
    return asyncio.run(asyncio.wait_for(coroutine, 110))
