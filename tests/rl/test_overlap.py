"""Micro-batches that go to the trainer as they are complete: the same numbers, sooner."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from burnish.config.algorithms import AnyAlgorithmConfig
from burnish.config.schema import RolloutConfig, TrainingConfig
from burnish.models.model import Model
from burnish.observe import trace
from burnish.observe.metrics import Metric
from burnish.rl.algorithms import from_config
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.cluster import RLCluster
from burnish.rl.overlap import streams
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.step import MicroBatch
from burnish.types import Trajectory
from tests.rl import runs
from tests.rl.runs import RecordingCluster, assert_same, host, make_learner

ALGORITHMS: TypeAdapter[Any] = TypeAdapter(AnyAlgorithmConfig)
SPLIT = {"actor": {"devices": 1}, "rollout": {"devices": 1}}
STEPS, MICROS = 4, 8
ROLLOUT_S = UPDATE_S = 3.2
"""Of a step, asleep: what the machine does beside it is small against that, also where it has much else to do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


@pytest.mark.parametrize(
    ("algorithm", "training", "apart", "expected"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({}, {"train_micro_batch_size": 8}, True, False),  # one micro-batch
        ({}, {"train_micro_batch_size": None, "tokens_per_device": 2048}, True, False),
        ({}, {"compute_logps_micro_batch_size": 1}, True, True),
        ({}, {"compute_logps_micro_batch_size": 4}, True, False),
        ({"zero_signal": "drop"}, {}, True, True),
        ({"zero_signal": "resample"}, {}, True, False),
        ({"beta": 0.1, "kl_in": "reward"}, {}, True, False),
        ({"name": "reinforce_pp"}, {}, True, False),
        ({"name": "ppo"}, {}, True, False),
    ],
)
def test_when_they_stream(algorithm: dict[str, Any], training: dict[str, Any], apart: bool, expected: bool) -> None:
    record = from_config(ALGORITHMS.validate_python({"name": "grpo"} | algorithm))
    plan = BatchPlan.from_config(TrainingConfig(**{"batch_size": 8, "train_micro_batch_size": 2} | training), record, RolloutConfig())
    assert streams(record, plan, apart=apart) is expected
    assert not streams(record, plan, apart=apart, num_processes=2)


def run(model: Model, cluster: dict[str, Any], **algorithm: Any) -> Any:
    sizes = {"max_steps": 3, "batch_size": 4, "mini_batch_size": 2, "train_micro_batch_size": 1}
    learner = make_learner(model, cluster=cluster, training=sizes, algorithm=algorithm)
    return learner, learner.train().history


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{}, {"num_iterations": 2}, {"beta": 0.1, "zero_signal": "drop"}])
def test_streaming_changes_no_bit(model: Model, algorithm: dict[str, Any]) -> None:
    whole, streamed = run(model, {"actor": {"devices": 1}}, **algorithm), run(model, SPLIT, **algorithm)
    assert_same(host(whole[0].cluster.state), host(streamed[0].cluster.state))
    timed = ("time/", "perf/", "memory/", "mismatch/", "queue/")
    for left, right in zip(whole[1], streamed[1], strict=True):
        assert {n: v for n, v in left.items() if not n.startswith(timed)} == {n: v for n, v in right.items() if not n.startswith(timed)}


class SlowlyTraining(RecordingCluster):
    """A trainer that needs so long for each micro-batch, as if on a device of its own."""

    def update_actor(self, micro_batches: Iterable[MicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        def slowly() -> Iterator[MicroBatch]:
            for micro in micro_batches:
                yield micro
                with trace.span("trains", step=step):
                    time.sleep(UPDATE_S / MICROS)

        return RLCluster.update_actor(self, slowly(), count=count, step=step)


async def slowly_sampled(completions: Sequence[str], trajectories: Sequence[Trajectory]) -> list[float]:
    """A reward that keeps a step's groups as far apart as if they were sampled one after another."""
    await asyncio.sleep(ROLLOUT_S / MICROS * (1 + trajectories[0].group[1]))
    return [float(i) for i in range(len(completions))]


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "limit"), [(0, 1.3), (1, 1.15)])
def test_a_step_takes_as_long_as_the_slower_side(model: Model, staleness: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling and training of equal length: 2.0 one after the other, 1.125 where the trainer waits for the first of 8 micro-batches."""
    monkeypatch.setattr(runs, "RecordingCluster", SlowlyTraining)
    trace.take()
    learner = runs.make_learner(
        model,
        reward=slowly_sampled,
        train_ds=[{"prompt": f"{i}{j}"} for i in range(5) for j in range(8)],
        cluster=SPLIT,
        rollout={"max_staleness": staleness},
        training={"max_steps": STEPS, "batch_size": MICROS, "train_micro_batch_size": 1},
        algorithm={"num_generations": 2},
    )
    ends: list[float] = []
    learner.train(on_step=lambda step: ends.append(time.monotonic()))
    whole = [later - sooner for sooner, later in itertools.pairwise(ends)][1:]  # the first two compile
    assert statistics.median(whole) <= limit * max(ROLLOUT_S, UPDATE_S)
    spans = trace.take()
    sampling = [s for s in spans if s.name == "rollout" and s.ids["step"] >= 2]
    training = [s for s in spans if s.name == "trains" and 2 < s.ids["step"] < STEPS]  # beside the last nothing is sampled
    beside = sum(_common(one, other) for one in sampling for other in training)
    assert beside > 0.6 * sum(s.seconds for s in training), "most of training is beside sampling, as the trace shows"


def _common(one: trace.span, other: trace.span) -> float:
    """Seconds that both last."""
    ends = [s.start_ns + s.duration_ns for s in (one, other)]
    return max(0, min(ends) - max(one.start_ns, other.start_ns)) / 1e9
