"""Rewards of form and length."""

from __future__ import annotations

import numpy as np
import pytest

from burnish.rewards import format_tags, length_penalty
from burnish.types import Trajectory


def sampled(count: int) -> Trajectory:
    mask = np.array([False] * 3 + [True] * count)
    zeros = np.zeros(len(mask))
    return Trajectory([], zeros.astype(np.int32), mask, zeros.astype(np.float32), zeros.astype(np.int32), 3, (0, 0), 0)


def test_format_tags_matches_the_whole_completion_across_lines() -> None:
    texts = [
        "<think>a\nb</think>\n<answer>4</answer>\n",
        "<answer>4</answer>",
        "<think>a</think><answer>4</answer> more",
        "<think>a</think><answer>4",
    ]
    assert format_tags(texts) == [1.0, 0.0, 0.0, 0.0]
    twice = "<think>a</think><think>b</think><answer>4</answer>"
    assert format_tags([twice]) == [0.0]
    assert format_tags(["A: 4", "4"], pattern=r"A: .*") == [1.0, 0.0]


def test_length_penalty_counts_sampled_tokens_only() -> None:
    trajectories = [sampled(count) for count in (0, 8, 10, 12, 16, 40)]
    assert length_penalty(trajectories, free_tokens=8, max_tokens=16) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_length_penalty_refuses_limits_that_are_no_interval() -> None:
    with pytest.raises(ValueError, match="got 16 and 16"):
        length_penalty([], free_tokens=16, max_tokens=16)
