"""Sums of two one-digit numbers from reasoning-gym's chain_sum, "4 + 7 =". Needs the extra `quickstart`.

There are 200 different questions. Half of them, chosen by a hash of their text, are held out: training never sees them in any wording. Each
is asked in three wordings; rows of one question share the column "question", so that an interval resamples questions, not wordings.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from burnish.rewards import numeric
from burnish.types import Trajectory

WORDINGS = ("{}", "{} Answer with a number.", "{} Reply with only the final answer.")


def create_dataset(split: str = "train", limit: int | None = None) -> list[dict[str, str]]:
    """Every question of a split ("train" or "eval") in every wording, or the first `limit` of these rows."""
    import reasoning_gym  # takes seconds, so only when it is used

    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    tasks = reasoning_gym.create_dataset("chain_sum", size=5_000, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    answers = {task["question"]: task["answer"] for task in tasks if is_held_out(task["question"]) == (split == "eval")}
    rows = [
        {"prompt": wording.format(question), "answer": answer, "question": question}
        for question, answer in sorted(answers.items())
        for wording in WORDINGS
    ]
    return rows[:limit]


def create_completions(split: str = "train", limit: int | None = None) -> list[dict[str, str]]:
    """The same for supervised training: the right answer is a bare number."""
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in create_dataset(split, limit)]


def create_pairs(split: str = "train", limit: int | None = None) -> list[dict[str, str]]:
    """The same for preference training: a bare number is liked better than a sentence around it."""
    rows = create_dataset(split, limit)
    return [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"The answer is {row['answer']}."} for row in rows]


def is_held_out(question: str) -> bool:
    """Half of the questions (101 of 200, with the byte that is looked at), the same half on every machine."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[3] % 2 == 1


def shuffled(trajectories: Sequence[Trajectory], completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The control: the same rewards, dealt out at random within the group. Nothing can be learned from them."""
    rewards = numeric(completions, answer)
    step, draw = trajectories[0].group
    random.Random(f"{step}:{draw}").shuffle(rewards)
    return rewards
