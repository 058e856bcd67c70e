"""Locks schedules counted in updates, which leaves decay, which get Muon, and that every optimizer descends."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from burnish.config.optimizer import OptimizerConfig
from burnish.train.optim import decays, make_optimizer, make_schedule


def first_update(config: OptimizerConfig, gradients: Any) -> tuple[Any, Any]:
    """The updates and the state after one call on `params()`-like trees."""
    transform = make_optimizer(config, total_updates=1).transform
    start = jax.tree.map(jnp.zeros_like, gradients) if "embed" not in gradients else params()
    updates, state = transform.update(gradients, transform.init(start), start)
    return cast(Any, updates), state


def params() -> dict:
    key = jax.random.key(0)
    layers = {"q": jax.random.normal(key, (2, 8, 4)), "attn_norm": jnp.ones((2, 8)), "q_bias": jnp.ones((2, 4))}
    return {"embed": jax.random.normal(key, (10, 8)), "layers": layers, "final_norm": jnp.ones(8)}


def rates(config: OptimizerConfig, total: int, count: int) -> list[float]:
    schedule = make_schedule(config, total_updates=total)
    return [float(schedule(jnp.int32(i))) for i in range(count)]


def test_schedules_count_updates_b111():
    warmup = OptimizerConfig(learning_rate=1.0, warmup_updates=4)
    np.testing.assert_allclose(rates(warmup, 8, 6), [0, 0.25, 0.5, 0.75, 1, 1])
    cosine = OptimizerConfig(learning_rate=1.0, warmup_updates=2, schedule="cosine")
    np.testing.assert_allclose(rates(cosine, 6, 6), [0, 0.5, 1, 0.853553, 0.5, 0.146447], atol=1e-6)
    linear = OptimizerConfig(learning_rate=2.0, schedule="linear", min_ratio=0.5)
    np.testing.assert_allclose(rates(linear, 4, 6), [2, 1.75, 1.5, 1.25, 1, 1])


def test_a_warm_up_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="cosine schedule of 4 updates has no room after a warm-up of 4"):
        make_schedule(OptimizerConfig(schedule="cosine", warmup_updates=4), total_updates=4)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_each_optimizer_descends_and_never_decays_norms_and_biases(name, decay):
    config = OptimizerConfig(name=name, learning_rate=0.05, weight_decay=decay, max_grad_norm=None)
    transform = make_optimizer(config, total_updates=20).transform
    target = jax.tree.map(lambda x: x + 1.0, params())

    @jax.jit
    def step(p: Any, state: Any) -> tuple[Any, Any]:
        gradients: Any = jax.tree.map(jnp.subtract, p, target)
        gradients["layers"] = gradients["layers"] | {name: jnp.zeros_like(gradients["layers"][name]) for name in ("attn_norm", "q_bias")}
        updates, state = transform.update(gradients, state, p)
        return optax.apply_updates(p, updates), state

    now: Any = params()
    state = transform.init(now)
    for _ in range(20):
        now, state = step(now, state)
    for leaf in ("attn_norm", "q_bias"):
        np.testing.assert_array_equal(now["layers"][leaf], params()["layers"][leaf])
    if not decay:
        distance = [float(optax.tree.norm(jax.tree.map(jnp.subtract, p, target))) for p in (params(), now)]
        assert distance[1] < 0.7 * distance[0]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion"])
def test_without_a_gradient_decay_is_rate_times_decay_of_the_weight(name):
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5, max_grad_norm=None)
    updates, _ = first_update(config, jax.tree.map(jnp.zeros_like, params()))
    for leaf, flag in zip(jax.tree.leaves(updates), jax.tree.leaves(decays(params())), strict=True):
        assert np.any(leaf) == flag
    np.testing.assert_allclose(updates["embed"], -0.05 * params()["embed"], rtol=1e-5)
    np.testing.assert_allclose(updates["layers"]["q"], -0.05 * params()["layers"]["q"], rtol=1e-5)


def test_muon_orthogonalises_each_layers_matrix_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(name="muon", learning_rate=1.0, max_grad_norm=None)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params())
    updates, _ = first_update(config, gradients)
    expected, _ = first_update(OptimizerConfig(learning_rate=1.0, max_grad_norm=None), gradients)
    for path in (("embed",), ("final_norm",), ("layers", "q_bias")):
        ours, theirs = updates, expected
        for key in path:
            ours, theirs = ours[key], theirs[key]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    spread = [np.linalg.svd(np.asarray(m), compute_uv=False) for m in updates["layers"]["q"]]
    assert all(s.max() / s.min() < 2.5 for s in spread), spread
