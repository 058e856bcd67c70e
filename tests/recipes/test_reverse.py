"""The synthetic task that a tiny model learns in tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from burnish.config.resolve import resolve

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
create_dataset = resolve("./reverse.py", kind="recipe", base=RECIPES, attribute="create_dataset")
reversed_digits = resolve("./reverse.py:reversed_digits", kind="reward", base=RECIPES)


def test_rows_are_digits_and_their_reverse_and_depend_on_the_seed_alone() -> None:
    rows = create_dataset(50, digits=4, seed=1)
    assert all(len(row["prompt"]) == 4 and row["prompt"].isdigit() and row["answer"] == row["prompt"][::-1] for row in rows)
    assert rows == create_dataset(50, digits=4, seed=1) != create_dataset(50, digits=4, seed=2)


def test_rewards_by_place_or_all_or_nothing() -> None:
    texts, gold = ["413", "41", "419", "4134", "", "314", " 413\n"], ["413"] * 7
    assert np.allclose(reversed_digits(texts, gold), [1, 2 / 3, 2 / 3, 3 / 4, 0, 1 / 3, 1])
    assert reversed_digits(texts, gold, partial=False) == [1, 0, 0, 0, 0, 0, 1]
