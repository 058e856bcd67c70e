"""The order in which prompts are drawn, and a cursor that resumes it exactly.

Owns shuffling, mixing and epochs. Order is a function of (seed, source, epoch) and of the weights: never of timing, of `hash()` or of how
often the run was resumed. The learner's producer draws from one `PromptStream`; evaluation reads its sources plainly, to their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from burnish.data.source import DataError, Source, seed_of
from burnish.types import Prompt


def epoch_order(num_rows: int, *, seed: int, epoch: int, name: str) -> np.ndarray:
    """int64[num_rows]: a permutation that depends on (seed, epoch, name) only.

    Raw Philox words are sorted, because numpy promises the same raw words in every version, but not the same `permutation`.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, epoch, seed_of(name)])).random_raw(num_rows)
    return np.argsort(words, kind="stable")


class PromptStream:
    """Draws prompts from weighted sources, epoch after epoch.

    weights: relative shares, equal when None. The next prompt comes from the source with the smallest (drawn + ½) / weight, so that
    each source's share is right to within about one prompt at every moment, with no luck involved. shuffle: a new order for each epoch;
    sources without a length keep theirs. epochs: passes over each source, None goes round for ever; a source that is through leaves the
    mixture, and the stream ends when all have. An iterator or a generator gives one pass.

    Not for several threads at once. A producer that prefetches is ahead of training: save the cursor as it was when the batch was drawn.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else list(weights)
        names = [source.name for source in sources]
        if not sources:
            raise DataError("there is no source of prompts")
        if len(set(names)) != len(names):
            raise DataError(f"sources need different names, since a name and an index identify a prompt; got {', '.join(names)}")
        if len(weights) != len(sources) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise DataError(f"expected one positive weight for each of {len(sources)} sources, got {weights}")
        if epochs is not None and epochs < 1:
            raise DataError(f"epochs must be at least 1, or None for no end; got {epochs}")
        self._seed = seed
        self._weights = weights
        self._positions = [_position(source, seed=seed, shuffle=shuffle, epochs=epochs) for source in sources]

    @property
    def num_rows(self) -> int | None:
        """Rows of all sources together in one epoch; None when a source has no length."""
        counts = [position.source.num_rows for position in self._positions]
        return None if None in counts else sum(cast(list[int], counts))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            live = [i for i, position in enumerate(self._positions) if not position.finished]
            if not live:
                raise StopIteration
            chosen = min(live, key=lambda i: (self._positions[i].drawn + 0.5) / self._weights[i])
            prompt = self._positions[chosen].draw()
            if prompt is not None:
                return prompt

    def samples(self) -> list[Prompt]:
        """The first row of each source that has a length, for checks before a run; draws nothing."""
        return [position.source.prompts[0] for position in self._positions if isinstance(position.source.prompts, Sequence)]

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON values."""
        return {"seed": self._seed, "sources": {position.source.name: position.cursor() for position in self._positions}}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Go to where `cursor` was taken. Refuses the cursor of another seed, other sources or sources of another length."""
        if cursor["seed"] != self._seed:
            raise DataError(f"the saved position belongs to seed {cursor['seed']}, this run has seed {self._seed}")
        names = [position.source.name for position in self._positions]
        if set(cursor["sources"]) != set(names):
            raise DataError(f"the saved position is of the sources {sorted(cursor['sources'])}, this run has {sorted(names)}")
        for position in self._positions:
            position.restore(cursor["sources"][position.source.name])


def _position(source: Source, *, seed: int, shuffle: bool, epochs: int | None) -> _IndexedPosition | _IteratedPosition:
    if isinstance(source.prompts, Sequence):
        return _IndexedPosition(source, source.prompts, seed=seed, shuffle=shuffle, epochs=epochs)
    return _IteratedPosition(source, epochs=epochs)


class _IndexedPosition:
    """The place in a source with a length: (epoch, index), index < number of rows always: the end of an epoch is the start of the next."""

    def __init__(self, source: Source, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None) -> None:
        if not prompts:
            raise DataError(f"{source.name} is empty: no row can be drawn")
        self.source = source
        self._prompts = prompts
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._epoch = self._index = 0
        self._order = self._epoch_order()

    @property
    def finished(self) -> bool:
        return self._epochs is not None and self._epoch >= self._epochs

    @property
    def drawn(self) -> int:
        return self._epoch * len(self._prompts) + self._index

    def draw(self) -> Prompt:
        prompt = self._prompts[int(self._order[self._index])]
        self._index += 1
        if self._index == len(self._prompts):
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._epoch_order()
        return prompt

    def cursor(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "index": self._index, "num_rows": len(self._prompts), "shuffle": self._shuffle}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        for what, now in (("num_rows", len(self._prompts)), ("shuffle", self._shuffle)):
            if cursor.get(what) != now:
                raise DataError(f"{self.source.name}: the saved position was taken at {what} = {cursor.get(what)}, now it is {now}")
        epochs, self._index = divmod(cursor["index"], len(self._prompts))
        self._epoch = cursor["epoch"] + epochs
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        num_rows = len(self._prompts)
        if not self._shuffle:
            return np.arange(num_rows)
        return epoch_order(num_rows, seed=self._seed, epoch=self._epoch, name=self.source.name)


class _IteratedPosition:
    """The place in a source without a length: how many prompts were read in this pass. Going back means reading that many again."""

    def __init__(self, source: Source, *, epochs: int | None) -> None:
        self.source = source
        self.finished = False
        self.drawn = 0
        self._epochs = 1 if isinstance(source.prompts, Iterator) else epochs
        self._epoch = self._index = 0
        self._reading: Iterator[Prompt] | None = None

    def draw(self) -> Prompt | None:
        """The next prompt, or None when a pass ended here."""
        if self._reading is None:
            self._reading = self._reopen()
        reading, self._reading = self._reading, None  # a reading that raised is never taken for one that ended
        prompt = next(reading, None)
        if prompt is None:
            self._end_pass()
            return None
        self._reading = reading
        self._index += 1
        self.drawn += 1
        return prompt

    def cursor(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "index": self._index, "drawn": self.drawn, "finished": self.finished}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        if "drawn" not in cursor:
            raise DataError(f"{self.source.name}: the saved position is of a source with a length, now it is read as it comes")
        self._epoch, self._index = cursor["epoch"], cursor["index"]
        self.drawn, self.finished = cursor["drawn"], cursor["finished"]
        self._reading = None

    def _reopen(self) -> Iterator[Prompt]:
        reading = iter(self.source.prompts)
        for index in range(self._index):
            if next(reading, None) is None:
                raise DataError(f"{self.source.name}: can't go back to row {self._index}, reading again ended after {index} rows")
        return reading

    def _end_pass(self) -> None:
        if self._index == 0:
            raise DataError(f"{self.source.name} is empty: pass {self._epoch + 1} over it gave no row")
        self._epoch, self._index = self._epoch + 1, 0
        self.finished = self._epochs is not None and self._epoch >= self._epochs
