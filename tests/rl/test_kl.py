"""Locks the KL estimators: their numbers, their gradients as documented, and the penalty that they make."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl.aggregate import sequence_mean
from burnish.rl.batch import Scores
from burnish.rl.kl import MAX_KL_RATIO, k1, k2, k3, with_kl

from .batches import scored
from .test_losses import BATCH, LOGPS, clip_loss, one, value


@pytest.mark.parametrize(("estimator", "expected"), [(k3, -0.233436), (k1, -0.234508)])
def test_kl_penalty_values(estimator, expected):
    assert value(with_kl(clip_loss, beta=0.04, estimator=estimator), sequence_mean) == pytest.approx(expected, abs=1e-6)


def test_kl_estimators_on_pairs():
    logps = jnp.array([[0.9673288, 0.8919369, 0.73399556, 0.891657]], jnp.float32)
    ref = jnp.array([[0.58246386, 0.14501631, 0.38447607, 0.32954407]], jnp.float32)
    np.testing.assert_allclose(k1(logps, ref)[0], [0.384865, 0.746921, 0.349520, 0.562113], atol=1e-6)
    np.testing.assert_allclose(k2(logps, ref)[0], [0.0740605, 0.278945, 0.0610819, 0.157985], atol=1e-6)
    np.testing.assert_allclose(k3(logps, ref)[0], [0.0654075, 0.220744, 0.0545462, 0.1321163], atol=1e-6)


@pytest.mark.parametrize(("logp", "ref", "expected"), [(-1, -2, (1, 0.5, 0.367879)), (-2, -1, (-1, 0.5, 0.718282))])
def test_kl_sign_and_direction_B043(logp, ref, expected):
    got = [float(estimator(one(logp), one(ref))[0, 0]) for estimator in (k1, k2, k3)]
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("d", [-2.0, -0.3, 0.0, 0.4, 3.0])
def test_kl_gradients_are_the_documented_ones(d):
    gradients = [float(jax.grad(lambda x, f=f: f(x, one(-1.0))[0, 0])(one(d - 1.0))[0, 0]) for f in (k1, k2, k3)]
    assert gradients == pytest.approx([1.0, d, 1 - math.exp(-d)], abs=1e-5)


def test_expected_kl_gradients_over_the_policy_are_those_of_the_two_divergences():
    """k1's is 0, k2's that of KL(policy ‖ reference), k3's that of KL(reference ‖ policy): the sentences of the docstrings."""
    logits, ref = jnp.array([0.3, -1.0, 0.8]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.4]))

    def expected(estimator):
        probabilities = jax.nn.softmax(logits)
        return jax.grad(lambda z: jnp.sum(probabilities * estimator(jax.nn.log_softmax(z)[None], ref[None])[0]))(logits)

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q))

    np.testing.assert_allclose(expected(k1), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(expected(k2), jax.grad(lambda z: divergence(jax.nn.log_softmax(z), ref))(logits), atol=1e-6)
    np.testing.assert_allclose(expected(k3), jax.grad(lambda z: divergence(ref, jax.nn.log_softmax(z)))(logits), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("ref", [100.0, 50.0, -100.0])
def test_k3_is_clamped_before_exp_B041_R17(dtype, ref):
    logps, ref_logps = one(0.0).astype(dtype), one(ref).astype(dtype)
    result, slope = jax.value_and_grad(lambda x: k3(x, ref_logps)[0, 0])(logps)
    assert 0 <= float(result) <= MAX_KL_RATIO
    assert float(slope[0, 0]) == (0.0 if ref > 0 else 1.0)


def test_reference_equal_to_policy_has_kl_exactly_0_on_a_mask_with_a_hole_B047():
    batch = scored([[1, 0, 1], [0, 1, 1]], [1.0, -0.5])
    _, metrics = with_kl(clip_loss, beta=0.1, estimator=k3)(Scores(logps=LOGPS, ref_logps=LOGPS), batch)
    assert float(metrics["policy/kl"].value()) == 0.0


def test_a_kl_penalty_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        with_kl(clip_loss, beta=0.1, estimator=k3)(Scores(logps=LOGPS), BATCH)
