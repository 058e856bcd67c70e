"""A run that sampled ahead, made again from its episodes."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.agentic.orchestrator import Draw
from burnish.config.errors import UserError
from burnish.models.model import Model
from burnish.observe.sinks import StepReport
from burnish.rl.replay import EpisodeSink, Replayed
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.types import Group, Prompt, SamplingParams
from tests.rl.runs import assert_same, host, make_learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

SETTINGS: dict[str, Any] = {"training": {"max_steps": 4, "train_micro_batch_size": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


class Log:
    """What was sampled, by which weights, and the metrics that don't measure time."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def step(self, report: StepReport) -> None:
        numbers = {n: v for n, v in report.metrics.items() if not n.startswith(("time/", "perf/", "memory/", "queue/"))}
        self.steps.append(([(t.ids.tolist(), t.versions.tolist()) for group in report.groups for t in group.trajectories], numbers))

    def evaluation(self, report: Any) -> None:
        raise AssertionError("nothing is evaluated here")

    def close(self) -> None:
        """Nothing is open."""


def never(completions: list[str]) -> list[float]:
    raise AssertionError("nothing is graded again")


@pytest.fixture(scope="module")
def kept(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log, Any]:
    """A run whose trainer is slow, so that sampling runs ahead: its folder, its log, its states in the end."""
    folder, log = tmp_path_factory.mktemp("ahead"), Log()
    learner = make_learner(model, rollout={"max_staleness": 2}, sinks=[log, EpisodeSink(folder)], **SETTINGS)
    learner.train(on_step=lambda step: time.sleep(0.3))
    return folder, log, host(learner.cluster.states)


def test_a_run_that_sampled_ahead_is_made_again_bit_for_bit(model: Model, kept: tuple[Path, Log, Any]) -> None:
    """Nothing is late in the replay, so that by itself it would sample from other weights; and nothing is graded."""
    folder, log, states = kept
    assert max(numbers["staleness/max"] for _, numbers in log.steps) == 2
    again = Log()
    replay = {"max_staleness": 2, "replay": str(folder)}
    learner = make_learner(model, reward=never, rollout=replay, sinks=[again], **SETTINGS)
    learner.train()
    assert_same(host(learner.cluster.states), states)
    assert again.steps == log.steps


def test_what_doesnt_fit_the_replayed_run_is_told(kept: tuple[Path, Log, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no folder `episodes`: the run wasn't made with observe.episodes=true"):
        Replayed(tmp_path)

    async def first(step: int, prompt: str, samples: int = 4) -> Group:
        draw = Draw((step, 0), Prompt(prompt, ()), (SamplingParams(4),) * samples, (0,))
        return [group async for group in Replayed(kept[0]).groups([draw])][0]

    with pytest.raises(UserError, match=r"draw 0 of step 1 is 4 episodes of other:1, and .* has 4 episodes of train:\d: give the run's"):
        asyncio.run(first(0, "other:1"))
    with pytest.raises(UserError, match=r"step_5.bin isn't there: the run that is replayed had fewer steps"):
        asyncio.run(first(4, "train:1"))


def test_a_run_that_goes_on_makes_later_episodes_again(kept: tuple[Path, Log, Any], tmp_path: Path) -> None:
    shutil.copytree(kept[0], tmp_path / "run")
    EpisodeSink(tmp_path / "run").rewind(2)
    assert sorted(path.name for path in (tmp_path / "run" / "episodes").iterdir()) == ["step_1.bin", "step_2.bin"]
