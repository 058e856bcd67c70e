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
from burnish.rewards.manager import check_gold
from burnish.types import Trajectory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
pytestmark = pytest.mark.slow  # importing reasoning-gym takes 4 s
create_dataset = resolve("./quickstart.py", kind="recipe", base=RECIPE.parent, attribute="create_dataset")
shuffled = resolve("./quickstart.py:shuffled", kind="reward", base=RECIPE.parent)


@pytest.fixture(scope="module", autouse=True)
def reasoning_gym() -> ModuleType:
    return pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(("negative", "train_size", "eval_size"), [(True, 384, 338), (False, 101, 99)])
def test_no_question_is_in_both_splits_or_twice_in_one_whatever_the_seeds(negative: bool, train_size: int, eval_size: int) -> None:
    train = {row["prompt"] for row in create_dataset(train_size, "train", seed=0, negative=negative)}
    held_out = {row["prompt"] for row in create_dataset(eval_size, "eval", seed=5, negative=negative)}
    assert len(train) == train_size and len(held_out) == eval_size and not train & held_out
    assert len(train | held_out) == (19 * 19 if negative else 10 * 10) * 2


def test_more_than_there_is_is_an_error_with_the_count() -> None:
    with pytest.raises(ValueError, match="the eval split has 338 different questions, 400 were asked for"):
        create_dataset(400, "eval")
    with pytest.raises(ValueError, match="'train' or 'eval', got 'test'"):
        create_dataset(4, "test")


def test_the_seed_changes_which_come_first_and_nothing_else_does() -> None:
    assert create_dataset(50, "train", seed=1) == create_dataset(50, "train", seed=1)
    assert create_dataset(50, "train", seed=1) != create_dataset(50, "train", seed=2)


def test_answers_are_the_sums_and_the_grader_takes_them_all() -> None:
    rows = create_dataset(300, "eval")
    for row in rows:
        match = re.search(r"problem: (-?\d) ([+-]) (-?\d) = Reply with only the final answer\.$", row["prompt"])
        assert match is not None
        left, sign, right = match.groups()
        assert int(row["answer"]) == int(left) + (1 if sign == "+" else -1) * int(right)
    check_gold(numeric, from_rows(rows, name="eval").prompts)


def test_repeating_the_question_or_any_one_form_earns_little() -> None:
    rows = create_dataset(300, "eval")
    answers = [row["answer"] for row in rows]
    assert np.mean(numeric([row["prompt"] for row in rows], answers)) < 0.1
    best = max(np.mean(numeric([f"The final answer is {guess}."] * len(rows), answers)) for guess in range(-18, 19))
    assert best < 0.12


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


def test_the_configuration_asks_for_rows_that_exist() -> None:
    config = load_config(RECIPE, (), {}).config
    for source in (*config.data.train, *config.data.eval):
        assert len(create_dataset(**source.options)) == source.options["size"]
    assert config.data.eval[0].options["size"] >= 300
