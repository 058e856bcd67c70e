"""Locks who counts in a baseline, by group id, and the advantages' values."""

import numpy as np
import pytest

from burnish.rl.advantages import count_groups, credit, group_relative, leave_one_out
from burnish.types import Group, Prompt, Status, Trajectory

SIX = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]


def everyone(rewards: list) -> np.ndarray:
    return np.ones(len(rewards), bool)


def trajectory(sample: int, reward: float | None, *, draw: int = 0, status: Status = Status.OK) -> Trajectory:
    return Trajectory(
        steps=[],
        ids=np.array([5, 6], np.int32),
        sampled=np.array([False, True]),
        sampler_logps=np.zeros(2, np.float32),
        versions=np.array([-1, 0], np.int32),
        prompt_length=1,
        group=(0, draw),
        sample=sample,
        status=status,
        reward=reward,
    )


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


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[0.1] * 3, [0.7] * 3, [1e6] * 8, [-3.0] * 2, [0.7] * 7, [0.1] * 7, [1000.3] * 7, [1e6 + 0.1] * 3, [2.0]]
)
def test_constant_group_is_exactly_zero_B005(rewards, scale):
    got = group_relative(rewards, ["g"] * len(rewards), valid=everyone(rewards), scale=scale)
    assert got.values.tolist() == [0.0] * len(rewards)
    assert leave_one_out(rewards, ["g"] * len(rewards), valid=everyone(rewards)).values.tolist() == [0.0] * len(rewards)
    assert got.valid.all(), "no signal isn't no reward: a KL penalty still applies"
    assert count_groups(rewards, ["g"] * len(rewards), valid=everyone(rewards)).constant == 1


def test_uneven_groups_go_by_id_in_any_order_B007():
    ids, rewards = list("aabbb"), [1, 0, 1, 1, 0]
    expected = np.array([0.7071, -0.7071, 0.5774, 0.5774, -1.1547])
    np.testing.assert_allclose(group_relative(rewards, ids, valid=np.ones(5, bool)).values, expected, atol=1e-4)
    order = [4, 0, 2, 1, 3]
    shuffled = group_relative([rewards[i] for i in order], [ids[i] for i in order], valid=np.ones(5, bool))
    np.testing.assert_allclose(shuffled.values, expected[order], atol=1e-4)


@pytest.mark.parametrize("estimator", [group_relative, leave_one_out])
def test_an_excluded_reward_moves_nobody_B009(estimator):
    valid = np.array([True, True, False])
    base = estimator([1, 0, 1], ["g"] * 3, valid=valid).values
    assert base.tobytes() == estimator([1, 0, 100], ["g"] * 3, valid=valid).values.tobytes()
    assert base[2] == 0


def test_an_advantage_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 rewards"):
        group_relative([1, 2], ["a", "a"], valid=np.ones(3, bool))


@pytest.mark.parametrize("train_truncated", [True, False])
def test_credit_goes_to_episodes_that_ended_and_have_a_reward(train_truncated):
    members = [
        trajectory(0, 1.0),
        trajectory(1, 0.0),
        trajectory(2, 0.5, status=Status.TRUNCATED),
        trajectory(3, 9.0, status=Status.ENV_ERROR),
        trajectory(4, None),
    ]
    given = credit([Group((0, 0), Prompt("p", ()), members)], group_relative, train_truncated=train_truncated)
    assert sorted(sample for _, sample in given) == ([0, 1, 2] if train_truncated else [0, 1])
    assert given[(0, 0), 0] == pytest.approx(0.999998 if train_truncated else 0.7071058, abs=1e-5)
