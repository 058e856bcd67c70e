"""Locks: rows are encoded once and drawn as prompts are; what is too long never comes; a cursor goes back to the very row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.data.example_stream import Encoder, ExampleStream, training_examples
from burnish.data.examples import SupervisedReader, supervised
from burnish.data.source import DataError, from_rows
from burnish.testing.byte_tokenizer import make_tiny_tokenizer
from burnish.text.codec import Codec


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder(supervised, Codec.load(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))), max_tokens=8, overlong="drop")


class Endless:
    """Rows without a length, of which every second is too long."""

    def __init__(self, *, fitting: bool = True) -> None:
        self.fitting = fitting

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield "1+1" if number % 2 == 0 and self.fitting else "1+1+1+1+1+1"
            number += 1


def stream(encoder: Encoder, rows: Any, *, size: int = 4, **options: Any) -> ExampleStream:
    return training_examples([from_rows(rows, name="rows", reader=SupervisedReader)], encoder, seed=3, batch_size=size, **options)


def drawn(found: ExampleStream, size: int) -> list[str]:
    return [example.id for example in found.take(size)]


def test_b111_a_schedule_is_as_long_as_the_epochs_are(encoder: Encoder) -> None:
    rows = ["1+1"] * 1000
    assert stream(encoder, rows, epochs=2).num_batches(10) == 200 and stream(encoder, rows, epochs=2).num_batches(300) == 7
    assert stream(encoder, rows).num_batches(10) is None and stream(encoder, Endless(), epochs=2).num_batches(10) is None


def test_rows_that_are_too_long_are_left_out_counted_and_never_drawn(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    found = stream(encoder, ["1+1", "1+1+1+1+1+1", "2+2", "3+3", "4+4"], epochs=2)
    assert "1 of 5 rows are left out" in caplog.text and found.num_rows == 4
    assert sorted(drawn(found, 4)) == sorted(drawn(found, 4)) == ["rows:0", "rows:2", "rows:3", "rows:4"] and drawn(found, 4) == []


def test_rows_without_a_length_are_encoded_as_they_come(encoder: Encoder) -> None:
    assert drawn(stream(encoder, Endless()), 3) == ["rows:0", "rows:2", "rows:4"]
    with pytest.raises(DataError, match="10000 rows in a row are longer than `training.max_tokens`"):
        stream(encoder, Endless(fitting=False)).take(1)


@pytest.mark.parametrize("rows", [[f"{i}+1" for i in range(9)], Endless()], ids=["counted", "endless"])
def test_a_cursor_goes_back_to_the_row_across_epochs(encoder: Encoder, rows: Any) -> None:
    one, other = stream(encoder, rows), stream(encoder, rows)
    drawn(one, 7)
    cursor, following = one.cursor(), drawn(one, 7)
    other.restore(cursor)
    assert drawn(other, 7) == following


def test_less_than_a_batch_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 2 rows, fewer than one batch of 4"):
        stream(encoder, ["1+1", "2+2"])
