"""Locks who counts in a baseline, by group id, and the advantages' values."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rl.advantages import (
    Advantages,
    WeightedReward,
    batch_normalised,
    count_groups,
    gdpo,
    group_relative,
    leave_one_out,
    maxrl,
)

SIX = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]


def everyone(rewards: list) -> np.ndarray:
    return np.ones(len(rewards), bool)


def weighted(correct: float, form: float, *, weight: float = 1.0) -> WeightedReward:
    return WeightedReward(correct + weight * form, {"correct": float(correct), "form": float(form)}, {"correct": 1.0, "form": weight})


def gdpo_of_one(rewards, group_ids, /, *, valid) -> Advantages:
    """gdpo with a single reward function, callable with plain numbers."""
    alone = [None if r is None else WeightedReward(float(r), {"only": float(r)}, {}) for r in rewards]
    return gdpo(alone, group_ids, valid=valid)


ALL = [
    group_relative,
    functools.partial(group_relative, scale="batch"),
    functools.partial(group_relative, scale="none"),
    leave_one_out,
    batch_normalised,
    functools.partial(batch_normalised, baseline=True),
    gdpo_of_one,
    maxrl,
]
WITH_BASELINE = [estimator for estimator in ALL if estimator is not batch_normalised]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]),
        ("none", [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747]),
    ],
)
def test_group_relative_values(scale, expected):
    got = group_relative(SIX, list("aaabbb"), valid=everyone(SIX), scale=scale)
    np.testing.assert_allclose(got.values, expected, atol=1e-5)
    assert got.values.dtype == np.float32


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        (group_relative, {"scale": "group"}, [-0.92582, -0.46291, 0, 1.38873]),
        (group_relative, {"scale": "none"}, [-2, -1, 0, 3]),
        (leave_one_out, {}, [-2.666667, -1.333333, 0, 4]),
    ],
)
def test_three_baselines_on_one_group(estimator, options, expected):
    np.testing.assert_allclose(estimator([0, 1, 2, 5], [7] * 4, valid=np.ones(4, bool), **options).values, expected, atol=2e-6)


def test_leave_one_out_values():
    got = leave_one_out([1, 2, 3, 4, 5, 6], list("aaabbb"), valid=np.ones(6, bool))
    np.testing.assert_allclose(got.values, [-1.5, 0, 1.5, -1.5, 0, 1.5], atol=1e-6)


def test_batch_scale_divides_by_the_deviation_of_all_valid_rewards():
    got = group_relative([0, 1, 5, 5, 9], list("aabbc"), valid=np.array([1, 1, 1, 1, 0], bool), scale="batch")
    deviation = np.std([0, 1, 5, 5], ddof=1)
    np.testing.assert_allclose(got.values, np.array([-0.5, 0.5, 0, 0, 0]) / deviation, rtol=1e-5)


def test_missing_reward_leaves_the_baseline_and_the_loss_B001():
    for missing in (None, float("nan"), float("inf")):
        got = group_relative([1, missing, 0, 1], ["g"] * 4, valid=np.ones(4, bool))
        np.testing.assert_allclose(got.values, [0.577349, 0, -1.154699, 0.577349], atol=1e-6)
        assert got.valid.tolist() == [True, False, True, True]


def test_group_without_any_reward_is_counted_and_carries_nothing_B001():
    rewards = [None] * 4
    got = group_relative(rewards, ["g"] * 4, valid=everyone(rewards))
    assert not got.valid.any() and not got.values.any()
    counts = count_groups([None, None, 1, 1, 0, 1], list("aabbcc"), valid=np.ones(6, bool))
    assert (counts.groups, counts.constant, counts.empty) == (3, 1, 1)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize(
    "rewards", [[0.1] * 3, [0.7] * 3, [1e6] * 8, [3.0] * 2, [0.7] * 7, [0.1] * 7, [1000.3] * 7, [1e6 + 0.1] * 3, [2.0], [0.0] * 4]
)
def test_constant_group_is_exactly_zero_B005(rewards, estimator):
    got = estimator(rewards, ["g"] * len(rewards), valid=everyone(rewards))
    assert got.values.tolist() == [0.0] * len(rewards)
    assert got.valid.all(), "no signal isn't no reward: a KL penalty still applies"
    assert count_groups(rewards, ["g"] * len(rewards), valid=everyone(rewards)).constant == 1


@pytest.mark.parametrize("estimator", [e for e in ALL if e is not maxrl])
def test_constant_group_of_punishments_is_exactly_zero_B005(estimator):
    assert estimator([-3.0, -3.0], ["g"] * 2, valid=np.ones(2, bool)).values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", WITH_BASELINE)
def test_constant_group_stays_exactly_zero_beside_others(estimator):
    rewards, ids = [0.7, 0.1, 0.7, 0.0, 0.7, 0.3] + [0.7] * 4, list("ababababaa")
    got = estimator(rewards, ids, valid=np.ones(10, bool)).values
    assert got[0::2].tolist() == [0.0] * 5 and got[8:].tolist() == [0.0] * 2
    assert got[1] != 0 and np.isfinite(got).all()


def test_uneven_groups_go_by_id_in_any_order_B007():
    ids, rewards = list("aabbb"), [1, 0, 1, 1, 0]
    expected = np.array([0.7071, -0.7071, 0.5774, 0.5774, -1.1547])
    np.testing.assert_allclose(group_relative(rewards, ids, valid=np.ones(5, bool)).values, expected, atol=1e-4)
    order = [4, 0, 2, 1, 3]
    shuffled = group_relative([rewards[i] for i in order], [ids[i] for i in order], valid=np.ones(5, bool))
    np.testing.assert_allclose(shuffled.values, expected[order], atol=1e-4)


@pytest.mark.parametrize("estimator", ALL)
def test_an_excluded_reward_moves_nobody_B009(estimator):
    valid, ids = np.array([True, True, False, True, True]), list("gggff")
    base = estimator([1, 0.3, 1, 2, 0], ids, valid=valid).values
    assert base.tobytes() == estimator([1, 0.3, 100, 2, 0], ids, valid=valid).values.tobytes()
    assert base.tobytes() == estimator([1, 0.3, None, 2, 0], ids, valid=np.ones(5, bool)).values.tobytes()
    assert base[2] == 0 and base[0] > 0


GROUPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5])), st.booleans()),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("estimator", ALL)
@settings(max_examples=40, deadline=None)
@given(GROUPS, st.randoms(use_true_random=False))
def test_laws_of_every_estimator(estimator, rows, random):
    """Any uneven groups: rows may stand in any order, centred groups sum to 0, the missing get nothing, and everything is finite."""
    ids, rewards, ok = zip(*rows, strict=True)
    got = estimator(rewards, ids, valid=np.array(ok))
    assert np.isfinite(got.values).all() and got.values.dtype == np.float32
    assert got.valid.tolist() == [valid and reward is not None for _, reward, valid in rows]
    assert not got.values[~got.valid].any()
    order = random.sample(range(len(rows)), len(rows))
    moved = estimator([rewards[i] for i in order], [ids[i] for i in order], valid=np.array([ok[i] for i in order]))
    np.testing.assert_allclose(moved.values, got.values[order], rtol=1e-5, atol=1e-6)
    if estimator is not batch_normalised:
        for name in "abc":
            members = [i for i, row in enumerate(rows) if row[0] == name]
            assert abs(got.values[members].sum()) < 1e-4


def test_batch_normalised_values():
    """r = 1, 0, 1, 1, 0: mean .6, deviation sqrt(.3) = .547723."""
    ids, rewards = list("aabbb"), [1, 0, 1, 1, 0]
    got = batch_normalised(rewards, ids, valid=np.ones(5, bool))
    np.testing.assert_allclose(got.values, [0.730297, -1.095445, 0.730297, 0.730297, -1.095445], rtol=1e-5)
    moved = batch_normalised(rewards, list("abcde"), valid=np.ones(5, bool))
    assert moved.values.tobytes() == got.values.tobytes(), "no group has a part in it"


def test_batch_normalised_with_a_baseline_divides_by_the_deviation_of_centred_rewards():
    """c = .5, -.5, 1/3, 1/3, -2/3: sum of squares 7/6, deviation sqrt(7/24) = .540062; that of the rewards themselves is .547723."""
    got = batch_normalised([1, 0, 1, 1, 0], list("aabbb"), valid=np.ones(5, bool), baseline=True)
    np.testing.assert_allclose(got.values, np.array([0.5, -0.5, 1 / 3, 1 / 3, -2 / 3]) / 0.540062, rtol=1e-5)


def test_a_constant_group_learns_from_the_others_where_there_is_no_baseline():
    got = batch_normalised([1, 1, 0, 0], list("aabb"), valid=np.ones(4, bool))
    np.testing.assert_allclose(got.values, [0.866024, 0.866024, -0.866024, -0.866024], atol=1e-6)


def test_gdpo_keeps_apart_what_a_sum_would_mix():
    """Two rewards won against one: z-scores of +-.7071 each, so sums of 1.4142 and .7071; the deviation of all four is sqrt(5/3)."""
    rewards = [weighted(0, 0), weighted(1, 1), weighted(0, 1), weighted(0, 2)]
    got = gdpo(rewards, list("aabb"), valid=np.ones(4, bool))
    np.testing.assert_allclose(got.values, [-1.095445, 1.095445, -0.547723, 0.547723], rtol=1e-5)
    summed = group_relative(rewards, list("aabb"), valid=np.ones(4, bool)).values
    np.testing.assert_allclose(summed, [-0.707106, 0.707106, -0.707106, 0.707106], rtol=1e-5)


def test_gdpo_weighs_normalised_rewards_not_raw_ones():
    """A function's scale means nothing, its weight does: 1 and .5 of a z-score."""
    for scale in (1.0, 100.0):
        rewards = [weighted(0, scale, weight=0.5), weighted(1, 0, weight=0.5), weighted(0, 0, weight=0.5), weighted(0, 0, weight=0.5)]
        got = gdpo(rewards, ["a"] * 4, valid=np.ones(4, bool)).values
        z = np.array([[-0.5, 1.5, -0.5, -0.5], [1.5, -0.5, -0.5, -0.5]])
        raw = z[0] + 0.5 * z[1]
        np.testing.assert_allclose(got, raw / raw.std(ddof=1), rtol=1e-5)


def test_gdpo_leaves_a_function_that_gave_nothing_out_of_its_mean_B001():
    """The third has no "form": of the other two one has more; in "correct" all three count."""
    rewards = [weighted(1, 4), weighted(0, 2), WeightedReward(0.0, {"correct": 0.0}, {})]
    got = gdpo(rewards, ["g"] * 3, valid=np.ones(3, bool)).values
    raw = np.array([2, -1, -1]) / math.sqrt(3) + np.array([1, -1, 0]) / math.sqrt(2)
    np.testing.assert_allclose(got, raw / raw.std(ddof=1), rtol=1e-5)


def test_gdpo_refuses_rewards_of_unknown_origin():
    with pytest.raises(TypeError, match="what each reward function gave"):
        gdpo([1.0, 0.0], ["a"] * 2, valid=np.ones(2, bool))


def test_maxrl_values():
    """One success in four is worth 3, each failure -1; one in two is worth 1."""
    got = maxrl([1, 0, 0, 0, 1, 0, 0, 0, 1, 1], list("aaaabbccdd"), valid=np.ones(10, bool))
    assert got.values.tolist() == [3, -1, -1, -1, 1, -1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="got -0.5"):
        maxrl([1, -0.5], ["a"] * 2, valid=np.ones(2, bool))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_maxrl_is_an_unbiased_gradient_of_its_objective(size):
    """Over all outcomes of a coin with P(1) = p and parameter logit p, whose score function is r - p."""
    p, expected = 0.3, 0.0
    for outcome in itertools.product([0, 1], repeat=size):
        chance = math.prod(p if r else 1 - p for r in outcome)
        values = maxrl(outcome, ["g"] * size, valid=np.ones(size, bool)).values
        expected += chance * float(np.mean(values * (np.array(outcome) - p)))
    gradient = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
    assert expected == pytest.approx(gradient, rel=1e-6)


def test_an_advantage_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 rewards"):
        group_relative([1, 2], ["a", "a"], valid=np.ones(3, bool))
