"""What several samples of each task say: avg@k, pass@k and maj@k. Host numpy; called by `burnish eval`.

Owns the estimates, and what two answers being the same means for a vote. Rewards are grading's.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

from burnish.rewards.answers import last_boxed, last_number


def avg_at_k(rewards: np.ndarray) -> float:
    """The mean reward, over float[N, k] of N tasks with k samples each."""
    return float(rewards.mean())


def pass_at_k(rewards: np.ndarray, k: int, *, solved: float = 1.0) -> float:
    """The chance that one of k samples earns `solved` or more, without bias from n >= k of them: the mean over tasks of
    1 - C(n - c, k) / C(n, k), c of the n having earned it (Chen et al., 2021, arXiv:2107.03374, eq. 1). rewards: float[N, n]."""
    count = rewards.shape[1]
    if not 1 <= k <= count:
        raise ValueError(f"pass@k of {count} samples needs a k from 1 to {count}, got {k}")
    right = (rewards >= solved).sum(axis=1)
    return float(np.mean([1.0 - math.comb(count - int(c), k) / math.comb(count, k) for c in right]))


def maj_at_k(rewards: np.ndarray, answers: Sequence[Sequence[str]]) -> float:
    """The mean reward of the answer that most of a task's samples give; of several that as many give, of the one given first.

    rewards: float[N, k]; answers: texts as `answer_key` makes them. A sample without an answer ("") has no vote, unless none has.
    """
    chosen = []
    for earned, given in zip(rewards, answers, strict=True):
        votes = collections.Counter(answer for answer in given if answer) or collections.Counter(given)
        winner = votes.most_common(1)[0][0]
        chosen.append(np.mean([reward for reward, answer in zip(earned, given, strict=True) if answer == winner]))
    return float(np.mean(chosen))


def answer_key(text: str) -> str:
    r"""What a completion answers, for a vote: what its last `\boxed{...}` holds, else its last number, else the text without its case."""
    boxed = last_boxed(text)
    if boxed is not None:
        text = "".join(boxed.split())
    number = last_number(text)
    if number is not None and (boxed is None or text.replace(",", "").lstrip("+-$").replace(".", "", 1).isdecimal()):
        return f"{number.normalize():f}"
    return " ".join(text.split()).casefold()


__all__ = ["answer_key", "avg_at_k", "maj_at_k", "pass_at_k"]
