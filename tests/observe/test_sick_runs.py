"""Six runs that are sick in a known way, through the real learner: the first warning is the right one, all others are true."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from burnish.models.model import Model
from burnish.observe.health import RECENT, Recent, diagnose
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import make_learner

pytestmark = pytest.mark.slow

ENDS: dict[str, Any] = {"stop_strings": list("0123456789")}
"""A completion is one digit, and ends by itself."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=0.3)
    return Model.load(folder)


def lucky(completions: Sequence[str]) -> list[float]:
    draw = random.Random("".join(completions))
    return [draw.random() for _ in completions]


def nothing(completions: Sequence[str]) -> list[float]:
    return [1.0] * len(completions)


def seven(completions: Sequence[str]) -> list[float]:
    return [float("7" in text) for text in completions]


class Noise:
    """Pushes the policy somewhere else each time, however it answers. groups: how many it has paid."""

    def __init__(self) -> None:
        self._draw, self.groups = random.Random(5), 0

    def __call__(self, completions: Sequence[str]) -> list[float]:
        self.groups += 1
        return [self._draw.random() for _ in completions]

    def wait_for(self, groups: int) -> None:
        """Until sampling is so far."""
        deadline = time.monotonic() + 60
        while self.groups < groups and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.groups >= groups


def broken(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    if answer[0] in "01234":
        raise ZeroDivisionError("no tests were run")
    return lucky(completions)


NOISE = Noise()
AHEAD = 3
SICK: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "zero signal": ("no signal", nothing, {"sampling": ENDS, "steps": 3}),
    "entropy": ("entropy collapses", seven, {"sampling": ENDS, "steps": 14, "learning_rate": 0.1}),
    "stale": ("sampler is stale", NOISE, {"sampling": ENDS, "steps": 7, "learning_rate": 0.1, "rollout": {"max_staleness": AHEAD + 1}}),
    "truncated": ("cut at the limit", lucky, {"steps": 3}),
    "grader": ("graders fail", broken, {"sampling": ENDS, "steps": 3}),
    "KL": ("KL diverges", NOISE, {"sampling": ENDS, "steps": 12, "learning_rate": 0.1, "algorithm": {"beta": 1e-4}}),
}


@pytest.mark.parametrize("sickness", SICK)
def test_the_first_warning_is_the_right_one_and_all_others_are_true(model: Model, sickness: str) -> None:
    name, reward, options = SICK[sickness]
    options = {"learning_rate": 1e-3} | options
    steps, NOISE.groups = options.pop("steps"), 0
    algorithm = {"num_generations": 8, **options.pop("algorithm", {})}
    learner = make_learner(model, reward=reward, training={"max_steps": steps}, algorithm=algorithm, **options)

    def slower_than_sampling(step: int) -> None:
        NOISE.wait_for(4 * min(step + AHEAD, steps))

    history = learner.train(on_step=slower_than_sampling if sickness == "stale" else None).history
    found = diagnose(history)
    assert found and found[0].name == name, [(w.severity, w.line()) for w in found] + [shown(history[-1])]
    now = Recent(history[-RECENT:])
    for warning in found:
        for metric, value in warning.evidence.items():
            counted = metric.startswith(("status/", "stop/"))
            assert value == pytest.approx(now.sum(metric) if counted else now.mean(metric) or 0.0), f"{warning.text} ({metric})"


def test_a_run_that_learns_has_no_warning(model: Model) -> None:
    learner = make_learner(
        model, reward=lucky, training={"max_steps": 4}, sampling=ENDS, algorithm={"num_generations": 8}, learning_rate=1e-3
    )
    assert diagnose(learner.train().history) == []


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("policy/", "mismatch/", "stop/", "group/", "staleness/"))}
