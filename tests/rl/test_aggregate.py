"""Locks the four means: their values, and that no cut, padding or neighbour changes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl.aggregate import fixed_length_mean, prompt_mean, sequence_mean, token_mean
from burnish.rl.batch import Scores, split_rows
from burnish.rl.kl import k3, with_kl
from burnish.rl.losses import Mean, clipped, reinforce

from .batches import scored

VALUES = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], jnp.float32)
MASK = [[1, 1, 0], [1, 1, 1]]
FIXED = functools.partial(fixed_length_mean, length=4)
MEANS = {"token": token_mean, "sequence": sequence_mean, "fixed": FIXED, "prompt": prompt_mean}
LOSSES = {
    "clipped": functools.partial(clipped, epsilon=0.2, epsilon_high=0.28),
    "dual": functools.partial(clipped, dual_clip=3.0),
    "reinforce": reinforce,
    "clipped+kl": with_kl(clipped, beta=0.1, estimator=k3),
}


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (token_mean, 0.36),
        (sequence_mean, 0.325),
        (FIXED, 0.225),
        (functools.partial(fixed_length_mean, length=1), 0.9),
        (prompt_mean, 0.325),
    ],
)
def test_values(aggregate, expected):
    assert float(aggregate(VALUES, scored(MASK)).value()) == pytest.approx(expected, abs=1e-6)


def test_which_mean_decides_B021():
    values, batch = jnp.array([[1.0, 0, 0], [0, 0, 0]]), scored([[1, 0, 0], [1, 1, 1]])
    assert float(token_mean(values, batch).value()) == 0.25
    assert float(sequence_mean(values, batch).value()) == 0.5
    assert float(FIXED(values, batch).value()) == 0.125


def test_prompt_mean_weighs_prompts_the_same_whatever_they_sampled():
    values = jnp.array([[1.0, 1, 1, 1], [1, 0, 0, 0], [5, 0, 0, 0]])
    batch = scored([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], prompts=[[0], [0], [1]])
    assert float(prompt_mean(values, batch).value()) == pytest.approx((5 / 6 + 5) / 2, abs=1e-6)


def test_one_mask_for_numerator_and_denominator_B025():
    ones = jnp.ones((2, 4), jnp.float32)
    for name, aggregate in MEANS.items():
        assert float(aggregate(ones, scored([[1, 1, 1, 1], [0, 0, 0, 0]])).value()) == 1.0, name


@pytest.mark.parametrize("name", MEANS)
def test_no_token_gives_0_and_no_gradient(name):
    batch = scored([[0, 0, 0], [0, 0, 0]])
    mean, slope = jax.value_and_grad(lambda x: MEANS[name](x, batch).value())(jnp.full((2, 3), jnp.nan))
    assert float(mean) == 0.0 and float(jnp.abs(slope).sum()) == 0.0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("name", MEANS)
def test_padding_is_dropped_before_it_is_summed_B027(name, bad):
    batch = scored([[1, 0]])
    mean, slope = jax.value_and_grad(lambda x: MEANS[name](x, batch).value())(jnp.array([[1.0, bad]]))
    assert float(mean) == (0.25 if name == "fixed" else 1.0)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("name", MEANS)
def test_low_precision_is_summed_in_float32_B117(name):
    values = jnp.full((1, 1024), 0.01, jnp.bfloat16)
    mean = MEANS[name](values, scored(np.ones((1, 1024))))
    assert mean.total.dtype == mean.weight.dtype == jnp.float32
    expected = float(values[0, 0]) * (1024 / 4 if name == "fixed" else 1)
    assert float(mean.value()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", MEANS)
def test_padded_width_changes_nothing_B031(name):
    rng = np.random.default_rng(0)
    values, mask = rng.integers(-64, 64, (3, 4)) / 64, np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    wide = np.pad(values, ((0, 0), (0, 4)), constant_values=7)
    narrow_mean = MEANS[name](jnp.asarray(values, jnp.float32), scored(mask)).value()
    wide_mean = MEANS[name](jnp.asarray(wide, jnp.float32), scored(np.pad(mask, ((0, 0), (0, 4))))).value()
    assert float(narrow_mean) == float(wide_mean)


@pytest.mark.parametrize("name", MEANS)
def test_rows_of_padding_change_nothing_B035(name):
    """A tail of 2 rows padded to a batch of 4."""
    values = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], jnp.float32)
    padded = jnp.concatenate([values, jnp.full((2, 3), jnp.nan)])

    def loss(x, mask):
        return MEANS[name](x, scored(mask)).value()

    expected, slope = jax.value_and_grad(loss)(values, MASK)
    got, padded_slope = jax.value_and_grad(loss)(padded, MASK + [[0, 0, 0]] * 2)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_array_equal(padded_slope, np.concatenate([slope, np.zeros((2, 3))]))


def test_every_packed_episode_weighs_the_same_whatever_its_number_B033():
    """Segments 1, 2, 3 of two tokens each, losses of 1: a mask that were the segment would weigh the third three times."""
    batch = scored([[1] * 6], sequences=[[1, 1, 2, 2, 3, 3]])
    for name, mean in MEANS.items():
        result, slope = jax.value_and_grad(lambda x, mean=mean: mean(x, batch).value())(jnp.ones((1, 6)))
        assert float(result) == (0.5 if name == "fixed" else 1.0)
        assert len(set(slope[0].tolist())) == 1 and float(slope[0, 0]) > 0


def test_64_micro_batches_in_float32_give_the_gradient_of_one_B117():
    """And 1,024 times .01 is 10.24, not the 4.0 of a running sum in bf16."""
    rng = np.random.default_rng(3)
    mask = rng.random((64, 16)) < 0.7
    batch = scored(mask, rng.normal(size=64))
    logps, old = (jnp.asarray(rng.uniform(-2, -0.5, (64, 16)), jnp.float32) for _ in range(2))

    @jax.jit
    def slope_and_mean(logps, old, part):
        def total(x):
            mean = token_mean(clipped(Scores(logps=x, old_logps=old), part)[0], part)
            return mean.total, mean

        return jax.grad(total, has_aux=True)(logps)

    slope, whole = slope_and_mean(logps, old, batch)
    parts = [slope_and_mean(logps[i : i + 1], old[i : i + 1], part) for i, part in enumerate(split_rows(batch, 64))]
    summed = functools.reduce(lambda a, b: a + b, (mean for _, mean in parts))
    np.testing.assert_array_equal(summed.weight, whole.weight)
    np.testing.assert_allclose(summed.value(), whole.value(), rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([s for s, _ in parts]) / summed.weight, slope / whole.weight, rtol=1e-5)
    cents = functools.reduce(lambda a, b: a + b, [Mean(jnp.float32(0.01), jnp.float32(1))] * 1024)
    assert float(cents.total) == pytest.approx(10.24, rel=1e-4) and float(cents.weight) == 1024


def test_packed_rows_equal_unpacked_rows():
    """Episodes A (advantage 1.5, 3 tokens) and B (3.0, 1 token): -2.25 by episodes, not the -1.875 of a mean per row."""
    packed = scored([[1, 1, 1, 1]], [[1.5, 1.5, 1.5, 3.0]], sequences=[[0, 0, 0, 1]])
    apart = scored([[1, 1, 1], [1, 0, 0]], [1.5, 3.0])
    for batch in (packed, apart):
        per_token, _ = clipped(Scores(logps=jnp.full(batch.mask.shape, -0.5)), batch)
        assert float(sequence_mean(per_token, batch).value()) == pytest.approx(-2.25)


@pytest.mark.parametrize("weights", [(4, 4, 4, 4), (1, 7, 3, 5), (1, 1, 100, 1), (0.05, 0.1, 0.2, 0.25), (0, 0, 0, 0)])
def test_totals_and_weights_are_summed_and_divided_once(weights):
    totals = [1.0, -2.0, 3.0, 0.5]
    means = [Mean(jnp.float32(t if any(weights) else 0), jnp.float32(w)) for t, w in zip(totals, weights, strict=True)]
    summed = functools.reduce(lambda a, b: a + b, means)
    assert float(summed.value()) == pytest.approx(sum(totals) / sum(weights) if any(weights) else 0.0, rel=1e-6)


def ragged_case():
    """8 rows, groups of rows (0..2), (3..6), 7, an episode that spans rows 1 and 2, one row without a token."""
    rng = np.random.default_rng(1)
    mask = np.arange(6) < rng.integers(1, 7, (8, 1))
    mask[5] = False
    batch = scored(
        mask,
        rng.normal(size=(8, 6)),
        sequences=np.array([0, 1, 1, 2, 3, 4, 5, 6])[:, None],
        prompts=np.array([0, 0, 0, 1, 1, 1, 1, 2])[:, None],
    )
    draw = [jnp.asarray(rng.normal(size=(8, 6)) * 0.3, jnp.float32) for _ in range(3)]
    return batch, Scores(logps=draw[0], old_logps=draw[1], ref_logps=draw[2])


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", MEANS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_cut_gives_the_loss_and_gradient_of_the_whole_B023_R61(loss, aggregate):
    batch, scores = ragged_case()

    def total(logps, part, others):
        mean = MEANS[aggregate](LOSSES[loss](Scores(logps=logps, old_logps=others[0], ref_logps=others[1]), part)[0], part)
        return mean.total, mean

    def accumulate(cut):
        parts = [(part, jax.tree.map(lambda x, rows=rows: x[rows], scores)) for part, rows in cut]
        found = [jax.grad(total, has_aux=True)(s.logps, part, (s.old_logps, s.ref_logps)) for part, s in parts]
        mean = functools.reduce(lambda a, b: a + b, [m for _, m in found])
        return np.concatenate([g for g, _ in found]) / float(mean.weight), float(mean.value())

    whole_gradient, whole = accumulate([(batch, slice(0, 8))])
    assert np.abs(whole_gradient).max() > 1e-3
    cuts = {f"{k} parts": [(p, slice(i * 8 // k, (i + 1) * 8 // k)) for i, p in enumerate(split_rows(batch, k))] for k in (2, 4, 8)}
    cuts["ragged"] = [(jax.tree.map(lambda x, s=s: x[s], batch), s) for s in (slice(0, 2), slice(2, 3), slice(3, 8))]
    for name, cut in cuts.items():
        slope, value = accumulate(cut)
        np.testing.assert_allclose(slope, whole_gradient, atol=1e-6, err_msg=str(name))
        assert value == pytest.approx(whole, abs=1e-6), name


def test_rows_that_cant_be_cut_evenly_are_refused():
    with pytest.raises(ValueError, match="8 rows can't be cut into 3"):
        split_rows(ragged_case()[0], 3)
