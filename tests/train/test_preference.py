"""Locks the preference losses: values worked out by hand, gradients, which tokens count, and that no cut of a mini-batch changes them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.train import preference
from burnish.train.preference import Answers, Kto, answer_sums, answers, reference_point
from tests.rl.batches import scored

PAIR = Answers(jnp.array([-2.0, -4.0]), jnp.array([-3.0, -3.0]), jnp.array([4.0, 2.0]))
"""Chosen: 4 tokens, log π -2, log π_ref -3, so +1. Rejected: 2 tokens, -4 and -3, so -1. h = 2; per token 0.25 + 0.5 = 0.75."""
EQUAL = Answers(jnp.array([-3.0, -3.0]), jnp.array([-3.0, -3.0]), jnp.array([4.0, 2.0]))

LOSSES = {
    "sigmoid": preference.sigmoid(beta=0.1),
    "cdpo": preference.sigmoid(beta=0.1, label_smoothing=0.1),
    "robust": preference.robust(beta=0.1, label_smoothing=0.1),
    "ipo": preference.ipo(beta=0.1),
    "hinge": preference.hinge(beta=0.1),
    "simpo": preference.simpo(beta=2.0, margin=1.0),
    "cpo": preference.cpo(beta=0.1),
    "orpo": preference.orpo(beta=0.1),
    "sigmoid, per token": preference.sigmoid(beta=2.0).length_normalised(),
    "ipo, per token": preference.ipo(beta=0.5).length_normalised(),
}

BY_HAND = {
    "sigmoid": 0.598139,  # -log σ(0.1 · 2) = log(1 + e^-0.2)
    "cdpo": 0.618139,  # 0.9 · 0.598139 + 0.1 · (0.598139 + 0.2)
    "robust": 0.573139,  # (0.9 · 0.598139 - 0.1 · 0.798139) / 0.8
    "ipo": 9.0,  # (2 - 5)²
    "hinge": 0.8,  # 1 - 0.2
    "simpo": 0.126928,  # means -0.5 and -2: log(1 + e^-(2 · 1.5 - 1))
    "cpo": 1.098139,  # h = -2 + 4, so 0.598139, and 2 / 4 beside it
    "orpo": 0.509671,  # log odds 0.432752 and -1.854587: 0.1 · log(1 + e^-2.287339) + 0.5
    "sigmoid, per token": 0.201413,  # log(1 + e^-1.5)
    "ipo, per token": 0.0625,  # (0.75 - 1)²
}

SLOPES = {
    "sigmoid": (-0.045017, 0.045017),  # -β σ(-0.2) = -0.1 · 0.450166
    "cdpo": (-0.035017, 0.035017),  # -β (σ(-0.2) - 0.1)
    "robust": (-0.057517, 0.057517),  # -β (0.9 · 0.450166 + 0.1 · 0.549834) / 0.8
    "ipo": (-6.0, 6.0),  # 2 (2 - 5)
    "hinge": (-0.1, 0.1),
    "simpo": (-0.059601, 0.119203),  # -2 σ(-2) over 4 and 2 tokens
    "cpo": (-0.295017, 0.045017),  # DPO's, and -1 / 4 of the chosen's likelihood
    "orpo": (-0.255857, 0.005330),  # -0.1 · 0.092177 / (1 - e^mean) over the tokens, and -1 / 4
    "sigmoid, per token": (-0.091213, 0.182426),  # -2 σ(-1.5) over 4 and 2 tokens
    "ipo, per token": (-0.125, 0.25),  # 2 (0.75 - 1) over 4 and 2 tokens
}
"""Of the chosen's and the rejected's log-prob."""


def value(loss, both: Answers = PAIR) -> float:
    return float(loss(both)[0].value())


def slope(loss, both: Answers = PAIR) -> np.ndarray:
    """d loss / d log-prob of every answer."""
    return np.asarray(jax.grad(lambda x: loss(Answers(x, both.ref_logps, both.tokens))[0].value())(both.logps))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_value_is_the_one_worked_out_by_hand(name: str, compiled: bool) -> None:
    loss = jax.jit(LOSSES[name]) if compiled else LOSSES[name]
    assert value(loss) == pytest.approx(BY_HAND[name], abs=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_one_worked_out_by_hand(name: str) -> None:
    np.testing.assert_allclose(slope(LOSSES[name]), SLOPES[name], atol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_of_a_policy_that_is_its_reference_is_ln_2(smoothing: float) -> None:
    assert value(preference.sigmoid(label_smoothing=smoothing), EQUAL) == pytest.approx(math.log(2), abs=1e-6)
    assert float(preference.sigmoid()(EQUAL)[1]["preference/accuracy"].value()) == 0.0  # a tie is no preference


def test_a_hinge_that_is_far_enough_has_no_gradient() -> None:
    far = Answers(jnp.array([3.0, -9.0]), PAIR.ref_logps, PAIR.tokens)  # h = 12, past 1 / β
    assert value(preference.hinge(), far) == 0.0 and not slope(preference.hinge(), far).any()


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    sure = Answers(jnp.array([0.0, -4.0]), None, PAIR.tokens)
    assert np.isfinite(value(preference.orpo(), sure)) and np.isfinite(slope(preference.orpo(), sure)).all()


def test_a_loss_without_a_reference_needs_none_and_one_with_says_so() -> None:
    without = Answers(PAIR.logps, None, PAIR.tokens)
    for name, loss in LOSSES.items():
        if loss.needs_reference:
            with pytest.raises(ValueError, match="reference"):
                loss(without)
        else:
            assert value(loss, without) == pytest.approx(BY_HAND[name], abs=2e-6)


def test_robust_refuses_labels_that_say_nothing() -> None:
    with pytest.raises(ValueError, match="got 0.5"):
        preference.robust(label_smoothing=0.5)


def test_what_is_measured_is_in_units_of_the_loss_s_own_worth() -> None:
    metrics = {name: float(metric.value()) for name, metric in preference.sigmoid()(PAIR)[1].items()}
    assert metrics == {"preference/accuracy": 1.0, "preference/margin": 2.0, "preference/chosen": 1.0, "preference/rejected": -1.0}


# ------------------------------------------------------------------------------------------------------------------------- KTO

ONE_BY_ONE = Answers(jnp.array([-2.0, -4.0, 0.0]), jnp.array([-3.0, -3.0, 0.0]), jnp.array([4.0, 2.0, 0.0]))
DESIRABLE = jnp.array([True, False, True])


def kto(point: float, logps: jax.Array = ONE_BY_ONE.logps) -> jax.Array:
    x = Answers(logps, ONE_BY_ONE.ref_logps, ONE_BY_ONE.tokens)
    return Kto(beta=0.1, undesirable_weight=1.5)(x, DESIRABLE, jnp.float32(point))[0].value()


def test_kto_by_hand() -> None:
    # 1 - σ(0.1 (1 - 0.5)) = 0.487503; 1.5 (1 - σ(0.1 (0.5 + 1))) = 0.693855; the third answer isn't there
    assert float(kto(0.5)) == pytest.approx((0.487503 + 0.693855) / 2, abs=1e-6)
    # -β σ(x) σ(-x) / 2 of each: up for the desirable, down for the undesirable
    np.testing.assert_allclose(jax.grad(lambda x: kto(0.5, x))(ONE_BY_ONE.logps), [-0.012492, 0.018645, 0.0], atol=1e-6)
    assert float(jax.grad(kto)(0.5)) == 0.0  # the reference point is a constant


def test_the_reference_point_of_kto_is_a_mean_of_log_ratios() -> None:
    assert float(reference_point(ONE_BY_ONE).value()) == 0.0 and float(reference_point(ONE_BY_ONE).weight) == 2.0


# -------------------------------------------------------------------------------------------------------- which tokens count

MASK = [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1, 0]]
"""Two pairs, one a row: prompt, chosen's tokens, prompt, rejected's tokens."""
BATCH = scored(MASK, sequences=[[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3, 3, 3]])
LOGPS = -jnp.arange(1, 17, dtype=jnp.float32).reshape(2, 8) / 10
REF = LOGPS - 0.1


def of_batch(loss, logps: jax.Array = LOGPS, ref_logps: jax.Array = REF, batch=BATCH) -> jax.Array:
    return loss(answers(batch, logps, answer_sums(batch, ref_logps)))[0].value()


def test_sums_are_of_an_answer_s_own_tokens() -> None:
    both = answers(BATCH, LOGPS)
    np.testing.assert_allclose(both.logps, [-0.7, -1.5, -2.5, -1.5], rtol=1e-6)
    np.testing.assert_allclose(both.tokens, [2, 2, 2, 1])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("noise", [-7.0, math.nan, math.inf])
def test_log_probs_of_prompts_change_nothing_on_either_side(name: str, noise: float) -> None:
    prompts = jnp.asarray(np.logical_not(BATCH.mask))
    changed, changed_ref = jnp.where(prompts, noise, LOGPS), jnp.where(prompts, noise, REF)
    loss = functools.partial(of_batch, LOSSES[name])
    assert float(loss(changed, changed_ref)) == float(loss(LOGPS, REF))
    gradient = jax.grad(loss)(changed, changed_ref)
    np.testing.assert_array_equal(gradient, jax.grad(loss)(LOGPS, REF))
    assert not np.any(np.asarray(gradient)[np.asarray(prompts)]) and np.all(np.asarray(gradient)[BATCH.mask])


def test_plus_and_minus_one_on_the_two_halves_of_a_batch_is_the_worked_case() -> None:
    chosen, rejected = (jnp.asarray((BATCH.sequences % 2 == i) & BATCH.mask) for i in (0, 1))
    counts = jnp.asarray([[2.0] * 8, [2.0] * 5 + [1.0] * 3])
    moved = REF + jnp.where(chosen, 1.0, jnp.where(rejected, -1.0, 0.0)) / counts  # +1 and -1 an answer
    assert float(of_batch(LOSSES["sigmoid"], REF)) == pytest.approx(0.693147, abs=1e-6)
    assert float(of_batch(LOSSES["sigmoid"], moved)) == pytest.approx(0.598139, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mini_batch_may_be_cut_between_its_pairs(name: str) -> None:
    loss = LOSSES[name]
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], BATCH) for i in range(2)]

    def cut(logps: jax.Array) -> jax.Array:
        first, second = (loss(answers(part, logps[i : i + 1], answer_sums(part, REF[i : i + 1])))[0] for i, part in enumerate(parts))
        return (first + second).value()

    whole = jax.value_and_grad(functools.partial(of_batch, loss))(LOGPS)
    for a, b in zip(jax.value_and_grad(cut)(LOGPS), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
