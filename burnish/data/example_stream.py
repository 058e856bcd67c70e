"""The examples of a supervised or a preference run: encoded and measured before any weights are loaded, drawn in a resumable order.

Owns where rows become ids in a run, and what becomes of too long ones. Forms and encoding are `examples.py`, order and cursor `stream.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from burnish.data.examples import Encode, Example, Overlong, fit
from burnish.data.source import DataError, Source, require_at_least
from burnish.data.stream import PromptStream
from burnish.text.codec import Codec
from burnish.types import Prompt

log = logging.getLogger(__name__)

_MAX_DROPPED_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True)
class Encoder:
    """Rows → examples of at most `max_tokens` ids a sequence."""

    encode: Encode
    codec: Codec
    max_tokens: int
    overlong: Overlong

    def __call__(self, row: Prompt) -> Example | None:
        """None where the row is too long and left out."""
        return fit(self.encode(row, self.codec), max_tokens=self.max_tokens, overlong=self.overlong)

    def all(self, source: Source) -> list[Example]:
        """Every example of a source with an end, in order. Raises DataError where none is left."""
        found = [self(row) for row in source.prompts]
        kept = [example for example in found if example is not None]
        if not kept:
            raise DataError(f"{source.name}: all {len(found)} rows are longer than `training.max_tokens`, {self.max_tokens}: raise it")
        if len(kept) < len(found):
            message = "%s: %d of %d rows are left out, as they have more than `training.max_tokens`, %d"
            log.warning(message, source.name, len(found) - len(kept), len(found), self.max_tokens)
        return kept


class ExampleStream:
    """Draws examples as `PromptStream` draws prompts. A source with a length is encoded here, any other as it is read."""

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        self._encoder, self._epochs = encoder, epochs
        self._encoded: dict[str, Example] = {}
        self._stream = PromptStream([self._kept(s) for s in sources], seed=seed, weights=weights, shuffle=shuffle, epochs=epochs)

    def _kept(self, source: Source) -> Source:
        if not isinstance(source.prompts, Sequence):
            return source
        found = {example.id: example for example in self._encoder.all(source)}
        self._encoded |= found
        return replace(source, prompts=[row for row in source.prompts if row.id in found])

    @property
    def num_rows(self) -> int | None:
        """Rows of all sources together; None when one has no length."""
        return self._stream.num_rows

    def num_batches(self, size: int) -> int | None:
        """How many batches all epochs make, the last perhaps of fewer rows; None where there is no end, or none that is known."""
        return None if self.num_rows is None or self._epochs is None else -(-self.num_rows * self._epochs // size)

    def examples(self) -> list[Example]:
        """Every encoded row, in the order of the sources."""
        return list(self._encoded.values())

    def take(self, size: int) -> list[Example]:
        """The next examples; fewer, at last none, at the end of the data."""
        taken: list[Example] = []
        too_long = 0
        while len(taken) < size and (row := next(self._stream, None)) is not None:
            example = self._encoded.get(row.id) or self._encoder(row)
            too_long = 0 if example else too_long + 1
            if example:
                taken.append(example)
            elif too_long == _MAX_DROPPED_IN_A_ROW:
                raise DataError(f"{row.id}: {too_long} rows in a row are longer than `training.max_tokens`: raise it")
        return taken

    def cursor(self) -> dict[str, Any]:
        return self._stream.cursor()

    def restore(self, cursor: Mapping[str, Any]) -> None:
        self._stream.restore(cursor)


def training_examples(
    sources: Iterable[Source],
    encoder: Encoder,
    *,
    seed: int,
    batch_size: int,
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    epochs: int | None = None,
) -> ExampleStream:
    """The stream over all sources; refuses data that don't fill one batch."""
    stream = ExampleStream(list(sources), encoder, seed=seed, weights=weights, shuffle=shuffle, epochs=epochs)
    if stream.num_rows is not None:
        require_at_least(stream.num_rows, batch_size, name="the training data")
    return stream
