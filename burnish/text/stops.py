"""Where a sampled turn ends. Owns the rule for engines that hand back ids beyond the turn (fixed shapes, remote servers); numpy only."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from burnish.types import StopReason


def end_of_turn(ids: np.ndarray, stop_ids: Collection[int]) -> tuple[int, StopReason]:
    """How many leading ids (int[T]) belong to the turn, and why it ended.

    The first stop id ends the turn and belongs to it, at the very last place too; nothing after it does, not even a second stop id.
    Without one the turn was cut: `LENGTH`. Padding needs no id of its own, so it may equal a stop id.
    """
    places = np.flatnonzero(np.isin(ids, list(stop_ids)))
    if places.size:
        return int(places[0]) + 1, StopReason.STOP_ID
    return len(ids), StopReason.LENGTH
