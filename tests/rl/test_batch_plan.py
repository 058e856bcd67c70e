"""Locks the arithmetic of a step's sizes and what its errors say."""

import pytest

from burnish.config.algorithms import AlgorithmConfig, GRPOConfig
from burnish.config.schema import TrainingConfig
from burnish.rl.algorithms import from_config
from burnish.rl.batch_plan import BatchPlan

SIZES = {
    "batch_size": 24,
    "mini_batch_size": 12,
    "train_micro_batch_size": 4,
    "rollout_micro_batch_size": 4,
    "compute_logps_micro_batch_size": 6,
}


def plan(*, num_iterations: int = 1, num_generations: int = 8, **changes) -> BatchPlan:
    return BatchPlan.from_config(
        TrainingConfig.model_validate(changes), AlgorithmConfig(num_iterations=num_iterations, num_generations=num_generations)
    )


def test_worked_numbers():
    one = plan(**SIZES)
    assert (one.updates_per_step, one.accumulation_steps, one.service, one.service * one.num_generations, one.queue_size) == (
        2,
        3,
        12,
        96,
        4,
    )
    two = plan(**SIZES, num_iterations=2)
    assert (two.updates_per_step, two.accumulation_steps, two.queue_size) == (4, 3, 7)
    assert plan(**SIZES, num_generations=2).service == 12, "counted before the repeat"


def test_a_record_says_the_same_as_its_configuration():
    config, training = GRPOConfig(num_iterations=2, num_generations=4), TrainingConfig.model_validate(SIZES)
    assert BatchPlan.from_config(training, from_config(config)) == BatchPlan.from_config(training, config)


def test_defaults_follow_from_the_batch():
    one = plan(batch_size=6)
    assert (one.mini_batch, one.train_micro, one.rollout, one.logps_micro) == (6, 6, 6, 6)
    two = plan(batch_size=12, mini_batch_size=6, train_micro_batch_size=3)
    assert (two.rollout, two.logps_micro, two.num_mini_batches, two.queue_size) == (12, 3, 2, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mini_batch_size": 5},
            ["training.mini_batch_size is 5", "training.batch_size, which is 24", "use mini_batch_size 4", "batch_size 25"],
        ),
        ({"mini_batch_size": 48}, ["mini_batch_size is 48", "use mini_batch_size 24"]),
        ({"train_micro_batch_size": 8}, ["train_micro_batch_size is 8", "mini_batch_size, which is 12", "use train_micro_batch_size 6"]),
        ({"rollout_micro_batch_size": 7}, ["rollout_micro_batch_size is 7", "batch_size, which is 24"]),
        ({"compute_logps_micro_batch_size": 9}, ["compute_logps_micro_batch_size is 9", "use compute_logps_micro_batch_size 8"]),
    ],
)
def test_an_error_names_both_numbers_and_a_fix(changes, words):
    with pytest.raises(ValueError) as error:
        plan(**(SIZES | changes))
    for word in words:
        assert word in str(error.value)


def test_the_table_says_what_each_size_is():
    table = plan(**SIZES).table()
    assert "compute_logps_micro_batch_size        6      48" in table
    assert "(service batch)                      12      96" in table
    assert "2 mini-batches, 2 updates" in table and "queue of 4" in table
