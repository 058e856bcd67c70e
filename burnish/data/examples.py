"""Rows to learn from by imitation or by preference, as ids: which of them the model is to write, and which it is only shown.

Owns the forms that a row may have and their encoding. Reading files and drawing rows are `source.py` and `stream.py`, as for prompts of
reinforcement learning: a row is a `Prompt` whose answers stand among its other columns. The trainers encode every row before any weights
are loaded. A row that teaches nothing is an error that names it.

| form | columns |
|---|---|
| supervised | `messages` (every turn of the assistant is learned), or `prompt` and `completion`, or `text` (all of it is learned) |
| pair | `prompt`, `chosen`, `rejected`; for a reward model perhaps `margin`, by how much the chosen one is better |
| labelled | `prompt`, `completion`, `label` (true: wanted) |

An answer (`completion`, `chosen`, `rejected`) is a string, the messages that follow the prompt, or the whole conversation, prompt included.
A column `tools` (JSON schemas) goes to the chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from burnish.config.errors import UserError
from burnish.data.source import DataError, Row, RowReader, read_messages
from burnish.text.codec import Codec
from burnish.types import Message, Prompt

Overlong = Literal["drop", "cut", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One sequence of a row. ids: int32[T]. trained: bool[T], what the model is to write. shown: leading ids that are context, which all
    answers of a row have in common. wanted: whether to write it more or less often."""

    ids: np.ndarray
    trained: np.ndarray
    shown: int
    wanted: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A row as ids: its one answer, or chosen and rejected. margin: by how much the chosen is better, where the row says."""

    id: str
    answers: tuple[Answer, ...]
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of the row in a batch, where what its answers share lies once."""
        shown = self.answers[0].shown
        return shown + sum(len(answer.ids) - shown for answer in self.answers)


Encode = Callable[[Prompt, Codec], Example]


@dataclass(frozen=True, slots=True)
class SupervisedReader(RowReader):
    """Reads rows of the supervised form: `messages` before the prompt, since many data sets repeat the first message in a column `prompt`;
    a `text`, or a row that is a string, has no messages. Rows of the other forms are read as prompts are."""

    def read(self, index: int, row: Row) -> Prompt:
        row = {"text": row} if isinstance(row, str) else row
        # By name: the decorator makes another class for the slots, of which a bare super() knows nothing.
        if isinstance(row, Mapping) and "messages" in row:
            return RowReader.read(SupervisedReader(self.name, "messages", self.system_prompt), index, row)
        if isinstance(row, Mapping) and "text" in row and self.prompt_key not in row:
            return Prompt(id=f"{self.name}:{index}", messages=(), meta=dict(row))
        return RowReader.read(self, index, row)


def supervised(row: Prompt, codec: Codec) -> Example:
    """A row of the supervised form. A text's first id has nothing before it, so it can't be learned; the tokenizer's EOS ends it."""
    if row.messages:
        whole = [*row.messages]
        if "completion" in row.meta:
            whole += _following(row, "completion")
        answer = _encode(row, whole, codec, after=0)
    else:
        ids = codec.tokenizer.encode(_text(row)) + ([] if codec.tokenizer.eos_id is None else [codec.tokenizer.eos_id])
        if len(ids) < 2:
            raise DataError(f"{row.id}: the text has {len(ids)} tokens, and the first of them has nothing before it: leave the row out")
        answer = Answer(np.array(ids, np.int32), np.arange(len(ids)) > 0, shown=1)
    return Example(row.id, (answer,))


def pair(row: Prompt, codec: Codec) -> Example:
    """A row of the pair form: chosen, then rejected."""
    chosen, rejected = (_answer(row, column, codec, wanted=column == "chosen") for column in ("chosen", "rejected"))
    if np.array_equal(chosen.ids, rejected.ids):
        raise DataError(f"{row.id}: `chosen` and `rejected` are the same, so there is no preference: leave the row out")
    margin = row.meta.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        raise DataError(f"{row.id}: the column `margin` must be a number, 0 or more, got {margin!r:.80}")
    return Example(row.id, (chosen, rejected), float(margin))


def labelled(row: Prompt, codec: Codec) -> Example:
    """A row of the labelled form."""
    label = row.meta.get("label")
    if label not in (True, False):
        raise DataError(f"{row.id}: the column `label` must be true or false, got {label!r:.80}")
    return Example(row.id, (_answer(row, "completion", codec, wanted=bool(label)),))


def fit(example: Example, *, max_tokens: int, overlong: Overlong) -> Example | None:
    """The example with every answer within `max_tokens` ids, or None where it is to be dropped. `cut` takes what is too much off the end;
    an answer of which then nothing would be learned is dropped."""
    longest = max(len(answer.ids) for answer in example.answers)
    if longest <= max_tokens:
        return example
    if overlong == "error":
        raise DataError(f"{example.id}: {longest} tokens, `training.max_tokens` is {max_tokens}")
    if overlong == "drop":
        return None
    cut = tuple(Answer(a.ids[:max_tokens], a.trained[:max_tokens], a.shown, a.wanted) for a in example.answers)
    return replace(example, answers=cut) if all(answer.trained.any() for answer in cut) else None


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Each example's prompt with the next one's answer, the last's with the first's: answers that have nothing to do with their prompts."""

    def swapped(here: Answer, other: Answer) -> Answer:
        parts = [(here.ids[: here.shown], np.zeros(here.shown, bool)), (other.ids[other.shown :], other.trained[other.shown :])]
        ids, trained = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Answer(ids, trained, here.shown)

    following = [*examples[1:], *examples[:1]]
    return [Example(a.id, (swapped(a.answers[0], b.answers[0]),)) for a, b in zip(examples, following, strict=True)]


def _answer(row: Prompt, column: str, codec: Codec, *, wanted: bool) -> Answer:
    """The prompt and one answer, of which only the answer's own turns are learned."""
    prompt = codec.template.encode(row.messages, tools=row.meta.get("tools"))
    answer = _encode(row, [*row.messages, *_following(row, column)], codec, after=len(prompt))
    if answer.ids[: len(prompt)].tolist() != prompt:
        raise DataError(f"{row.id}: rendered with `{column}`, the prompt is another: an answer begins with a turn of the assistant's")
    return Answer(answer.ids, answer.trained, len(prompt), wanted)


def _encode(row: Prompt, messages: Sequence[Message], codec: Codec, *, after: int) -> Answer:
    """The conversation and what the assistant wrote of it, apart from the first `after` ids."""
    tools: Any = row.meta.get("tools")
    try:
        ids, mask = codec.template.encode_with_mask(messages, tools=tools)
    except UserError as error:
        raise DataError(f"{row.id}: {error}") from error
    trained = np.array(mask, bool)
    trained[:after] = False
    if not trained.any():
        raise DataError(f"{row.id}: the assistant wrote nothing after the prompt, so nothing could be learned: leave the row out")
    return Answer(np.array(ids, np.int32), trained, shown=int(np.argmax(trained)))


def _following(row: Prompt, column: str) -> list[Message]:
    """The messages of an answer that follow the row's prompt."""
    if column not in row.meta:
        columns = ", ".join(map(repr, row.meta)) or "none"
        raise DataError(f"{row.id}: there is no column {column!r}; beside the prompt there are: {columns}")
    given = read_messages(row.meta[column], role="assistant", where=f"{row.id}, column {column!r}")
    own = list(row.messages)
    for shown in (own, [message for message in own if message["role"] != "system"]):  # data.system_prompt isn't in the data
        if given[: len(shown)] == shown:
            return given[len(shown) :]
    return given


def _text(row: Prompt) -> str:
    text = row.meta.get("text")
    if not isinstance(text, str):
        raise DataError(f"{row.id}: the column `text` must be a string, got {text!r:.80}")
    return text
