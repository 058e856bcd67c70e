"""What runs beside what: charts of placements worked out by hand from the order of the learner and its producer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.schema import Config
from burnish.rl.forecast.report import Forecast, planned
from burnish.rl.forecast.timeline import timeline
from burnish.testing.tiny import write_tiny_model

SPLIT: Any = {"actor": {"axes": {"data": 2}}, "rollout": {"devices": 2}}
SIZES: Any = {"batch_size": 8, "mini_batch_size": 4, "rollout_micro_batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, alphabet="0123456789+")
    return folder


def chart(folder: Path, *, training: Any = SIZES, cluster: Any = SPLIT, algorithm: Any = None, staleness: int = 0) -> list[str]:
    options = {
        "rollout": {"max_staleness": staleness},
        "model": {"path": str(folder), "precision": "f32"},
        "training": training,
        "cluster": cluster,
    }
    run = planned(
        Forecast(), Config.model_validate({**options, "algorithm": {"name": "grpo", **(algorithm or {})}}), base=folder, num_devices=8
    )
    assert run is not None
    return timeline(run).splitlines()


def test_the_engine_samples_what_comes_next_while_the_actor_learns(folder: Path) -> None:
    assert chart(folder) == [
        "role     devices  1         2         3         4        5         6",
        "actor    0,1                score 1   update 1  score 2  update 2  sync",
        "rollout  2,3      sample 1  sample 2  ·····                        sync",
        "At the same time: actor and rollout, which have no device in common.",
    ]


def test_micro_batches_that_stream_are_learned_beside_the_sampling_of_their_own_step(folder: Path) -> None:
    assert chart(folder, training=SIZES | {"train_micro_batch_size": 2}) == [
        "role     devices  1           2        3         4        5         6",
        "actor    0,1                  score 1  update 1  score 2  update 2  sync",
        "rollout  2,3      sample 1-2  ·····    ·····     ·····    ·····     sync",
        "At the same time: actor and rollout, which have no device in common.",
        "Micro-batches of 2 prompts go to the trainer as they are complete: gradients of the first are taken while the last are sampled.",
    ]
    one = chart(folder, training={"batch_size": 8})
    assert one[-1].endswith(
        "a smaller training.train_micro_batch_size lets gradients of the first groups be taken while the last are sampled."
    )


def test_on_common_devices_nothing_overlaps(folder: Path) -> None:
    assert chart(folder, cluster={"actor": {"axes": {"data": 2}}}) == [
        "role     devices  1         2        3         4         5        6         7",
        "actor    0,1                score 1  update 1            score 2  update 2  sync",
        "rollout  0,1      sample 1                     sample 2                     sync",
        "Sampling and updates don't overlap: actor and rollout have devices in common, where their programs take turns.",
    ]


def test_a_reference_of_its_own_scores_beside_the_actor(folder: Path) -> None:
    lines = chart(
        folder, training={"batch_size": 8}, cluster=SPLIT | {"reference": {"devices": 1}}, algorithm={"beta": 0.1, "old": "recomputed"}
    )
    assert lines[:5] == [
        "role       devices  1         2        3         4",
        "actor      0,1                score 1  update 1  sync",
        "rollout    2,3      sample 1                     sync",
        "reference  4                  score 1",
        "At the same time: actor and reference, which have no device in common.",
    ]
    assert lines[5].startswith("Sampling and updates don't overlap: a step is one mini-batch")
    one_by_one = chart(
        folder,
        training={"batch_size": 8, "compute_logps_micro_batch_size": 2},
        cluster=SPLIT | {"reference": {"devices": 1}},
        algorithm={"beta": 0.1, "old": "recomputed"},
    )
    assert one_by_one[0].split()[-1] == "5", "passes that are read one by one are waited for"


def test_a_critic_beside_the_engine_waits_for_it(folder: Path) -> None:
    lines = chart(folder, cluster=SPLIT | {"critic": {"same_as": "rollout"}}, algorithm={"name": "ppo", "kl_in": "loss"})
    assert lines[:4] == [
        "role     devices  1         2         3         4         5         6         7         8",
        "actor    0,1                score 1             update 1  score 2             update 2  sync",
        "rollout  2,3      sample 1                      sample 2                                sync",
        "critic   2,3                values 1  update 1            values 2  update 2",
    ]


def test_many_mini_batches_are_cut_short_and_what_goes_on_together_is_one(folder: Path) -> None:
    many = chart(folder, training={"batch_size": 8, "mini_batch_size": 1, "rollout_micro_batch_size": 1})
    assert "sample 3" in many[2] and "…" in many[2] and "sample 4" not in many[2] and "update 8" in many[1]
    assert many[-1] == "… stands for the mini-batches between, which go as those before."
    together = chart(folder, training={"batch_size": 8, "mini_batch_size": 2, "rollout_micro_batch_size": 4})
    assert together[2].split()[2:] == ["sample", "1-2", "sample", "3-4", "·····", "·····", "·····", "sync"]
    alone = chart(folder, training={"batch_size": 8, "mini_batch_size": 2})
    assert alone[2].split()[2:] == ["sample", "1-4", "sync"] and "rollout_micro_batch_size of 2 would" in alone[-1]
    resampled = chart(folder, algorithm={"name": "dapo", "zero_signal": "resample"})
    assert resampled[2].split()[2:] == ["sample", "1-2", "sync"] and "resample" in resampled[-1]


def test_sampling_that_may_be_ahead_goes_on_beside_a_whole_step(folder: Path) -> None:
    assert chart(folder, training={"batch_size": 8}, staleness=2) == [
        "role     devices  1             2         3",
        "actor    0,1      score 1       update 1  sync",
        "rollout  2,3      sample later  ·····     sync",
        "At the same time: actor and rollout, which have no device in common.",
        "What is sampled here is for later steps, with weights that will be up to 2 versions behind (rollout.max_staleness).",
    ]
    colocated = chart(folder, training={"batch_size": 8}, staleness=1, cluster={"actor": {"axes": {"data": 2}}})
    assert colocated[2].split() == ["rollout", "0,1", "sample", "later", "sync"] and "take turns" in colocated[3]
