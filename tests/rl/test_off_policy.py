"""Locks importance weights, rejection and the mismatch metrics: their values, their levels, and what they leave alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl.aggregate import fixed_length_mean, prompt_mean, sequence_mean, token_mean
from burnish.rl.batch import Scores, split_rows
from burnish.rl.losses import reinforce
from burnish.rl.off_policy import importance_weights, mismatch, ratios, rejecting, weighted

from .batches import scored
from .test_losses import LOGPS, MASK, OLD, clip_loss

HALVES = np.log(np.array([[0.5, 2.0, 4.0], [0.5, 0.5, 1.0]], np.float32))
"""Log-ratios anchor - sampler of two episodes of 3 and 2 tokens: products 4 and 1/4, geometric means 4^(1/3) and 1/2."""


def drawn(log_ratios, *, mask=MASK, old=OLD, advantages=(1.0, -0.5), **options):
    """A batch whose sampler gave the tokens `old - log_ratios`."""
    return scored(mask, advantages, sampler_logps=np.asarray(old) - log_ratios, **options)


def test_truncated_importance_weights_values():
    batch = drawn(np.log(np.array([[0.5, 2, 1], [1, 1.5, 1]], np.float32)))
    per_token, metrics = weighted(clip_loss)(Scores(logps=LOGPS, old_logps=OLD), batch)
    assert float(token_mean(per_token, batch).value()) == pytest.approx(-0.476093, abs=1e-6)
    assert float(metrics["mismatch/weight_mean"].value()) == pytest.approx(6 / 5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0.5, 2, 4], [0.5, 0.5, 1]]),
        ("sequence", [[4, 4, 4], [0.25, 0.25, 0.25]]),
        ("geometric", [[4 ** (1 / 3)] * 3, [0.5, 0.5, 0.5]]),
    ],
)
def test_levels(level, expected):
    got = ratios(Scores(logps=LOGPS, old_logps=OLD), drawn(HALVES), level=level)
    mask = np.array(MASK, bool)
    np.testing.assert_allclose(np.asarray(got)[mask], np.array(expected)[mask], rtol=1e-5)


@pytest.mark.parametrize(("mode", "expected"), [("truncate", [[0.5, 2, 3], [0.5, 0.5, 1]]), ("mask", [[0.5, 2, 0], [0.5, 0.5, 1]])])
def test_weights_above_the_cap_become_the_cap_or_0(mode, expected):
    scores, batch = Scores(logps=LOGPS, old_logps=OLD), drawn(HALVES)
    np.testing.assert_allclose(importance_weights(scores, batch, mode=mode, cap=3.0), expected, rtol=1e-5)
    _, metrics = weighted(reinforce, mode=mode, cap=3.0)(scores, batch)
    assert float(metrics["mismatch/capped_fraction"].value()) == pytest.approx(0.2)


def test_without_old_log_probs_weights_compare_the_policy_now_and_are_constants():
    batch = drawn(HALVES, old=LOGPS)
    loss = weighted(reinforce, cap=8.0)
    slope = jax.grad(lambda x: jnp.sum(loss(Scores(logps=x), batch)[0]))(LOGPS)
    np.testing.assert_allclose(slope, np.where(MASK, -batch.advantages * np.exp(HALVES), 0), rtol=1e-5)


def test_a_sampler_that_is_the_anchor_has_weights_of_exactly_1():
    scores, batch = Scores(logps=LOGPS, old_logps=OLD), drawn(np.zeros((2, 3), np.float32))
    for level in ("token", "sequence", "geometric"):
        np.testing.assert_array_equal(importance_weights(scores, batch, level=level), np.ones((2, 3)))


def test_a_far_sampler_gives_finite_weights():
    for far in (-400.0, 400.0):
        batch = drawn(np.full((2, 3), far, np.float32))
        for level in ("token", "sequence", "geometric"):
            assert np.isfinite(ratios(Scores(logps=LOGPS, old_logps=OLD), batch, level=level)).all()
        assert all(np.isfinite(m.value()) for m in mismatch(Scores(logps=LOGPS), batch).values())


@pytest.mark.parametrize(
    ("level", "mask", "left"),
    [
        ("token", [[1, 1, 0], [1, 1, 0]], [[2, 2, 1], [2, 2, 1]]),
        ("sequence", [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]),
        ("geometric", [[1, 1, 1], [1, 1, 0]], [[3, 3, 3], [2, 2, 1]]),
    ],
)
def test_rejected_tokens_leave_the_mask_and_their_episodes_count(level, mask, left):
    batch = drawn(HALVES)
    kept, metrics = rejecting(Scores(logps=LOGPS, old_logps=OLD), batch, level=level, low=0.4, high=2.1)
    np.testing.assert_array_equal(kept.mask, np.array(mask, bool))
    np.testing.assert_array_equal(kept.sequence_tokens, left)
    assert float(metrics["mismatch/rejected_fraction"].value()) == pytest.approx(1 - np.sum(mask) / 5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("mean", "expected"),
    [(token_mean, 1.0), (sequence_mean, 1.0), (prompt_mean, 1.0), (lambda x, b: fixed_length_mean(x, b, length=4), 1.0)],
)
def test_what_is_rejected_dilutes_no_mean_B025(level, mean, expected):
    """Four tokens of loss 1 that stay and four that go: every mean is still 1."""
    far = np.array([[0, 0, 0, 0], [3, 3, 3, 3]], np.float32)
    batch = scored(np.ones((2, 4)), sampler_logps=-far)
    kept, _ = rejecting(Scores(logps=jnp.zeros((2, 4)), old_logps=jnp.zeros((2, 4))), batch, level=level)
    assert float(mean(jnp.ones((2, 4)), kept).value()) == expected


def test_an_episode_that_lost_some_tokens_weighs_as_much_as_a_whole_one():
    far = np.array([[0, 0, 0, 0], [0, 3, 3, 3]], np.float32)
    batch = scored(np.ones((2, 4)), sampler_logps=-far)
    kept, _ = rejecting(Scores(logps=jnp.zeros((2, 4))), batch, level="token")
    losses = jnp.array([[1.0, 1, 1, 1], [5, 9, 9, 9]])
    assert float(sequence_mean(losses, kept).value()) == pytest.approx(3.0)
    assert float(token_mean(losses, kept).value()) == pytest.approx(9 / 5)


def test_rejection_in_a_micro_batch_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    batch = scored(
        rng.random((4, 6)) < 0.9, sampler_logps=rng.normal(size=(4, 6)), sequences=[[0, 0, 0, 1, 1, 1]] * 4 + 2 * np.arange(4)[:, None]
    )
    scores = Scores(logps=jnp.zeros((4, 6)))
    whole, _ = rejecting(scores, batch, level="geometric")
    parts = [rejecting(Scores(logps=jnp.zeros((2, 6))), part, level="geometric")[0] for part in split_rows(batch, 2)]
    assert 0 < whole.mask.sum() < batch.mask.sum()
    for field in ("mask", "sequence_tokens", "prompt_tokens"):
        np.testing.assert_array_equal(np.concatenate([getattr(p, field) for p in parts]), getattr(whole, field))


def test_a_nan_is_not_rejected_so_that_the_update_sees_it():
    old = OLD.at[0, 0].set(jnp.nan)
    kept, _ = rejecting(Scores(logps=LOGPS, old_logps=old), drawn(HALVES), level="token", low=0.0, high=10.0)
    np.testing.assert_array_equal(kept.mask, np.array(MASK, bool))


def test_mismatch_is_0_where_sampler_and_policy_agree():
    metrics = mismatch(Scores(logps=LOGPS), scored(MASK, sampler_logps=np.asarray(LOGPS)))
    values = {name: float(m.value()) for name, m in metrics.items()}
    assert values == {f"mismatch/{name}": float(name == "ess") for name in ("mean", "max", "kl", "k3", "chi2", "ess")}


def test_mismatch_sees_a_stale_sampler():
    stale = mismatch(Scores(logps=LOGPS), scored(MASK, sampler_logps=np.asarray(LOGPS) + np.float32(0.2)))
    expected = {"mean": 0.2, "max": 0.2, "kl": 0.2, "k3": math.exp(-0.2) - 1 + 0.2, "chi2": math.exp(-0.4) - 1, "ess": 1.0}
    assert {name: float(m.value()) for name, m in stale.items()} == pytest.approx(
        {f"mismatch/{name}": value for name, value in expected.items()}, abs=1e-6
    )


def test_mismatch_values_of_unequal_tokens_and_that_padding_is_in_none():
    difference = np.array([[0.5, -1.0, 0.0], [0.25, -0.25, np.nan]], np.float32)
    batch = scored(MASK, sampler_logps=np.asarray(LOGPS) - difference)
    metrics = mismatch(Scores(logps=LOGPS.at[1, 2].set(jnp.inf)), batch)
    d = difference[np.array(MASK, bool)].astype(np.float64)
    w = np.exp(d)
    expected = {
        "mean": np.abs(d).mean(),
        "max": 1.0,
        "kl": -d.mean(),
        "k3": (w - 1 - d).mean(),
        "chi2": (w**2 - 1).mean(),
        "ess": w.sum() ** 2 / (5 * (w**2).sum()),
    }
    assert {name: float(m.value()) for name, m in metrics.items()} == pytest.approx(
        {f"mismatch/{name}": value for name, value in expected.items()}, abs=1e-5
    )


def test_mismatch_estimates_the_divergences_of_two_distributions():
    """Expected over the sampler: kl and k3 are KL(sampler ‖ policy), chi2 is χ², the share n / Σw² follows from E[w] = 1."""
    sampler, policy = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.35, 0.4])
    counts = (1000 * sampler).astype(int)
    ids = np.repeat(np.arange(3), counts)[None]
    batch = scored(np.ones(ids.shape), sampler_logps=np.log(sampler)[ids])
    values = {
        n.split("/")[1]: float(m.value()) for n, m in mismatch(Scores(logps=jnp.asarray(np.log(policy)[ids], jnp.float32)), batch).items()
    }
    kl, chi2 = np.sum(sampler * np.log(sampler / policy)), np.sum((policy - sampler) ** 2 / sampler)
    assert values["kl"] == pytest.approx(kl, abs=1e-5) and values["k3"] == pytest.approx(kl, abs=1e-5)
    assert values["chi2"] == pytest.approx(chi2, abs=1e-5)
    assert values["ess"] == pytest.approx(1 / (1 + chi2), abs=1e-5)


def test_nothing_at_padding_reaches_ratios_or_rejection_B027():
    dirty = dataclasses.replace(drawn(HALVES), sampler_logps=np.where(MASK, np.asarray(OLD) - HALVES, np.nan).astype(np.float32))
    scores = Scores(logps=jnp.where(jnp.array(MASK, bool), LOGPS, jnp.nan), old_logps=jnp.where(jnp.array(MASK, bool), OLD, jnp.inf))
    for level in ("token", "sequence", "geometric"):
        assert np.isfinite(ratios(scores, dirty, level=level)).all()
        kept, _ = rejecting(scores, dirty, level=level, low=0.0, high=100.0)
        np.testing.assert_array_equal(kept.mask, np.array(MASK, bool))
