"""A tiny policy, groups of episodes and compiled steps for the tests of this folder."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burnish.config.algorithms import GRPOConfig
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import LoraConfig
from burnish.models import transformer
from burnish.models.lora import init_adapter
from burnish.models.transformer import Params
from burnish.rl.algorithms import from_config
from burnish.rl.batch import TokenBatch, build_batch
from burnish.rl.layout import Layout
from burnish.testing.tiny import tiny_config
from burnish.train.optim import Optimizer, make_optimizer
from burnish.train.state import TrainState, init_state
from burnish.train.step import Steps, make_steps
from burnish.types import Group, Prompt, Trajectory

CONFIG = tiny_config(vocab_size=31, width=16)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("q", "down"))


@cache
def base() -> Params:
    """Weights large enough for the model to have opinions. At 5 times the initial ones, attention is so sharp that float32's rounding,
    which differs by layout and by processor, is 1.2e-5 of some leaf's gradient; at 3 times it is 1.3e-6."""
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, transformer.init(CONFIG, jax.random.key(0)))


def pairs() -> Params:
    """An adapter that isn't fresh, so that both factors get a gradient."""
    fresh = init_adapter(CONFIG, LORA, jax.random.key(1)).pairs
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)


def groups(num_groups: int = 2, size: int = 4, *, seed: int = 0) -> list[Group]:
    """Prompts of 3 to 5 ids, completions of 1 to 6, none equally long in a group by design."""
    rng = np.random.default_rng(seed)

    def episode(prompt: np.ndarray, draw: int, sample: int) -> Trajectory:
        rest = rng.integers(1, CONFIG.vocab_size, 1 + (sample * 2 + draw) % 6)
        ids = np.concatenate([prompt, rest]).astype(np.int32)
        sampled = np.arange(len(ids)) >= len(prompt)
        logps = np.where(sampled, -1.0, 0.0).astype(np.float32)
        versions = np.where(sampled, 0, -1).astype(np.int32)
        return Trajectory([], ids, sampled, logps, versions, len(prompt), (0, draw), sample)

    def group(draw: int) -> Group:
        prompt = rng.integers(1, CONFIG.vocab_size, 3 + draw)
        return Group((0, draw), Prompt(f"p{draw}", ()), [episode(prompt, draw, sample) for sample in range(size)])

    return [group(draw) for draw in range(num_groups)]


def batch(
    made: list[Group] | None = None, *, advantage: float | None = None, layout: Layout = "shared", row_tokens: int | None = None
) -> TokenBatch:
    """Episodes with different advantages that sum to zero in a group, or with the one that is given."""
    made = made or groups()
    values = {(t.group, t.sample): t.sample - 1.5 if advantage is None else advantage for g in made for t in g.trajectories}
    return jax.tree.map(jnp.asarray, build_batch(made, values, temperature=0.9, layout=layout, row_tokens=row_tokens))


def steps_of(*, lora: bool = True, algorithm: GRPOConfig = GRPOConfig(), **optimizer: Any) -> tuple[Steps, TrainState, Params | None]:
    """Steps with their first state and the base; equal options share compiled programs."""
    chosen = OptimizerConfig(**{"learning_rate": 1e-2, **optimizer})
    steps, made = _compiled(lora, algorithm.model_dump_json(), chosen.model_dump_json())
    return steps, init_state(pairs() if lora else base(), made), base() if lora else None


@cache
def _compiled(lora: bool, algorithm: str, optimizer: str) -> tuple[Steps, Optimizer]:
    made = make_optimizer(OptimizerConfig.model_validate_json(optimizer), total_updates=10)
    scale = LORA.alpha / LORA.rank if lora else None
    return make_steps(CONFIG, from_config(GRPOConfig.model_validate_json(algorithm)), made, lora_scale=scale, head_chunk=8), made


def equal(a: Any, b: Any) -> None:
    """Bitwise."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def on_host(tree: Any) -> Any:
    """A copy that survives donation."""
    return jax.tree.map(np.array, tree)
