"""A tiny model and rows that it can learn, for the tests of this folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from burnish.models.model import Model
from burnish.testing.tiny import tiny_config, write_tiny_model

LOW, HIGH = "0123", "4567"


def tiny_model(folder: Path) -> Model:
    write_tiny_model(folder, config=tiny_config(width=32), alphabet=LOW + HIGH, scale=3.0)
    return Model.load(folder)


def successors(start: int = 0, count: int = 8) -> list[dict[str, Any]]:
    """Of a digit the next one."""
    return [{"prompt": str(i % 8), "completion": str((i + 1) % 8)} for i in range(start, start + count)]


def pairs(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Any question; chosen is an answer in low digits, rejected one in high digits, of lengths of their own."""
    rng = random.Random(seed)

    def word(letters: str) -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 4)))

    return [{"prompt": word(LOW + HIGH), "chosen": word(LOW), "rejected": word(HIGH)} for _ in range(count)]


def labels(count: int, *, seed: int) -> list[dict[str, Any]]:
    """The same answers one by one: the chosen of the even pairs, the rejected of the odd ones."""
    rows = enumerate(pairs(count, seed=seed))
    return [{"prompt": r["prompt"], "completion": r["rejected" if i % 2 else "chosen"], "label": i % 2 == 0} for i, r in rows]
