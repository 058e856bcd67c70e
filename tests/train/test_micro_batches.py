"""Locks that the gradient doesn't know how a mini-batch was cut into micro-batches of so many tokens, or spread over devices."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from burnish.config.algorithms import GRPOConfig
from burnish.models import transformer
from burnish.models.sharding import batch_sharding, shardings
from burnish.rl.batch import build_micro_batches
from burnish.train.state import leaf_names
from burnish.train.step import MicroBatch

from .tiny_updates import CONFIG, batch, groups, steps_of


def summed(
    micros: list[MicroBatch], aggregation: Literal["token_mean", "prompt_mean"] = "token_mean"
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and gradient by leaf, of micro-batches together."""
    steps, state, frozen = steps_of(algorithm=GRPOConfig(aggregation=aggregation))
    totals = steps.zeros(state.trainable, frozen, micros[0])
    for micro in micros:
        totals = steps.accumulate(totals, state.trainable, frozen, micro)
    names, leaves = leaf_names(totals.gradients), jax.tree.leaves(totals.gradients)
    return float(totals.loss.value()), {n: np.asarray(g) / float(totals.loss.weight) for n, g in zip(names, leaves, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "devices", "aggregation"), [(16, 1, "token_mean"), (24, 1, "token_mean"), (16, 4, "prompt_mean")])
def test_micro_batches_of_so_many_tokens_have_the_gradient_of_the_whole(tokens, devices, aggregation):
    made = groups(num_groups=4)
    expected = summed([MicroBatch(batch(made, layout="padded"))], aggregation)
    values = {(t.group, t.sample): t.sample - 1.5 for g in made for t in g.trajectories}
    micros = build_micro_batches(made, values, temperature=0.9, tokens_per_device=tokens, rows_multiple=devices)
    assert len(micros) > 1 and micros[0].tokens.shape == (devices, tokens)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(m, batch_sharding(mesh)) if devices > 1 else jax.tree.map(jnp.asarray, m) for m in micros]
    loss, gradients = summed([MicroBatch(m) for m in placed], aggregation)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=1e-6)
    for name, e in expected[1].items():
        assert np.linalg.norm(gradients[name] - e) <= 1e-5 * np.linalg.norm(e) + 1e-8, name
        assert np.linalg.norm(e) > 1e-4, f"{name} has hardly a gradient: nothing is tested"


def test_the_sum_of_gradients_starts_where_its_leaves_lie():
    """Whole on the first device, it would be what doesn't fit there."""
    steps, state, _ = steps_of(lora=False)
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Auto,))
    spread = jax.tree.map(jax.device_put, state.trainable, shardings(transformer.spec(CONFIG), mesh))
    totals = steps.zeros(spread, None, MicroBatch(batch(groups())))
    for leaf, gradient in zip(jax.tree.leaves(spread), jax.tree.leaves(totals.gradients), strict=True):
        assert gradient.sharding == leaf.sharding and len(gradient.devices()) == 2 and not np.asarray(gradient).any()
