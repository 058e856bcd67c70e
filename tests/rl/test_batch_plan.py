"""Locks the arithmetic of a step's sizes and what its errors say."""

import pytest

from burnish.config.algorithms import AlgorithmConfig, GRPOConfig
from burnish.config.schema import RolloutConfig, SamplingConfig, TrainingConfig
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
        TrainingConfig.model_validate(changes),
        AlgorithmConfig(num_iterations=num_iterations, num_generations=num_generations),
        RolloutConfig(max_prompt_tokens=500, sampling=SamplingConfig(max_tokens=100)),
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
    assert BatchPlan.from_config(training, from_config(config), RolloutConfig()) == BatchPlan.from_config(training, config, RolloutConfig())


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
        ({"compute_logps_micro_batch_size": 9}, ["compute_logps_micro_batch_size is 9", "use compute_logps_micro_batch_size 6"]),
    ],
)
def test_an_error_names_both_numbers_and_a_fix(changes, words):
    with pytest.raises(ValueError) as error:
        plan(**(SIZES | changes))
    for word in words:
        assert word in str(error.value)


def test_tokens_per_device_leaves_the_number_of_micro_batches_open():
    one = plan(batch_size=24, mini_batch_size=12, tokens_per_device=600, num_iterations=2)
    assert (one.train_micro, one.tokens_per_device, one.accumulation_steps) == (None, 600, None)
    assert (one.updates_per_step, one.logps_micro, one.service, one.queue_size) == (4, None, 24, 25)
    table = one.table()
    assert "tokens_per_device" in table and "600 tokens on each device" in table
    assert "train_micro_batch_size" not in table and "compute_logps" not in table and "some micro-batches accumulated" in table


def test_an_episode_that_no_device_can_hold_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"tokens_per_device is 599.*600 tokens.*500 \+ rollout.sampling.max_tokens 100.*use.* 600"):
        plan(batch_size=24, tokens_per_device=599)


def test_there_is_one_way_to_cut_a_mini_batch():
    for name in ("train_micro_batch_size", "compute_logps_micro_batch_size"):
        with pytest.raises(ValueError, match=f"`tokens_per_device` is 4096 and `{name}` is 4: both say"):
            TrainingConfig.model_validate({"tokens_per_device": 4096, name: 4})


def test_the_table_says_what_each_size_is():
    table = plan(**SIZES).table()
    assert "compute_logps_micro_batch_size        6      48" in table
    assert "(service batch)                      12      96" in table
    assert "2 mini-batches, 2 updates" in table and "queue of 4" in table
    assert "Under continuous batching" in table and "rollout.slots episodes decode at once" in table
