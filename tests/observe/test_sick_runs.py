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


NOISE = random.Random(5)


def noisy(completions: Sequence[str]) -> list[float]:
    """Pushes the policy somewhere else each time, however it answers."""
    return [NOISE.random() for _ in completions]


def broken(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    if answer[0] in "01234":
        raise ZeroDivisionError("no tests were run")
    return lucky(completions)


SICK: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "zero signal": ("no signal", nothing, {"sampling": ENDS}),
    "entropy": ("entropy collapses", seven, {"sampling": ENDS, "steps": 14, "learning_rate": 0.1}),
    "stale": (
        "sampler is stale",
        noisy,
        {"sampling": ENDS, "steps": 12, "learning_rate": 0.1, "rollout": {"max_staleness": 4}, "step_s": 0.3},  # slower than sampling
    ),
    "truncated": ("cut at the limit", lucky, {}),
    "grader": ("graders fail", broken, {"sampling": ENDS}),
    "KL": ("KL diverges", noisy, {"sampling": ENDS, "steps": 12, "learning_rate": 0.1, "algorithm": {"beta": 1e-4}}),
}


@pytest.mark.parametrize("sickness", SICK)
def test_the_first_warning_is_the_right_one_and_all_others_are_true(model: Model, sickness: str) -> None:
    name, reward, options = SICK[sickness]
    options = {"learning_rate": 1e-3, "steps": 6} | options
    algorithm, pause_s = {"num_generations": 8, **options.pop("algorithm", {})}, options.pop("step_s", 0.0)
    learner = make_learner(model, reward=reward, training={"max_steps": options.pop("steps")}, algorithm=algorithm, **options)
    history = learner.train(on_step=lambda step: time.sleep(pause_s)).history
    found = diagnose(history)
    # A sampler that runs ahead makes another run each time, in which the policy may collapse besides; then that is told first.
    told = found if sickness == "stale" else found[:1]
    assert name in [warning.name for warning in told], [(w.severity, w.line()) for w in found] + [shown(history[-1])]
    now = Recent(history[-RECENT:])
    for warning in found:
        for metric, value in warning.evidence.items():
            counted = metric.startswith(("status/", "stop/"))
            assert value == pytest.approx(now.sum(metric) if counted else now.mean(metric) or 0.0), f"{warning.text} ({metric})"


def test_a_run_that_learns_has_no_warning(model: Model) -> None:
    learner = make_learner(
        model, reward=lucky, training={"max_steps": 6}, sampling=ENDS, algorithm={"num_generations": 8}, learning_rate=1e-3
    )
    assert diagnose(learner.train().history) == []


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("policy/", "mismatch/", "stop/", "group/", "staleness/"))}
