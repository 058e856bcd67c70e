"""Locks the losses' values and gradients, what they report, and that nothing at padding gets through."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl.aggregate import sequence_mean, token_mean
from burnish.rl.batch import Scores
from burnish.rl.kl import k2, k3, with_kl
from burnish.rl.losses import (
    EffectiveShare,
    Extreme,
    cispo,
    clipped,
    clipped_value,
    dppo,
    gmpo,
    gspo,
    reinforce,
    sapo,
    with_entropy_bonus,
)
from burnish.rl.off_policy import weighted

from .batches import scored

LOGPS = jnp.array([[-1, -0.5, -2], [-0.7, -1.2, -0.1]], jnp.float32)
OLD = jnp.array([[-1.1, -0.9, -1], [-0.7, -0.8, -0.6]], jnp.float32)
REF = jnp.array([[-0.9, -0.6, -2.2], [-0.5, -1.2, -0.3]], jnp.float32)
ENTROPY = jnp.array([[1.5, 0.5, 2], [0.7, 0.1, 3]], jnp.float32)
SAMPLER = np.array([[-1.2, -0.8, -1], [-0.6, -0.9, -0.6]], np.float32)
MASK = [[1, 1, 1], [1, 1, 0]]
BATCH = scored(MASK, [1.0, -0.5], sampler_logps=SAMPLER)
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}


def clip_loss(scores, batch):
    return clipped(scores, batch, **CLIP)


SURROGATES = {
    "clipped": clip_loss,
    "dual_clip": functools.partial(clipped, **CLIP, dual_clip=3.0),
    "gspo": functools.partial(gspo, epsilon=0.3, epsilon_high=0.3),
    "gspo_token": functools.partial(gspo, level="token", epsilon=0.3, epsilon_high=0.3),
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": functools.partial(dppo, divergence="tv", threshold=0.3),
    "dppo_kl": functools.partial(dppo, divergence="kl", threshold=0.3),
    "gmpo": functools.partial(gmpo, log_clip=0.4),
}
"""Losses whose gradient at ratio 1 is REINFORCE's, with clips that these scores reach in part."""

LOSSES = SURROGATES | {
    "reinforce": reinforce,
    "clipped+kl": with_kl(clip_loss, beta=0.1, estimator=k3),
    "reinforce+kl": with_kl(reinforce, beta=0.1, estimator=k2),
    "weighted": weighted(clip_loss),
    "weighted_sequence": weighted(clip_loss, level="sequence", mode="mask"),
    "entropy_bonus": with_entropy_bonus(clip_loss, coefficient=0.1),
}


def value(loss, aggregate=token_mean, *, logps=LOGPS, old: jax.Array | None = OLD, ref: jax.Array | None = REF, batch=BATCH) -> float:
    return float(aggregate(loss(Scores(logps=logps, old_logps=old, ref_logps=ref), batch)[0], batch).value())


def gradient(loss, *, logps=LOGPS, old: jax.Array | None = OLD, batch=BATCH):
    """d(sum of per-token losses) / d(logps)."""
    return jax.grad(lambda x: jnp.sum(loss(Scores(logps=x, old_logps=old), batch)[0]))(logps)


def one(number: float) -> jax.Array:
    return jnp.array([[number]], jnp.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_clipped_values(wrap):
    loss = wrap(clip_loss)
    assert value(loss, token_mean) == pytest.approx(-0.370610, abs=1e-6)
    assert value(loss, sequence_mean) == pytest.approx(-0.233842, abs=1e-6)


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
    assert float(metrics["policy/ratio_max"].value()) == pytest.approx(1.49182, abs=1e-5)
    assert float(metrics["policy/ratio_min"].value()) == pytest.approx(0.36788, abs=1e-5)


def test_without_old_log_probs_the_ratio_is_exactly_1_and_the_gradient_reinforce_B045():
    per_token, metrics = clip_loss(Scores(logps=LOGPS), BATCH)
    assert float(metrics["policy/ratio_mean"].value()) == 1.0
    np.testing.assert_array_equal(per_token, np.where(MASK, -BATCH.advantages, 0))
    np.testing.assert_array_equal(gradient(clip_loss, old=None), gradient(reinforce))
    assert float(jnp.abs(gradient(reinforce)).sum()) == 4.0


def test_reinforce_values():
    assert value(reinforce) == pytest.approx((1.0 + 0.5 + 2.0 - 0.35 - 0.6) / 5)


def test_a_far_anchor_gives_finite_losses_and_gradients_R17():
    for old in (-100.0, 100.0):
        scores = Scores(logps=one(0.0), old_logps=one(old))
        for advantage in (1.0, -1.0):
            batch = scored([[1]], [advantage])
            per_token, metrics = clip_loss(scores, batch)
            slope = gradient(clip_loss, logps=one(0.0), old=one(old), batch=batch)
            assert np.isfinite(per_token).all() and np.isfinite(slope).all()
            assert np.isfinite(metrics["policy/ratio_mean"].value())


def every(values) -> list:
    return [jnp.where(jnp.array(MASK, bool), x, values) for x in (LOGPS, OLD, REF, ENTROPY)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_nothing_at_padding_gets_through_B027_R17(loss, bad):
    def total(logps, ref, batch, others):
        old, entropy = others
        per_token, metrics = loss(Scores(logps=logps, old_logps=old, ref_logps=ref, entropy=entropy), batch)
        mean = token_mean(per_token, batch)
        return mean.total, (mean.value(), metrics)

    found = []
    for filling in (0.0, bad):
        logps, old, ref, entropy = every(filling)
        batch = scored(MASK, np.where(MASK, BATCH.advantages, filling), sampler_logps=np.where(MASK, SAMPLER, filling))
        found.append(jax.grad(total, has_aux=True)(logps, ref, batch, (old, entropy)))
    (clean_slope, (clean_value, _)), (slope, (dirty_value, metrics)) = found
    np.testing.assert_array_equal(slope, clean_slope)
    assert float(dirty_value) == float(clean_value) != 0
    assert all(np.isfinite(m.value()) for m in metrics.values())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_each_loss_has_a_gradient(loss):
    """Of several sizes, for tokens of either advantage, after the policy has moved."""
    slope = jax.grad(lambda x: jnp.sum(loss(Scores(logps=x, old_logps=OLD, ref_logps=REF, entropy=ENTROPY), BATCH)[0]))(LOGPS)
    assert np.isfinite(slope).all()
    assert np.abs(slope[0]).max() > 0.1 and np.abs(slope[1]).max() > 0.1
    assert slope[1, 2] == 0


@pytest.mark.parametrize("old", [None, LOGPS], ids=["no old log-probs", "old log-probs of the policy now"])
@pytest.mark.parametrize("loss", SURROGATES.values(), ids=SURROGATES)
def test_at_ratio_1_every_gradient_is_that_of_reinforce(loss, old):
    np.testing.assert_allclose(gradient(loss, old=old), gradient(reinforce), atol=1e-6)


def test_gspo_values_and_that_its_levels_agree_where_an_episode_has_one_advantage():
    sequence, token = functools.partial(gspo, level="sequence", **CLIP), functools.partial(gspo, level="token", **CLIP)
    assert value(token, sequence_mean) == pytest.approx(-0.218558, abs=1e-6)
    assert value(sequence, sequence_mean) == pytest.approx(-0.218558, abs=1e-6)
    wide = {"epsilon": 0.9, "epsilon_high": 9.0}
    losses = [functools.partial(gspo, level="sequence", **wide), functools.partial(gspo, level="token", **wide)]
    totals = [jax.grad(lambda x, f=f: sequence_mean(f(Scores(logps=x, old_logps=OLD), BATCH)[0], BATCH).total) for f in losses]
    np.testing.assert_allclose(totals[0](LOGPS), totals[1](LOGPS), atol=1e-7)
    # Episode 0: s = exp((.1 + .4 - 1) / 3), A = 1, and a third of its token mean.
    np.testing.assert_allclose(totals[0](LOGPS)[0], [-math.exp(-0.5 / 3) / 3] * 3, atol=1e-6)


def test_gspo_token_gives_each_token_its_own_advantage():
    batch = scored([[1, 1]], [[1.0, -2.0]])
    logps, old = jnp.full((1, 2), -1.0), jnp.array([[-1.2, -1.1]])
    s, wide = math.exp(0.15), {"epsilon": 0.5, "epsilon_high": 0.5}
    token, sequence = functools.partial(gspo, level="token", **wide), functools.partial(gspo, level="sequence", **wide)
    np.testing.assert_allclose(gradient(token, logps=logps, old=old, batch=batch)[0], [-s, 2 * s], rtol=1e-6)
    np.testing.assert_allclose(gradient(sequence, logps=logps, old=old, batch=batch)[0], [s / 2, s / 2], rtol=1e-6)


@pytest.mark.parametrize("loss", [gspo, gmpo])
def test_episodes_are_told_apart_inside_a_packed_row(loss):
    packed = scored([[1, 1, 1, 1, 0]], [[1.0, 1.0, -0.5, -0.5, 0]], sequences=[[0, 0, 1, 1, 0]])
    apart = scored([[1, 1], [1, 1]], [1.0, -0.5])
    logps, old = jnp.array([[-1.0, -0.5, -0.7, -1.2]]), jnp.array([[-1.1, -0.9, -0.6, -0.8]])
    row = [jnp.pad(x, ((0, 0), (0, 1)), constant_values=jnp.nan) for x in (logps, old)]
    together, _ = loss(Scores(logps=row[0], old_logps=row[1]), packed)
    rows, _ = loss(Scores(logps=logps.reshape(2, 2), old_logps=old.reshape(2, 2)), apart)
    np.testing.assert_array_equal(together[0, :4], rows.ravel())


@pytest.mark.parametrize(("epsilon", "ratio", "weight"), [(1.0, 6.0, 5.0), (1.0, 3.0, 3.0), (1.0, 0.1, 0.1), (0.2, 0.1, 0.8)])
def test_cispo_bounds_the_weight_and_never_the_gradient(epsilon, ratio, weight):
    loss = functools.partial(cispo, epsilon=epsilon)
    logps, old = one(-2.0), one(-2.0 - math.log(ratio))
    for advantage in (1.0, -1.0):
        batch = scored([[1]], [advantage])
        per_token, metrics = loss(Scores(logps=logps, old_logps=old), batch)
        assert float(per_token[0, 0]) == pytest.approx(2 * weight * advantage, rel=1e-5)
        assert float(gradient(loss, logps=logps, old=old, batch=batch)[0, 0]) == pytest.approx(-weight * advantage, rel=1e-5)
        bound = [float(metrics[f"policy/clip_{side}_fraction"].value()) for side in ("low", "high")]
        assert bound == [float(weight > ratio), float(weight < ratio)]


@pytest.mark.parametrize(("advantage", "expected", "slope"), [(1.0, -2.924234, -1.572895), (-1.0, 2.821998, 1.536217)])
def test_sapo_gates_softly_and_by_the_sign_of_the_advantage(advantage, expected, slope):
    """At r = 2: 4 σ(1) = 2.924234 with temperature 1, 4 / 1.05 σ(1.05) = 2.821998 with 1.05; slopes 8 σ (1 - σ)."""
    logps, old, batch = one(0.0), one(-math.log(2)), scored([[1]], [advantage])
    per_token, metrics = sapo(Scores(logps=logps, old_logps=old), batch)
    assert float(per_token[0, 0]) == pytest.approx(expected, abs=1e-5)
    assert float(gradient(sapo, logps=logps, old=old, batch=batch)[0, 0]) == pytest.approx(slope, abs=1e-5)
    assert float(metrics["policy/gate_mean"].value()) == pytest.approx(abs(slope) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("divergence", "threshold", "before", "now", "advantage", "held"),
    [
        ("tv", 0.15, 0.5, 0.7, 1, True),
        ("tv", 0.15, 0.5, 0.6, 1, False),
        ("tv", 0.15, 0.5, 0.7, -1, False),  # it moved against its advantage: the gradient brings it back
        ("tv", 0.15, 0.5, 0.3, -1, True),
        ("tv", 0.15, 0.5, 0.3, 1, False),
        ("tv", 0.15, 0.01, 0.1, 1, False),  # ten times likelier, and still rare
        ("kl", 0.08, 0.5, 0.7, 1, True),  # .087177
        ("kl", 0.09, 0.5, 0.7, 1, False),
        ("kl", 0.02, 0.5, 0.4, -1, True),  # .020411
        ("kl", 0.021, 0.5, 0.4, -1, False),
    ],
)
def test_dppo_masks_by_how_far_the_probability_has_moved(divergence, threshold, before, now, advantage, held):
    loss = functools.partial(dppo, divergence=divergence, threshold=threshold)
    logps, old, batch = one(math.log(now)), one(math.log(before)), scored([[1]], [advantage])
    per_token, metrics = loss(Scores(logps=logps, old_logps=old), batch)
    expected = 0.0 if held else -advantage * now / before
    assert float(per_token[0, 0]) == pytest.approx(expected, rel=1e-5)
    assert float(gradient(loss, logps=logps, old=old, batch=batch)[0, 0]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics[f"policy/clip_{'high' if advantage > 0 else 'low'}_fraction"].value()) == held


def test_dppo_is_finite_where_a_token_is_certain():
    loss = functools.partial(dppo, divergence="kl")
    for logp, old in ((0.0, 0.0), (0.0, -3.0), (-3.0, 0.0), (-60.0, 0.0)):
        slope = gradient(loss, logps=one(logp), old=one(old), batch=scored([[1]], [1.0]))
        assert np.isfinite(slope).all(), (logp, old)


@pytest.mark.parametrize(("advantage", "mean", "slopes"), [(1.0, 0.2, (0, -1)), (-1.0, 0.5, (1, 1))])
def test_gmpo_clips_each_log_ratio_before_the_geometric_mean(advantage, mean, slopes):
    """Log-ratios 1 and 0: clipped to .4 and 0 where the advantage is positive."""
    logps, old, batch = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), scored([[1, 1]], [advantage])
    per_token, metrics = gmpo(Scores(logps=logps, old_logps=old), batch)
    np.testing.assert_allclose(per_token[0], [-advantage * math.exp(mean)] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient(gmpo, logps=logps, old=old, batch=batch)[0], np.array(slopes) * math.exp(mean), rtol=1e-6)
    assert float(metrics["policy/clip_high_fraction"].value()) == (0.5 if advantage > 0 else 0.0)


def test_an_entropy_bonus_rewards_entropy():
    loss = with_entropy_bonus(reinforce, coefficient=0.01)
    plain, _ = reinforce(Scores(logps=LOGPS), BATCH)
    slope = jax.grad(lambda h: jnp.sum(loss(Scores(logps=LOGPS, entropy=h), BATCH)[0]))(ENTROPY)
    np.testing.assert_allclose(slope, -0.01 * np.array(MASK), rtol=1e-6)
    np.testing.assert_allclose(loss(Scores(logps=LOGPS, entropy=ENTROPY), BATCH)[0], plain - 0.01 * np.array(MASK) * ENTROPY, rtol=1e-6)
    with pytest.raises(ValueError, match="needs the policy's entropy"):
        loss(Scores(logps=LOGPS), BATCH)


VALUES = jnp.array([[0.5, 0.2, 0.9], [-0.1, 0.4, 0.3]], jnp.float32)
OLD_VALUES = jnp.array([[0.4, 0.6, 0.5], [0, 0, 0]], jnp.float32)
TARGETS = dataclasses.replace(BATCH, returns=np.array([[1, 1, 1], [0, 0.5, 0]], np.float32))


def test_clipped_value_values_and_gradient():
    per_token, metrics = clipped_value(VALUES, OLD_VALUES, TARGETS, clip=0.2)
    assert float(token_mean(per_token, TARGETS).value()) == pytest.approx(0.108, abs=1e-6)
    slope = jax.grad(lambda v: jnp.sum(clipped_value(v, OLD_VALUES, TARGETS, clip=0.2)[0]))(VALUES)
    # v - R, but 0 where the clipped value is the worse one: .9 held at .7, .4 held at .2; .2 is worse than its clipped .4.
    np.testing.assert_allclose(slope, [[-0.5, -0.8, 0], [-0.1, 0, 0]], atol=1e-6)
    assert float(metrics["critic/clip_fraction"].value()) == pytest.approx(0.4)
    assert float(metrics["critic/value_mean"].value()) == pytest.approx(1.9 / 5)
    assert float(metrics["critic/squared_error"].value()) == pytest.approx((0.25 + 0.64 + 0.01 + 0.01 + 0.01) / 5)


def test_a_value_loss_without_a_clip_is_half_the_squared_error_and_is_clean_at_padding():
    per_token, metrics = clipped_value(VALUES.at[1, 2].set(jnp.nan), OLD_VALUES, TARGETS, clip=None)
    np.testing.assert_allclose(per_token, [[0.125, 0.32, 0.005], [0.005, 0.005, 0]], atol=1e-6)
    assert "critic/clip_fraction" not in metrics
    dirty = dataclasses.replace(TARGETS, returns=np.where(MASK, TARGETS.returns, np.nan))
    nan_at_padding = [jnp.where(jnp.array(MASK, bool), x, jnp.nan) for x in (VALUES, OLD_VALUES)]
    result, slope = jax.value_and_grad(lambda v: jnp.sum(clipped_value(v, nan_at_padding[1], dirty, clip=0.2)[0]))(nan_at_padding[0])
    assert float(result) == pytest.approx(0.54, abs=1e-6) and np.isfinite(slope).all()


def test_an_extreme_joins_by_its_kind_and_is_of_scored_tokens_only():
    mask = np.array(MASK, bool)
    largest, smallest = (Extreme.of(jnp.where(mask, LOGPS, jnp.nan), mask, kind=kind) for kind in ("max", "min"))
    assert (float(largest.value()), float(smallest.value())) == (-0.5, -2.0)
    assert float(largest.join(Extreme.of(LOGPS + 1, mask, kind="max")).value()) == 0.5
    assert float(smallest.join(Extreme.of(LOGPS + 1, mask, kind="min")).value()) == -2.0
    for part in (largest, smallest):
        assert float(part.join(Extreme.nothing(part.kind)).value()) == float(part.value())
        assert float(Extreme.of(LOGPS, np.zeros_like(mask), kind=part.kind).value()) == float(Extreme.nothing(part.kind).value())
        assert math.isnan(part.join(Extreme.of(LOGPS * jnp.nan, mask, kind=part.kind)).value())


def test_an_effective_share_of_parts_is_that_of_the_whole():
    def share(weights) -> EffectiveShare:
        weights = jnp.asarray(weights, jnp.float32)
        return EffectiveShare(weights.sum(), jnp.square(weights).sum(), jnp.float32(weights.size))

    whole = jax.tree.map(jnp.add, share([1, 2]), share([3]))
    assert float(whole.value()) == pytest.approx(36 / (3 * 14))
    assert float(share([0.5] * 4).value()) == 1.0 and float(share([]).value()) == 0.0
