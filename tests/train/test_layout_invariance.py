"""Locks the promise through the model: however episodes are laid out in rows and rows spread over devices, every leaf's gradient is one.

GRPO, GSPO over sequences, and PPO with its value loss; rows of one episode, of several, of a group with its shared prompt, of several such;
1, 2, 4, 8 devices; float32.
"""

from __future__ import annotations

import dataclasses
from functools import cache, reduce
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from burnish.config.algorithms import GRPOConfig, GSPOConfig, PPOConfig
from burnish.config.optimizer import OptimizerConfig
from burnish.models.scalar_head import with_zero_score
from burnish.models.sharding import batch_sharding
from burnish.rl import aggregate
from burnish.rl.algorithms import from_config
from burnish.rl.batch import TokenBatch, build_batch, fit_shape, from_sequences
from burnish.rl.layout import BatchShape
from burnish.train.optim import make_optimizer
from burnish.train.state import leaf_names
from burnish.train.step import MicroBatch, make_steps
from burnish.train.value import ValueMicroBatch, make_value_steps

from .tiny_updates import CONFIG, base, groups

LAYOUTS = {
    "padded": {"layout": "padded"},
    "packed": {"layout": "packed", "row_tokens": 24},
    "shared": {"layout": "shared"},
    "packed and shared": {"layout": "shared", "row_tokens": 40},
}
DEVICES = (1, 2, 4, 8)
OPTIMIZER = make_optimizer(OptimizerConfig(), total_updates=1)


@cache
def numbers() -> dict[tuple[tuple[int, int], int], dict[str, np.ndarray]]:
    """For each episode and id: an advantage, a return, and what anchor, sampler and old critic said; the same whatever the layout."""
    rng = np.random.default_rng(5)
    names = ("advantages", "returns", "old_logps", "sampler_logps", "old_values")
    made = {}
    for group in groups(3):
        for t in group.trajectories:
            drawn = {name: rng.normal(size=t.num_sampled).astype(np.float32) for name in names}
            close = {name: -3 + 0.1 * drawn[name] for name in ("old_logps", "sampler_logps")}
            made[t.group, t.sample] = drawn | close
    return made


def laid_out(layout: str, devices: int) -> tuple[TokenBatch, dict[str, np.ndarray]]:
    """The batch of one layout, with rows for so many devices, and the scores that go with it.

    On one device each layout has the shape that fits it; on several, one that holds all layouts, as each shape is compiled once a number.
    """
    made, options = groups(3), LAYOUTS[layout]
    credits = {key: values["advantages"] for key, values in numbers().items()}
    multiple, held = (1, [options]) if devices == 1 else (max(DEVICES), LAYOUTS.values())
    shape = reduce(BatchShape.covering, [fit_shape(made, credits, rows_multiple=multiple, **each) for each in held])
    batch = build_batch(made, credits, temperature=0.9, shape=shape, **options)
    order = [(t.group, t.sample) for g in made for t in g.trajectories]

    def spread(name: str) -> np.ndarray:
        return from_sequences({i: numbers()[key][name] for i, key in enumerate(order)}, batch, fill=np.nan)

    batch = dataclasses.replace(batch, returns=spread("returns"), sampler_logps=spread("sampler_logps"))
    return batch, {name: spread(name) for name in ("old_logps", "old_values")}


def placed(tree: Any, devices: int) -> Any:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    return jax.device_put(tree, batch_sharding(mesh)), NamedSharding(mesh, PartitionSpec())


def policy_gradients(config: Any, layout: str, devices: int, steps: Any) -> dict[str, np.ndarray]:
    batch, extra = laid_out(layout, devices)
    (batch, old), everywhere = placed((batch, extra["old_logps"]), devices)
    totals = steps.totals(jax.device_put(base(), everywhere), None, MicroBatch(batch, old))
    return divided(totals)


def divided(totals: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(totals.gradients)
    return {name: np.asarray(g) / float(totals.loss.weight) for name, g in zip(leaf_names(totals.gradients), leaves, strict=True)}


def assert_one_gradient(gradients: dict[tuple[str, int], dict[str, np.ndarray]]) -> None:
    """Pairwise: each against the first, at half the tolerance."""
    first = next(iter(gradients.values()))
    assert sum(np.linalg.norm(g) > 1e-4 for g in first.values()) >= len(first) - 1, "hardly a gradient: nothing is tested"
    for where, found in gradients.items():
        for name, expected in first.items():
            assert np.linalg.norm(found[name] - expected) <= 0.5e-5 * np.linalg.norm(expected) + 0.5e-8, (where, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "config", [GRPOConfig(), GSPOConfig(epsilon=0.2, epsilon_high=0.28), PPOConfig(aggregation="sequence_mean")], ids=lambda c: c.name
)
def test_layouts_and_devices_give_one_gradient_of_the_policy(config: Any) -> None:
    steps = make_steps(CONFIG, from_config(config), OPTIMIZER, lora_scale=None, head_chunk=8)
    assert_one_gradient({(layout, n): policy_gradients(config, layout, n, steps) for layout in LAYOUTS for n in DEVICES})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_and_devices_give_one_gradient_of_the_critic() -> None:
    value_loss = from_config(PPOConfig()).value_loss
    assert value_loss is not None
    steps = make_value_steps(CONFIG, value_loss, aggregate.sequence_mean, OPTIMIZER, remat=False)
    params = with_zero_score(CONFIG, base())
    params = params | {"score": np.random.default_rng(0).normal(size=params["score"].shape).astype(np.float32)}

    def gradients(layout: str, devices: int) -> dict[str, np.ndarray]:
        batch, extra = laid_out(layout, devices)
        (batch, old), everywhere = placed((batch, extra["old_values"]), devices)
        return divided(steps.totals(jax.device_put(params, everywhere), None, ValueMicroBatch(batch, old)))

    assert_one_gradient({(layout, n): gradients(layout, n) for layout in LAYOUTS for n in DEVICES})
