"""Locks what a configuration means as a record of values."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.algorithms import GRPOConfig
from burnish.rl.advantages import Advantages
from burnish.rl.algorithms import from_config
from burnish.rl.batch import Scores

from .batches import scored

SCORES = Scores(logps=jnp.array([[math.log(2.0), 0.0]]), old_logps=jnp.zeros((1, 2)), ref_logps=jnp.full((1, 2), -1.0))
BATCH = scored([[1, 1]], [1.0])


def loss_of(algorithm) -> float:
    return float(algorithm.aggregate(algorithm.loss(SCORES, BATCH)[0], BATCH).value())


def test_grpo_by_default():
    algorithm = from_config(GRPOConfig())
    assert algorithm.scores_needed == frozenset()
    assert (algorithm.name, algorithm.advantage_scope, algorithm.num_generations, algorithm.train_truncated) == ("grpo", "group", 8, True)
    assert loss_of(algorithm) == pytest.approx(-(1.2 + 1.0) / 2)
    advantages = algorithm.advantage([1, 0, 0, 1], ["g"] * 4, valid=np.ones(4, bool)).values
    np.testing.assert_allclose(advantages, np.array([1, -1, -1, 1]) * 0.866024, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epsilon": 0.1}, -(1.1 + 1) / 2),
        ({"epsilon_high": 0.5}, -(1.5 + 1) / 2),
        ({"aggregation": "fixed_length_mean", "fixed_length": 4}, -(1.2 + 1) / 4),
        ({"beta": 0.1, "kl_estimator": "k1"}, (-(1.2 + 1) + 0.1 * (1 + math.log(2) + 1)) / 2),
        ({"beta": 0.1, "kl_estimator": "k2"}, (-(1.2 + 1) + 0.1 * ((1 + math.log(2)) ** 2 / 2 + 0.5)) / 2),
        ({"beta": 0.1}, (-(1.2 + 1) + 0.1 * (math.exp(-1 - math.log(2)) + math.log(2) + math.exp(-1))) / 2),
    ],
)
def test_each_option_of_the_loss_has_its_effect_B127(changes, expected):
    assert loss_of(from_config(GRPOConfig(**changes))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
def test_the_aggregation_is_the_one_that_is_named(aggregation):
    per_token = jnp.array([[1.0, 1, 1], [4, 0, 0], [3, 0, 0]])
    batch = scored([[1, 1, 1], [1, 0, 0], [1, 0, 0]], prompts=[[0], [0], [1]])
    mean = float(from_config(GRPOConfig(aggregation=aggregation)).aggregate(per_token, batch).value())
    assert mean == pytest.approx({"token_mean": 2.0, "sequence_mean": 8 / 3, "prompt_mean": (7 / 4 + 3) / 2}[aggregation])


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, set()),
        ({"num_iterations": 2}, {"old"}),
        ({"beta": 0.1}, {"reference"}),
        ({"beta": 0.1, "num_iterations": 2}, {"old", "reference"}),
    ],
)
def test_only_passes_that_are_used_are_asked_for(changes, needed):
    assert from_config(GRPOConfig(**changes)).scores_needed == needed


@pytest.mark.parametrize(("scale", "scope"), [("group", "group"), ("none", "group"), ("batch", "batch")])
def test_scale_decides_what_the_estimator_must_see(scale, scope):
    algorithm = from_config(GRPOConfig(scale_rewards=scale))
    assert algorithm.advantage_scope == scope
    got = algorithm.advantage([0.0, 1.0, 0.0, 3.0], list("aabb"), valid=np.ones(4, bool)).values
    divisor = {"group": math.sqrt(0.5), "none": 1.0, "batch": np.std([0, 1, 0, 3], ddof=1)}[scale]
    assert got[0] == pytest.approx(-0.5 / divisor, rel=1e-5)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ValueError, match="algorithm.num_generations is 1.*use at least 2"):
        from_config(GRPOConfig(num_generations=1))


def test_a_users_own_loss_and_advantage_are_one_function_each():
    def raw(rewards, group_ids, /, *, valid):
        return Advantages(np.where(valid, np.array(rewards, np.float32), np.float32(0)), valid)

    def squared(scores, batch, /):
        return jnp.square(scores.logps) * batch.advantages, {}

    algorithm = from_config(GRPOConfig(num_generations=1, beta=0.5, kl_estimator="k1"), loss=squared, advantage=raw)
    assert algorithm.advantage([3.0], ["g"], valid=np.ones(1, bool)).values.tolist() == [3.0]
    assert algorithm.scores_needed == {"reference"}
    assert loss_of(algorithm) == pytest.approx((math.log(2) ** 2 + 0.5 * (math.log(2) + 2)) / 2, rel=1e-5)
    assert loss_of(dataclasses.replace(algorithm, loss=squared)) == pytest.approx(math.log(2) ** 2 / 2, rel=1e-5)


def test_a_record_runs_under_jit_and_grad():
    algorithm = from_config(GRPOConfig(beta=0.1))

    @jax.jit
    def slope(logps):
        scores = dataclasses.replace(SCORES, logps=logps)
        return jax.grad(lambda x: algorithm.aggregate(algorithm.loss(dataclasses.replace(scores, logps=x), BATCH)[0], BATCH).total)(logps)

    # the first ratio is clipped: only the KL moves it
    np.testing.assert_allclose(slope(SCORES.logps)[0], [0.1 * (1 - math.exp(-1) / 2), -1 + 0.1 * (1 - math.exp(-1))], rtol=1e-5)
