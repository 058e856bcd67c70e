"""Sampling ahead of the trainer: never further than allowed, whatever is slow; and at 0 the same updates whatever is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.models.model import Model
from burnish.observe import trace
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import assert_same, digits_reward, host, make_learner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


def run(model: Model, staleness: int, *, steps: int, reward_s: float = 0.0, step_s: float = 0.0, seed: int = 0) -> Any:
    """A finished run and its history; rewards and steps take random times up to those given."""
    dice = random.Random(seed)

    def slow(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        time.sleep(dice.uniform(0, reward_s))
        return digits_reward(completions, answer)

    learner = make_learner(model, reward=slow, rollout={"max_staleness": staleness}, training={"max_steps": steps})
    return learner, learner.train(on_step=lambda step: time.sleep(dice.uniform(0, step_s))).history


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_token_is_older_than_allowed_over_50_steps_of_random_delays(model: Model, staleness: int) -> None:
    _, history = run(model, staleness, steps=50, reward_s=0.02, step_s=0.05)
    assert len(history) == 50
    worst = [metrics["staleness/max"] for metrics in history]
    assert max(worst) <= staleness
    assert (max(worst) > 0) == (staleness > 0), "a trainer this slow lets sampling run ahead"


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_b093_k_versions_allowed_are_k_versions(model: Model, staleness: int) -> None:
    """A trainer that is always the slower one: sampling is as far ahead as it may be, from the step on at which it can be."""
    learner = make_learner(model, rollout={"max_staleness": staleness}, training={"max_steps": 8})
    history = learner.train(on_step=lambda step: time.sleep(0.3)).history
    assert [metrics["staleness/max"] for metrics in history] == [min(step, staleness) for step in range(8)]
    assert all(metrics["mismatch/max"] < 1e-4 for metrics in history) == (staleness == 0)


def test_at_0_delays_change_no_bit(model: Model) -> None:
    prompt, late = run(model, 0, steps=6), run(model, 0, steps=6, reward_s=0.05, step_s=0.05, seed=1)
    assert_same(host(prompt[0].cluster.state), host(late[0].cluster.state))
    assert [m["reward/mean"] for m in prompt[1]] == [m["reward/mean"] for m in late[1]]


def test_ahead_the_ratio_is_taken_to_the_policy_that_the_step_began_with(model: Model) -> None:
    """One update a step: the anchor is the policy itself, so the ratio is 1, and the older sampler is a matter of importance weights."""
    trace.take()
    learner, history = run(model, 2, steps=6, step_s=0.2)
    np.testing.assert_allclose([m["policy/ratio_mean"] for m in history], 1.0, atol=1e-6)
    assert max(m["mismatch/mean"] for m in history) > 1e-4
    assert len([s for s in trace.take() if s.name == "score" and s.ids.get("role") == "actor"]) == 6


def test_lent_weights_allow_no_staleness(model: Model) -> None:
    with pytest.raises(UserError, match=r"rollout.weights is lent and rollout.max_staleness is 1"):
        make_learner(model, rollout={"max_staleness": 1, "weights": "lent"})
