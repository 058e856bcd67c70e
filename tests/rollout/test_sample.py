"""The two-level draw follows the softmax, the kept set is the one that the rules name, and neither ever leaves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from burnish.rollout.native.sample import Rules, Sampled, sample, uniforms

pytestmark = pytest.mark.optimised  # a million draws a test


def rules(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Rules:
    return Rules(jnp.full(rows, temperature), jnp.full(rows, top_k, jnp.int32), jnp.full(rows, top_p), jnp.full(rows, min_p))


def draw(logits: np.ndarray, rule: Rules, *, max_kept: int, start: int = 0) -> Sampled:
    """One draw for each row of `rule`, from the same logits, each row with its own key."""
    rows = rule.temperature.shape[0]
    keys = jnp.asarray(np.stack([np.arange(rows), np.full(rows, 17)], 1), jnp.uint32)
    noise = uniforms(keys, jnp.full(rows, start, jnp.int32))
    return jax.jit(sample, static_argnames="max_kept")(
        jnp.broadcast_to(jnp.asarray(logits), (rows, len(logits))), rule, noise, max_kept=max_kept
    )


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept_set(probs: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    order = np.argsort(-probs)
    rank, mass_before = np.argsort(order), np.empty(len(probs))
    mass_before[order] = np.cumsum(probs[order]) - probs[order]
    return (rank < (top_k or len(probs))) & (mass_before < top_p) & (probs >= min_p * probs.max())


CASES = {
    "flat over more than one block": (np.zeros(700), {}),
    "peaked": (np.random.default_rng(1).normal(0, 3, 300), {}),
    "heavy tail, hot": (-1.2 * np.log1p(np.arange(600.0)), {"temperature": 1.3}),
    "top-k and cold": (np.random.default_rng(2).normal(0, 1, 260), {"temperature": 0.7, "top_k": 20}),
    "top-p and min-p": (np.random.default_rng(3).normal(0, 2, 260), {"top_p": 0.9, "min_p": 0.02}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_million_draws_follow_the_exact_distribution(case: str) -> None:
    """Chi-square against exact probabilities, ids with an expected count below 10 pooled; p > 1e-4 at fixed noise."""
    logits, options = CASES[case]
    logits = logits.astype(np.float32)
    temperature = options.get("temperature", 1.0)
    truncation = {name: value for name, value in options.items() if name != "temperature"}
    probs = probabilities(logits, temperature)
    probs = np.where(kept_set(probs, **truncation), probs, 0.0)
    probs /= probs.sum()
    rows = 20_000
    keys = jnp.asarray(np.stack([np.arange(rows), np.full(rows, 3)], 1), jnp.uint32)
    one = jax.jit(
        lambda index: (
            sample(
                jnp.broadcast_to(jnp.asarray(logits), (rows, len(logits))),
                rules(rows, **options),
                uniforms(keys, jnp.full(rows, index)),
                max_kept=40 if truncation else 0,
            ).ids
        )
    )
    counts = np.bincount(np.concatenate([np.asarray(one(jnp.int32(index))) for index in range(50)]), minlength=len(logits))
    assert counts[probs == 0].sum() == 0
    rare = probs * counts.sum() < 10
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(probs[~rare], probs[rare].sum()) * counts.sum()
    filled = expected > 0
    assert stats.chisquare(observed[filled], expected[filled]).pvalue > 1e-4


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.7, "temperature": 1.3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}]
)
def test_log_probabilities_and_kept_ids(options: dict) -> None:
    logits = np.random.default_rng(5).normal(0, 2, 97).astype(np.float32)
    truncation = {name: value for name, value in options.items() if name != "temperature"}
    probs = probabilities(logits, options.get("temperature", 1.0))
    kept = kept_set(probs, **truncation)
    out = draw(logits, rules(200, **options), max_kept=64)
    if truncation:
        assert all(set(row[row >= 0].tolist()) == set(np.flatnonzero(kept).tolist()) for row in np.asarray(out.kept_ids))
    else:
        assert bool((out.kept_ids == -1).all())
    expected = np.log(probs / probs[kept].sum())[np.asarray(out.ids)]
    np.testing.assert_allclose(out.logps, expected, atol=2e-6)
    assert kept[np.asarray(out.ids)].all()


def test_greedy_takes_the_first_likeliest_at_temperature_one() -> None:
    logits = np.random.default_rng(6).normal(0, 2, 600).astype(np.float32)
    logits[[300, 511, 20]] = 9.0
    out = draw(logits, rules(5, temperature=0.0, top_k=3), max_kept=8)
    assert out.ids.tolist() == [20] * 5 and bool((out.kept_ids == -1).all())
    np.testing.assert_allclose(out.logps, np.log(probabilities(logits, 1.0)[20]), atol=1e-6)


def test_full_support_rows_have_the_same_bits_in_both_programs() -> None:
    logits = np.random.default_rng(7).normal(0, 2, 5000).astype(np.float32)
    mixed = rules(64, temperature=0.9)._replace(top_p=jnp.where(jnp.arange(64) % 2 == 0, 1.0, 0.8))
    plain, truncating = draw(logits, mixed._replace(top_p=jnp.ones(64)), max_kept=0), draw(logits, mixed, max_kept=32)
    np.testing.assert_array_equal(plain.ids[::2], truncating.ids[::2])
    np.testing.assert_array_equal(plain.logps[::2], truncating.logps[::2])


@pytest.mark.parametrize("max_kept", [0, 16])
@pytest.mark.parametrize("noise", [0.0, 1.0 - 2**-24])
def test_the_ends_of_the_noise_never_pick_what_has_no_mass(noise: float, max_kept: int) -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[3, 259, 599]] = 0.0, 1.0, 0.5
    top_p = 0.99 if max_kept else 1.0
    out = sample(jnp.asarray(logits)[None], rules(1, top_p=top_p), jnp.full((1, 2), noise, jnp.float32), max_kept=max_kept)
    assert int(out.ids[0]) in (3, 259, 599) and bool(jnp.isfinite(out.logps[0]))


def test_tiny_temperatures_and_huge_logits_stay_finite() -> None:
    logits = (np.random.default_rng(8).normal(0, 1, 300) * 1e30).astype(np.float32)
    out = draw(logits, rules(4, temperature=1e-6, top_p=0.9), max_kept=16)
    assert out.ids.tolist() == [int(logits.argmax())] * 4 and bool((out.logps == 0).all())


def test_noise_differs_by_key_and_by_token() -> None:
    keys = jnp.asarray([[0, 1], [0, 2], [1, 1], [0, 1]], jnp.uint32)
    first, second = uniforms(keys, jnp.zeros(4, jnp.int32)), uniforms(keys, jnp.ones(4, jnp.int32))
    np.testing.assert_array_equal(first[0], first[3])
    assert len(np.unique(np.concatenate([first[:3].ravel(), second[:3].ravel()]))) == 12
