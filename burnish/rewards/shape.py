"""Rewards for a completion's form, not its answer: a pattern it follows, a length it keeps to.

Small parts of a weighted sum; on its own, a reward of form teaches form only. Called by `RewardManager`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from burnish.types import Trajectory

THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


def format_tags(completions: Sequence[str], *, pattern: str = THINK_THEN_ANSWER) -> list[float]:
    """1.0 where the whole completion matches the regular expression, in which a dot also matches line ends."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text) is not None) for text in completions]


def length_penalty(trajectories: Sequence[Trajectory], *, free_tokens: int, max_tokens: int) -> list[float]:
    """0 up to `free_tokens` sampled tokens, then falling in a straight line to -1 at `max_tokens`; lengths are tokens, never characters.

    (free - n) / (max - free), kept within [-1, 0]: the soft overlong punishment of DAPO (Yu et al., 2025, arXiv:2503.14476, eq. 13).
    """
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"length_penalty needs 0 <= free_tokens < max_tokens, got {free_tokens} and {max_tokens}")
    return [min(0.0, max(-1.0, (free_tokens - t.num_sampled) / (max_tokens - free_tokens))) for t in trajectories]
