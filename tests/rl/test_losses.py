"""Locks the losses' values and gradients, what they report, and that nothing at padding gets through."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl import losses
from burnish.rl.aggregate import sequence_mean, token_mean
from burnish.rl.batch import Scores
from burnish.rl.losses import clipped, k1, k2, k3, mismatch, reinforce, with_kl

from .batches import scored

LOGPS = jnp.array([[-1, -0.5, -2], [-0.7, -1.2, -0.1]], jnp.float32)
OLD = jnp.array([[-1.1, -0.9, -1], [-0.7, -0.8, -0.6]], jnp.float32)
REF = jnp.array([[-0.9, -0.6, -2.2], [-0.5, -1.2, -0.3]], jnp.float32)
MASK = [[1, 1, 1], [1, 1, 0]]
BATCH = scored(MASK, [1.0, -0.5])
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}


def clip_loss(scores, batch):
    return clipped(scores, batch, **CLIP)


def value(loss, aggregate=token_mean, *, logps=LOGPS, old: jax.Array | None = OLD, ref: jax.Array | None = REF, batch=BATCH) -> float:
    return float(aggregate(loss(Scores(logps=logps, old_logps=old, ref_logps=ref), batch)[0], batch).value())


def gradient(loss, *, logps=LOGPS, old: jax.Array | None = OLD, ref: jax.Array | None = REF, batch=BATCH):
    """d(sum of per-token losses) / d(logps)."""
    return jax.grad(lambda x: jnp.sum(loss(Scores(logps=x, old_logps=old, ref_logps=ref), batch)[0]))(logps)


def one(number: float) -> jax.Array:
    return jnp.array([[number]], jnp.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_clipped_values(wrap):
    loss = wrap(clip_loss)
    assert value(loss, token_mean) == pytest.approx(-0.370610, abs=1e-6)
    assert value(loss, sequence_mean) == pytest.approx(-0.233842, abs=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [(k3, -0.233436), (k1, -0.234508)])
def test_kl_penalty_values(estimator, expected):
    assert value(with_kl(clip_loss, beta=0.04, estimator=estimator), sequence_mean) == pytest.approx(expected, abs=1e-6)


def test_importance_weights_multiply_what_a_loss_returns():
    weights = jnp.array([[0.5, 2, 1], [1, 1.5, 1]], jnp.float32)
    per_token, _ = clip_loss(Scores(logps=LOGPS, old_logps=OLD), BATCH)
    assert float(token_mean(weights * per_token, BATCH).value()) == pytest.approx(-0.476093, abs=1e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    old = OLD.at[1, 1].set(-3.2)
    assert value(clip_loss, old=old) == pytest.approx(0.288296, abs=1e-6)
    dual = lambda scores, batch: clipped(scores, batch, **CLIP, dual_clip=3.0)  # noqa: E731
    assert value(dual, old=old) == pytest.approx(-0.150610, abs=1e-6)
    assert gradient(dual, old=old)[1, 1] == 0 and gradient(clip_loss, old=old)[1, 1] != 0
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        clipped(Scores(logps=LOGPS), BATCH, dual_clip=0.5)


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (0.5, 1, -0.5), (1.5, -1, 1.5), (0.5, -1, 0.8)])
def test_clip_table_B045(ratio, advantage, expected):
    scores = Scores(logps=one(math.log(ratio)), old_logps=one(0.0))
    per_token, _ = clipped(scores, scored([[1]], [advantage]), epsilon=0.2)
    assert float(per_token[0, 0]) == pytest.approx(expected, abs=1e-6)


def test_clipped_gradient_is_minus_advantage_times_ratio_and_0_where_the_clip_binds():
    ratio = np.exp(np.asarray(LOGPS - OLD))
    expected = -np.asarray(BATCH.advantages) * ratio
    expected[0, 1] = 0  # 1.49 above 1.28, advantage positive
    expected[1, 1] = 0  # 0.67 below 0.8, advantage negative
    expected[1, 2] = 0  # padding
    np.testing.assert_allclose(gradient(clip_loss), expected, rtol=1e-6)


def test_clip_fractions_count_only_where_the_clip_binds():
    _, metrics = clip_loss(Scores(logps=LOGPS, old_logps=OLD), BATCH)
    assert float(metrics["policy/clip_low_fraction"].value()) == pytest.approx(0.2)
    assert float(metrics["policy/clip_high_fraction"].value()) == pytest.approx(0.2)
    assert float(metrics["policy/ratio_mean"].value()) == pytest.approx(0.92704, abs=1e-5)


def test_without_old_log_probs_the_ratio_is_exactly_1_and_the_gradient_reinforce_B045():
    per_token, metrics = clip_loss(Scores(logps=LOGPS), BATCH)
    assert float(metrics["policy/ratio_mean"].value()) == 1.0
    np.testing.assert_array_equal(per_token, np.where(MASK, -BATCH.advantages, 0))
    np.testing.assert_array_equal(gradient(clip_loss, old=None), gradient(reinforce))
    assert float(jnp.abs(gradient(reinforce)).sum()) == 4.0


def test_reinforce_values():
    assert value(reinforce) == pytest.approx((1.0 + 0.5 + 2.0 - 0.35 - 0.6) / 5)


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
    assert 0 <= float(result) <= losses.MAX_KL_RATIO
    assert float(slope[0, 0]) == (0.0 if ref > 0 else 1.0)


def test_a_far_anchor_gives_finite_losses_and_gradients_R17():
    for old in (-100.0, 100.0):
        scores = Scores(logps=one(0.0), old_logps=one(old))
        for advantage in (1.0, -1.0):
            batch = scored([[1]], [advantage])
            per_token, metrics = clip_loss(scores, batch)
            slope = gradient(clip_loss, logps=one(0.0), old=one(old), ref=None, batch=batch)
            assert np.isfinite(per_token).all() and np.isfinite(slope).all()
            assert np.isfinite(metrics["policy/ratio_mean"].total)


@pytest.mark.parametrize(
    "loss", [clip_loss, reinforce, with_kl(clip_loss, beta=0.1, estimator=k3), with_kl(reinforce, beta=0.1, estimator=k2)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_at_padding_gets_through_B027_R17(loss, bad):
    def dirty(x):
        return jnp.where(jnp.array(MASK, bool), x, bad)

    expected = gradient(loss)
    batch = scored(MASK, np.where(MASK, BATCH.advantages, bad))
    got = gradient(loss, logps=dirty(LOGPS), old=dirty(OLD), ref=dirty(REF), batch=batch)
    np.testing.assert_array_equal(got, expected)
    assert value(loss, logps=dirty(LOGPS), old=dirty(OLD), ref=dirty(REF), batch=batch) == value(loss)
    _, metrics = loss(Scores(logps=dirty(LOGPS), old_logps=dirty(OLD), ref_logps=dirty(REF)), batch)
    assert all(np.isfinite(m.value()) for m in metrics.values())


def test_reference_equal_to_policy_has_kl_exactly_0_on_a_mask_with_a_hole_B047():
    batch = scored([[1, 0, 1], [0, 1, 1]], [1.0, -0.5])
    _, metrics = with_kl(clip_loss, beta=0.1, estimator=k3)(Scores(logps=LOGPS, ref_logps=LOGPS), batch)
    assert float(metrics["policy/kl"].total) == 0.0


def test_a_kl_penalty_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        with_kl(clip_loss, beta=0.1, estimator=k3)(Scores(logps=LOGPS), BATCH)


def test_mismatch_sees_a_stale_sampler():
    same = mismatch(Scores(logps=LOGPS), scored(MASK, sampler_logps=np.asarray(LOGPS)))
    assert [float(m.value()) for m in same.values()] == [0.0, 0.0]
    stale = mismatch(Scores(logps=LOGPS), scored(MASK, sampler_logps=np.asarray(LOGPS) + np.float32(0.2)))
    assert float(stale["mismatch/mean"].value()) == pytest.approx(0.2, abs=1e-6)
    assert float(stale["mismatch/kl"].value()) == pytest.approx(math.exp(-0.2) - 1 + 0.2, abs=1e-6)
