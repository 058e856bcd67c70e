"""The supervised work that every side does. Standard library only: each side imports this in an environment of its own.

An update: 8 rows of exactly 256 tokens, each of one to four texts that fill it, so that no side has padding; every weight of SmolLM2-135M
by AdamW, no gradient accumulation. Ids are drawn by a congruence: speed doesn't ask what they mean, and every side has the same.
"""

from __future__ import annotations

ROWS, LENGTH = 8, 256
TOKENS = ROWS * LENGTH
CUTS = ((256,), (128, 128), (64, 96, 96), (40, 60, 76, 80))
"""Lengths of a row's texts, in turn."""
FIRST_ID, NUM_IDS = 100, 40_000
LEARNING_RATE = 1e-5


def texts(steps: int) -> list[list[int]]:
    """Ids of the texts of so many updates, in the order in which they fill rows."""
    found: list[list[int]] = []
    state = 1
    for row in range(ROWS * steps):
        for length in CUTS[row % len(CUTS)]:
            ids = []
            for _ in range(length):
                state = (state * 1_103_515_245 + 12_345) % 2**31
                ids.append(FIRST_ID + state // 2**8 % NUM_IDS)
            found.append(ids)
    return found


def rows(steps: int) -> list[list[list[int]]]:
    """The same, row by row."""
    found, texts_left = [], iter(texts(steps))
    for row in range(ROWS * steps):
        found.append([next(texts_left) for _ in CUTS[row % len(CUTS)]])
    return found
