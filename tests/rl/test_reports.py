"""Locks what the metrics of a rollout count and leave out."""

from burnish.observe.metrics import MetricCollector
from burnish.rl.reports import record_rollout
from burnish.types import Group, Status

from .batches import group


def measured(groups: list[Group]) -> dict[str, float]:
    metrics = MetricCollector()
    record_rollout(metrics, groups, version=3, train_truncated=True)
    return metrics.take()


def test_groups_without_a_signal_are_a_share_of_those_that_have_rewards() -> None:
    tied, told, failed = group(0, [1], [[2], [3]]), group(1, [1], [[2], [3]]), group(2, [1], [[2], [3]], status=Status.ENV_ERROR)
    told.trajectories[0].reward = 0.0
    found = measured([tied, told, failed])
    assert found["group/zero_std_fraction"] == 0.5 and found["group/empty"] == 1
    assert found["status/env_error"] == 2 and found["status/ok"] == 4


def test_where_every_group_is_one_episode_nothing_is_said_of_their_signal() -> None:
    found = measured([group(0, [1], [[2]]), group(1, [1], [[3, 4]])])
    assert "group/zero_std_fraction" not in found and found["group/empty"] == 0
    assert found["length/sampled_mean"] == 1.5 and found["staleness/max"] == 3
