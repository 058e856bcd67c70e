"""Rows become prompts: lists, iterables, .jsonl and .parquet files, and recipes' `create_dataset`.

Owns the reading of rows, the checks on them, and a prompt's identity (`source:row` and the seed derived from it). In what order prompts
are drawn is `stream.py`, which are too long is `length.py`. The learner and the commands call this before any weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, overload, runtime_checkable

from burnish.config.errors import UserError
from burnish.types import Message, Prompt

Row = Mapping[str, Any] | str


class DataError(UserError):
    """A source of prompts can't be used as asked. Rows are counted from 0."""


@runtime_checkable
class IndexedRows(Protocol):
    """What can be drawn in any order: lists, tuples, `datasets.Dataset`, reasoning-gym's data sets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Named prompts in a fixed order. A `Sequence` of them can be shuffled and counted; another iterable is read as it comes, an
    `Iterator` once."""

    name: str
    prompts: Iterable[Prompt]

    @property
    def num_rows(self) -> int | None:
        """How many prompts there are; None when only reading to the end would tell."""
        return len(self.prompts) if isinstance(self.prompts, Sequence) else None


@dataclass(frozen=True, slots=True)
class RowReader:
    """Turns row `index` of the source `name` into a `Prompt`."""

    name: str
    prompt_key: str = "prompt"
    system_prompt: str | None = None

    def read(self, index: int, row: Row) -> Prompt:
        if isinstance(row, str):
            row = {self.prompt_key: row}
        if not isinstance(row, Mapping):
            raise DataError(f"{self.name}: row {index} must be a mapping of columns or a string, got {type(row).__name__}")
        if self.prompt_key not in row:
            columns = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{self.name}: row {index} has no column {self.prompt_key!r} (`prompt_key`); the columns are: {columns}")
        messages = read_messages(row[self.prompt_key], role="user", where=f"{self.name}: row {index}, column {self.prompt_key!r}")
        if self.system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, Message(role="system", content=self.system_prompt))
        meta = {str(key): value for key, value in row.items() if key != self.prompt_key}
        identity = f"{self.name}:{index}"
        meta.setdefault("seed", seed_of(identity))
        return Prompt(id=identity, messages=tuple(messages), meta=meta)


@dataclass(frozen=True, slots=True)
class _IndexedPrompts(Sequence[Prompt]):
    """Prompts made when they are asked for, so that generated rows cost nothing until drawn."""

    rows: IndexedRows
    reader: RowReader

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.reader.name}: no row {index} among {len(self)}")
        index %= len(self)
        try:
            row = self.rows[index]
        except Exception as error:
            raise _row_failed(self.reader.name, index, error) from error
        return self.reader.read(index, row)


@dataclass(frozen=True, slots=True)
class _IteratedPrompts:
    """Prompts of an iterable, a failing row named."""

    rows: Iterable[Row]
    reader: RowReader

    def __iter__(self) -> Iterator[Prompt]:
        index, rows = 0, iter(self.rows)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise _row_failed(self.reader.name, index, error) from error
            yield self.reader.read(index, row)
            index += 1


def from_rows(
    rows: Iterable[Row] | IndexedRows,
    *,
    name: str,
    prompt_key: str = "prompt",
    system_prompt: str | None = None,
    reader: type[RowReader] = RowReader,
) -> Source:
    """A source from rows in memory, or from an iterable that makes them.

    A row is a mapping of columns, or a string, which is the prompt. The column `prompt_key` holds the prompt: a string (one user message)
    or a list of messages; the other columns become `Prompt.meta`, to which a "seed" is added unless the row has one. `name` and the row's
    index are the prompt's identity: rows of two sources must not share both. An empty source and a bad first row are errors at once.
    reader: reads rows of another form.
    """
    read = reader(name, prompt_key, system_prompt)
    if not isinstance(rows, Iterable | IndexedRows) or isinstance(rows, str | bytes | Mapping | Set):
        raise DataError(f"{name}: expected a list or an ordered iterable of rows, got {type(rows).__name__}")
    if isinstance(rows, IndexedRows):
        prompts = _IndexedPrompts(rows, read)
        if not prompts:
            raise DataError(f"{name}: the data set is empty")
        _ = prompts[0]
        return Source(name, prompts)
    prompts = _IteratedPrompts(rows, read)
    return Source(name, iter(prompts) if isinstance(rows, Iterator) else prompts)


def from_file(
    path: Path,
    *,
    name: str | None = None,
    prompt_key: str = "prompt",
    system_prompt: str | None = None,
    reader: type[RowReader] = RowReader,
) -> Source:
    """A source from a .jsonl file (an object or a string on each line) or a .parquet file (extra `data`)."""
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: prompts are read from {' and '.join(readers)} files, got {path.suffix or 'a name without an ending'!r}")
    if not path.is_file():
        raise DataError(f"{path}: no such file (looked in {path.absolute().parent})")
    rows = readers[path.suffix](path)
    return from_rows(rows, name=name or str(path), prompt_key=prompt_key, system_prompt=system_prompt, reader=reader)


def from_recipe(
    create_dataset: Callable[..., Iterable[Row] | IndexedRows],
    options: Mapping[str, Any],
    *,
    name: str,
    prompt_key: str = "prompt",
    system_prompt: str | None = None,
    reader: type[RowReader] = RowReader,
) -> Source:
    """A source from a recipe's function. The options are part of its name: train and evaluation splits never share identities or seeds."""
    chosen = ",".join(f"{key}={options[key]}" for key in sorted(options))
    full_name = f"{name}[{chosen}]" if chosen else name
    rows = create_dataset(**options)
    return from_rows(rows, name=full_name, prompt_key=prompt_key, system_prompt=system_prompt, reader=reader)


def read_messages(value: object, *, role: str, where: str) -> list[Message]:
    """The messages in a cell: a list of them as it is, a string as one of `role`. `where` names the cell in errors."""
    if isinstance(value, str):
        return [Message(role=role, content=value)]
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: expected a string or a list of messages, got {value!r:.80}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: expected messages with a `role` and a `content`, got {message!r:.80}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f"{where}: the `content` of a message must be a string, got {message.get('content')!r:.80}")
    return [cast(Message, dict(message)) for message in value]


def read_jsonl(path: Path) -> list[Row]:
    """One JSON value a line; blank lines are skipped; a bad line is named by its number, counted from 1."""
    rows: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not valid JSON: {error.msg} at column {error.colno}") from error
    return rows


def read_parquet(path: Path) -> list[Row]:
    """All rows of a Parquet file, as Python values."""
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{path}: reading Parquet needs the extra `data`: pip install "burnish[data]"') from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.lib.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def seed_of(identity: str) -> int:
    """31 bits that depend on the text alone, the same on every machine: what seeds an environment for a row that brings no seed."""
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest(), "big") >> 1


def require_at_least(num_rows: int, batch_size: int, *, name: str = "the data set") -> None:
    """Refuse data that could never fill one batch: training would end without an update."""
    if num_rows == 0:
        raise DataError(f"{name} is empty: no row can be drawn")
    if num_rows < batch_size:
        raise DataError(f"{name} has {num_rows} rows, fewer than one batch of {batch_size}: lower `training.batch_size` or add rows")


def _row_failed(name: str, index: int, error: Exception) -> DataError:
    return DataError(f"{name}: row {index} could not be read: {type(error).__name__}: {error}")
