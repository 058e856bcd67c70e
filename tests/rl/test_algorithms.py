"""Locks what a configuration means as a record of values."""

import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from burnish.config.algorithms import (
    AnyAlgorithmConfig,
    DAPOConfig,
    DPPOConfig,
    DrGRPOConfig,
    FunctionConfig,
    GDPOConfig,
    GRPOConfig,
    GSPOConfig,
    ImportanceConfig,
    MaxRLConfig,
    PPOConfig,
    ReinforcePPConfig,
    RejectionConfig,
    RLOOConfig,
)
from burnish.config.errors import UserError
from burnish.config.schema import Config
from burnish.rl.advantages import Advantages
from burnish.rl.algorithms import from_config
from burnish.rl.batch import Scores
from burnish.rl.credit import TokenEstimator

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


CONFIGS = get_args(get_args(AnyAlgorithmConfig)[0])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_fields["name"].default)
def test_every_algorithm_has_a_loss_with_a_gradient_and_takes_back_what_it_dumps(config):
    chosen = config()
    assert Config.model_validate({"algorithm": chosen.model_dump()}).algorithm == chosen
    algorithm = from_config(chosen, max_tokens=4)
    batch = scored([[1, 1, 0], [1, 1, 1]], [1.0, -0.5], prompts=[[0], [0]], sampler_logps=-1.0)
    slope = jax.grad(lambda x: algorithm.aggregate(algorithm.loss(Scores(logps=x), batch)[0], batch).total)(jnp.full((2, 3), -1.0))
    assert (np.sign(slope) == [[-1, -1, 0], [1, 1, 1]]).all(), slope


@pytest.mark.parametrize(
    ("config", "scope", "values"),
    [
        (DrGRPOConfig(), "group", [-1.0, 1.0, 0.0]),
        (RLOOConfig(), "group", [-2.0, 2.0, 0.0]),
        (MaxRLConfig(), "group", [-1.0, 1.0, 0.0]),
        (DAPOConfig(), "group", [-0.707106, 0.707106, 0.0]),
        (ReinforcePPConfig(), "batch", [-0.57735, 1.154699, -0.57735]),
    ],
)
def test_each_algorithm_has_its_own_advantage(config, scope, values):
    algorithm = from_config(config, max_tokens=4)
    assert algorithm.advantage_scope == scope
    np.testing.assert_allclose(algorithm.advantage([0.0, 2.0, 0.0], list("aab"), valid=np.ones(3, bool)).values, values, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GRPOConfig(num_generations=1), "num_generations is 1.*use at least 2"),
        (PPOConfig(zero_signal="drop"), "zero_signal is drop, but ppo compares no group"),
        (ReinforcePPConfig(zero_signal="resample"), "reinforce_pp compares no group"),
        (PPOConfig(credit="turn"), "credit is turn, but ppo credits every token by itself"),
        (PPOConfig(advantage=FunctionConfig(fn="burnish.rl.advantages:maxrl")), "the critic of ppo learns the returns"),
        (GRPOConfig(beta=0.1, kl_in="reward", credit="turn"), "credited to whole episodes"),
        (GRPOConfig(gamma=0.9), "gamma is 0.9, but credit by trajectory discounts nothing"),
        (GDPOConfig(beta=0.1, kl_in="reward"), "gdpo normalises each reward"),
        (MaxRLConfig(beta=0.1, kl_in="reward"), "maxrl divides by the group's mean reward"),
        (GRPOConfig(old="sampler", rejection=RejectionConfig()), "they are the same"),
        (GRPOConfig(old="sampler", importance=ImportanceConfig(cap=3.0)), "algorithm.importance .* they are the same"),
        (DrGRPOConfig(), "needs algorithm.fixed_length"),
        (GRPOConfig(loss=FunctionConfig(fn="./nowhere.py:fn")), "no file ./nowhere.py"),
    ],
)
def test_options_that_contradict_each_other_fail_at_construction(config, told):
    with pytest.raises(UserError, match=told):
        from_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "grppo"},
        {"name": "gspo", "level": "word"},
        {"name": "cispo", "dual_clip": 3.0},
        {"aggregation": "tokn_mean"},
        {"fixed_length": 3},
    ],
)
def test_a_misspelt_name_or_an_option_of_another_algorithm_fails_in_the_configuration(changes):
    with pytest.raises(ValidationError):
        Config.model_validate({"algorithm": {"name": "grpo", **changes}})


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (GRPOConfig(old="recomputed"), {"old"}),
        (GRPOConfig(old="sampler", num_iterations=2), set()),
        (PPOConfig(), {"values"}),
        (PPOConfig(beta=0.1), {"values", "reference"}),
    ],
)
def test_old_and_the_critic_decide_the_passes(config, needed):
    assert from_config(config).scores_needed == needed


def test_importance_weights_correct_for_the_sampler_unless_it_is_the_anchor():
    """exp(old - sampler) = 1.5 on the first token; the penalty stays outside of the weight."""
    batch = scored([[1, 1]], [1.0], sampler_logps=[[-math.log(1.5), 0.0]])
    scores = Scores(logps=jnp.zeros((1, 2)), old_logps=jnp.zeros((1, 2)), ref_logps=jnp.full((1, 2), -1.0))

    def first(**changes) -> float:
        return float(from_config(GRPOConfig(**changes)).loss(scores, batch)[0][0, 0])

    assert first() == pytest.approx(-1.5)
    assert first(importance=ImportanceConfig(cap=1.2)) == pytest.approx(-1.2)
    assert first(importance=ImportanceConfig(cap=1.2, mode="mask")) == pytest.approx(0.0)
    assert first(importance=None) == first(old="sampler") == pytest.approx(-1.0)
    assert first(beta=0.1, kl_estimator="k1") == pytest.approx(-1.5 + 0.1)


def test_a_penalty_in_the_reward_has_no_place_in_the_loss():
    algorithm = from_config(GRPOConfig(beta=0.1, kl_in="reward", kl_estimator="k1"))
    assert loss_of(algorithm) == loss_of(from_config(GRPOConfig()))
    assert isinstance(algorithm.advantage, TokenEstimator) and algorithm.reward_kl is not None
    assert algorithm.reward_kl.beta == 0.1 and float(algorithm.reward_kl.estimator(jnp.zeros((1, 1)), jnp.ones((1, 1)))[0, 0]) == -1.0


def test_an_entropy_bonus_asks_for_a_gradient_through_the_entropy():
    algorithm = from_config(GRPOConfig(entropy_bonus=0.5))
    assert algorithm.entropy_gradient and not from_config(GRPOConfig()).entropy_gradient
    with_entropy = dataclasses.replace(SCORES, entropy=jnp.full((1, 2), 2.0))
    plain = float(from_config(GRPOConfig()).loss(SCORES, BATCH)[0][0, 0])
    assert float(algorithm.loss(with_entropy, BATCH)[0][0, 0]) == pytest.approx(plain - 1.0)


def test_a_users_functions_are_named_with_options_that_are_checked(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom burnish.rl.advantages import Advantages\n\n"
        "def half(scores, batch, *, factor=0.5):\n    return -factor * scores.logps * batch.advantages, {}\n\n"
        "def bare(s, b, *, factor):\n    return half(s, b, factor=factor)\n\n"
        "def raw(rewards, group_ids, *, valid):\n    return Advantages(np.array(rewards, np.float32), valid)\n"
    )
    named = {"loss": FunctionConfig(fn="./mine.py:half", options={"factor": 3.0}), "advantage": FunctionConfig(fn="./mine.py:raw")}
    algorithm = from_config(GRPOConfig(importance=None, num_generations=1, **named), base=tmp_path)
    assert loss_of(algorithm) == pytest.approx(-3.0 * math.log(2) / 2)
    assert algorithm.advantage([2.0], ["g"], valid=np.ones(1, bool)).values.tolist() == [2.0]
    with pytest.raises(UserError, match="loss `./mine.py:half`: it takes no `factr`; did you mean `factor`"):
        from_config(GRPOConfig(loss=FunctionConfig(fn="./mine.py:half", options={"factr": 3.0})), base=tmp_path)
    with pytest.raises(UserError, match="loss `./mine.py:bare`: it needs `factor`"):
        from_config(GRPOConfig(loss=FunctionConfig(fn="./mine.py:bare")), base=tmp_path)


def own(*args, **options):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("config", "own_functions", "told"),
    [
        (GRPOConfig(epsilon=0.1, dual_clip=3.0), {"loss": own}, "algorithm.epsilon, algorithm.dual_clip: only the loss of grpo reads that"),
        (GSPOConfig(level="token"), {"loss": own}, "algorithm.level: only the loss of gspo"),
        (DPPOConfig(threshold=0.1), {"loss": own}, "algorithm.threshold: only the loss of dppo"),
        (GRPOConfig(scale_rewards="none"), {"advantage": own}, "algorithm.scale_rewards: only the advantage of grpo"),
        (ReinforcePPConfig(baseline=True), {"advantage": own}, "algorithm.baseline: only the advantage of reinforce_pp"),
    ],
)
def test_b127_an_option_that_a_users_function_leaves_without_a_reader_is_refused(config, own_functions, told):
    with pytest.raises(UserError, match=told):
        from_config(config, **own_functions)
    from_config(type(config)(), **own_functions)


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


@pytest.mark.parametrize("importance", [ImportanceConfig(), None])
def test_a_users_loss_that_takes_a_mean_itself_is_refused(importance):
    algorithm = from_config(GRPOConfig(importance=importance), loss=lambda scores, batch: (jnp.mean(scores.logps * batch.advantages), {}))
    with pytest.raises(ValueError, match=r"one value a scored token, shape \(1, 2\).*got shape \(\)"):
        loss_of(algorithm)


def test_a_record_runs_under_jit_and_grad():
    algorithm = from_config(GRPOConfig(beta=0.1))

    @jax.jit
    def slope(logps):
        scores = dataclasses.replace(SCORES, logps=logps)
        return jax.grad(lambda x: algorithm.aggregate(algorithm.loss(dataclasses.replace(scores, logps=x), BATCH)[0], BATCH).total)(logps)

    # the first ratio is clipped: only the KL moves it
    np.testing.assert_allclose(slope(SCORES.logps)[0], [0.1 * (1 - math.exp(-1) / 2), -1 + 0.1 * (1 - math.exp(-1))], rtol=1e-5)
