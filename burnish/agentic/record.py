"""The token record of an episode: every id that stands in its rows, whether the policy sampled it, and what the sampler said.

Owns rows and forks; nothing here is ever encoded or changed. Written by `trajectory.py`, turn by turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.types import Completion


@dataclass(slots=True)
class _Row:
    """Ids in the order in which the model saw them."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[np.ndarray | None] = field(default_factory=list)
    num_begun: int = 0
    """How many ids it began with."""

    def part(self, start: int, end: int) -> _Row:
        where = slice(start, end)
        return _Row(self.ids[where], self.sampled[where], self.logps[where], self.versions[where], self.kept[where])

    @property
    def end(self) -> int:
        """Behind the last id that was sampled; of a row without any, behind what it began with."""
        return next((i for i in range(len(self.ids), 0, -1) if self.sampled[i - 1]), self.num_begun)


class TokenRecord:
    """Begins with the prompt; a fork begins another row, of which only what is sampled from then on carries loss."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._prompt_length = 0
        self.num_sampled = 0

    @property
    def ids(self) -> list[int]:
        """The row that the model sees now."""
        return self._rows[-1].ids if self._rows else []

    def begin(self, ids: Sequence[int]) -> None:
        """A new row of ids that were given: the prompt, or what the template makes of the conversation at a fork."""
        if not self._rows:
            self._prompt_length = len(ids)
        self._rows.append(_Row(num_begun=len(ids)))
        self.given(ids)

    def given(self, ids: Sequence[int]) -> None:
        """Ids that nobody sampled: the template's and the environment's."""
        row = self._rows[-1]
        row.ids.extend(ids)
        row.sampled.extend([False] * len(ids))
        row.logps.extend([0.0] * len(ids))
        row.versions.extend([-1] * len(ids))
        row.kept.extend([None] * len(ids))

    def drawn(self, completion: Completion) -> None:
        """Ids that the policy sampled, as it sampled them."""
        row = self._rows[-1]
        self.num_sampled += len(completion.ids)
        row.ids.extend(int(i) for i in completion.ids)
        row.sampled.extend([True] * len(completion.ids))
        row.logps.extend(float(x) for x in completion.logps)
        row.versions.extend(int(v) for v in completion.versions)
        row.kept.extend([None] * len(completion.ids) if completion.kept_ids is None else list(completion.kept_ids))

    def arrays(self) -> dict[str, Any]:
        """The fields of a `Trajectory` that are about tokens: the prompt that all rows share once, then each row's continuation.

        What was said after the last turn of a row is left out: nobody sampled anything after it, and it may be longer than any row.
        """
        if not self._rows:
            self._rows.append(_Row())
        first, *others = self._rows
        others = [row for row in others if any(row.sampled)]  # a last row in which nothing was sampled any more
        # One id fewer than a row began with: what a row samples first follows an id of its own.
        shared = min([self._prompt_length, *(_common(first.ids, row.ids[: row.num_begun - 1]) for row in others)])
        parts = [first.part(0, first.end), *(row.part(shared, row.end) for row in others)]
        kept = list(itertools.chain.from_iterable(part.kept for part in parts))
        return {
            "ids": _joined((part.ids for part in parts), np.int32),
            "sampled": _joined((part.sampled for part in parts), bool),
            "sampler_logps": _joined((part.logps for part in parts), np.float32),
            "versions": _joined((part.versions for part in parts), np.int32),
            "prompt_length": shared,
            "kept_ids": _table(kept),
            "forks": tuple(itertools.accumulate(len(part.ids) for part in parts))[:-1],
        }


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _joined(parts: Iterable[Sequence[Any]], dtype: type) -> np.ndarray:
    return np.asarray(list(itertools.chain.from_iterable(parts)), dtype)


def _table(kept: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """int32[T, K]: the kept set of each id, padded with -1; None where no id has one."""
    width = max((len(row) for row in kept if row is not None), default=0)
    if width == 0:
        return None
    table = np.full((len(kept), width), -1, np.int32)
    for position, row in enumerate(kept):
        if row is not None:
            table[position, : len(row)] = row
    return table


__all__ = ["TokenRecord"]
