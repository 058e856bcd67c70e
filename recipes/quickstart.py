"""Sums of two one-digit numbers, from reasoning-gym's chain_sum: "-4 + 7 =". Needs the extra `quickstart`.

Train and eval share no question. A question belongs to the held-out part by a hash of its text, whatever the seed and the size, and each
appears once. There are 722 with negative numbers (384 to train on, 338 held out) and 200 without (101 and 99).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence

from burnish.rewards import numeric
from burnish.types import Trajectory

HELD_OUT_SHARE = 0.45
ASK = " Reply with only the final answer."


def create_dataset(size: int, split: str = "train", seed: int = 0, negative: bool = True) -> list[dict[str, str]]:
    """`size` different questions of one split; fewer exist than asked for: an error that says how many."""
    import reasoning_gym  # takes seconds, so only when it is used

    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    numbers = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": negative}
    tasks = reasoning_gym.create_dataset("chain_sum", size=10_000, seed=seed, **numbers)
    found = {task["question"]: task["answer"] for task in tasks if is_held_out(task["question"]) == (split == "eval")}
    if len(found) < size:
        raise ValueError(f"the {split} split has {len(found)} different questions, {size} were asked for")
    return [{"prompt": question + ASK, "answer": answer} for question, answer in itertools.islice(found.items(), size)]


def is_held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32 < HELD_OUT_SHARE


def shuffled(trajectories: Sequence[Trajectory], completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The control: the same rewards, dealt out at random within the group. Nothing can be learned from them."""
    rewards = numeric(completions, answer)
    step, draw = trajectories[0].group
    random.Random(f"{step}:{draw}").shuffle(rewards)
    return rewards
