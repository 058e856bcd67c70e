"""From examples to micro-batches: each row is a group whose sequences share what they have in common, packed as episodes are.

Owns the mapping to `rl.batch` and the rule that a row is never cut in two: a loss of a pair needs both halves in one micro-batch. Host
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.config.errors import UserError
from burnish.data.examples import Answer, Example
from burnish.rl.batch import TokenBatch, build_micro_batches
from burnish.rl.layout import BatchShape
from burnish.types import Group, Prompt, Trajectory


def micro_batches(
    examples: Sequence[Example],
    *,
    tokens_per_device: int,
    rows_multiple: int = 1,
    pairs_per_token: float = 4096.0,
    size: int = 0,
) -> list[TokenBatch]:
    """A mini-batch of examples. Sequence number k of example i is `i * (sequences a row) + k`; `advantages` are 1 and the row's margin of
    what is wanted, else -1. size: the usual number of examples, so that a shorter batch has the shape of the others. Raises UserError for a
    row that needs more than `tokens_per_device`."""
    for example in examples:
        if example.num_tokens > tokens_per_device:
            raise UserError(
                f"{example.id} has {example.num_tokens} tokens, and one pass takes `training.tokens_per_device`, {tokens_per_device}: "
                "raise it, or lower `training.max_tokens`"
            )
    groups = [Group((0, i), Prompt(e.id, ()), [_trajectory(a, (0, i), k) for k, a in enumerate(e.answers)]) for i, e in enumerate(examples)]
    credit = {((0, i), k): 1.0 + e.margin if a.wanted else -1.0 for i, e in enumerate(examples) for k, a in enumerate(e.answers)}
    sequences = max((len(e.answers) for e in examples), default=0)
    return build_micro_batches(
        groups,
        credit,
        temperature=1.0,
        tokens_per_device=tokens_per_device,
        rows_multiple=rows_multiple,
        pairs_per_token=pairs_per_token,
        at_least=BatchShape(rows=0, columns=0, targets=0, sequences=size * sequences, prompts=size),
    )


def _trajectory(answer: Answer, group: tuple[int, int], sample: int) -> Trajectory:
    """A sequence as an episode whose sampled ids are those that are learned."""
    nothing = np.zeros(len(answer.ids), np.float32)
    versions = np.full(len(answer.ids), -1, np.int32)
    return Trajectory([], answer.ids, answer.trained, nothing, versions, answer.shown, group, sample)
