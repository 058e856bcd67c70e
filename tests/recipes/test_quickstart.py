"""The quickstart's task: what is held out is held out, and its grader knows a right answer."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from burnish.config.loader import load_config
from burnish.config.resolve import resolve
from burnish.data.source import from_rows
from burnish.data.stream import PromptStream
from burnish.rewards import numeric
from burnish.rewards.check import check_gold
from burnish.types import Trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
pytestmark = pytest.mark.slow  # importing reasoning-gym takes 4 s
create_dataset = resolve("./quickstart.py", kind="recipe", base=RECIPE.parent, attribute="create_dataset")
shuffled = resolve("./quickstart.py:shuffled", kind="reward", base=RECIPE.parent)


@pytest.fixture(scope="module", autouse=True)
def reasoning_gym() -> ModuleType:
    return pytest.importorskip("reasoning_gym")


def test_no_question_is_in_both_splits_and_each_comes_in_every_wording() -> None:
    train, held_out = create_dataset("train"), create_dataset("eval")
    questions = {row["question"] for row in train}, {row["question"] for row in held_out}
    assert not questions[0] & questions[1]
    assert len(questions[0] | questions[1]) == 10 * 10 * 2
    assert len({row["prompt"] for row in held_out}) == len(held_out) == 3 * len(questions[1])
    with pytest.raises(ValueError, match="'train' or 'eval', got 'test'"):
        create_dataset("test")


def test_answers_are_the_sums_and_the_grader_takes_them_all() -> None:
    rows = create_dataset("eval")
    for row in rows:
        match = re.search(r"problem: (\d) ([+-]) (\d) =", row["prompt"])
        assert match is not None
        left, sign, right = match.groups()
        assert int(row["answer"]) == int(left) + (1 if sign == "+" else -1) * int(right)
    check_gold(numeric, from_rows(rows, name="eval").prompts)


def test_repeating_the_question_or_any_one_form_earns_little() -> None:
    rows = create_dataset("eval")
    answers = [row["answer"] for row in rows]
    assert np.mean(numeric([row["prompt"] for row in rows], answers)) < 0.15
    best = max(np.mean(numeric([f"The final answer is {guess}."] * len(rows), answers)) for guess in range(-18, 19))
    assert best < 0.15


def test_the_control_deals_out_the_same_rewards_by_the_groups_identity_alone() -> None:
    def episodes(draw: int) -> list[Trajectory]:
        none = np.zeros(0, np.int32)
        return [Trajectory([], none, none.astype(bool), none.astype(np.float32), none, 0, (0, draw), i) for i in range(8)]

    completions, answer = ["1", "1", "2", "3", "4", "5", "6", "7"], ["1"] * 8
    dealt = [shuffled(episodes(draw), completions, answer) for draw in range(40)]
    assert all(sorted(rewards) == sorted(numeric(completions, answer)) for rewards in dealt)
    assert dealt[3] == shuffled(episodes(3), completions, answer)
    assert 0 < np.mean(dealt, axis=0).min() and np.mean(dealt, axis=0).max() < 0.5


def test_a_reasoning_gym_data_set_is_a_source_as_it_is(reasoning_gym: ModuleType) -> None:
    source = from_rows(reasoning_gym.create_dataset("chain_sum", size=20, seed=3), name="sums", prompt_key="question")
    assert source.num_rows == 20
    stream = PromptStream([source], seed=0, epochs=1)
    assert sorted(prompt.id for prompt in stream) == sorted(f"sums:{i}" for i in range(20))


def test_the_configuration_holds_out_at_least_300_tasks() -> None:
    config = load_config(RECIPE, (), {}).config
    assert len(create_dataset(**config.data.eval[0].options)) >= 300
