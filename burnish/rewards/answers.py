r"""Rewards that compare an answer read off the completion with the row's `answer`.

Owns how a number, a boxed expression or a whole text is read. `answer` is one accepted answer for each row, or a list of them; whichever
matches, a completion gets exactly one reward: 1.0 or 0.0. Nothing is ever evaluated as code. Called by `RewardManager`, by column names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

# Digits in groups of three or plain, a fraction, a short exponent. A sign belongs to the number unless a digit, letter or bracket stands
# before it: in "7-3" it is an operator.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def exact(completions: Sequence[str], answer: Sequence[Any], *, ignore_case: bool = False) -> list[float]:
    """1.0 where the whole completion is the answer, blanks at the ends and runs of blanks aside."""

    def read(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    return [_one(read(text), gold, read) for text, gold in zip(completions, answer, strict=True)]


def numeric(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    r"""1.0 where the last number in the completion equals the answer, exactly and as a number: 1,234 = 1234 = 1234.0.

    The last number counts wherever it stands (`#### 12`, `<answer>12`, `\boxed{12}`, "so it is 12."), so the form alone earns nothing, and
    of several guesses only the last is read. Without a number: 0.0. A gold text may show its work before `####`, as in GSM8K.
    """
    return [_one(last_number(text), gold, _gold_number) for text, gold in zip(completions, answer, strict=True)]


def boxed(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    r"""1.0 where the content of the last `\boxed{...}` equals the answer, as a number if both are one, else as text without blanks."""

    def read(gold: str) -> Decimal | str | None:
        return _value(last_boxed(gold) or gold)

    return [_one(_value(last_boxed(text)), gold, read) for text, gold in zip(completions, answer, strict=True)]


def last_number(text: str) -> Decimal | None:
    """The last number in the text, None if there is none ("nan" and "inf" are words)."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, braces inside it balanced; to the end of the text if it is never closed."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for position in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[starts[-1] : position]
    return text[starts[-1] :]


def _one(given: Any, gold: Any, read: Callable[[str], Any]) -> float:
    """One reward for one completion, whatever the number of accepted answers."""
    accepted = gold if isinstance(gold, list | tuple) else [gold]
    return float(given is not None and any(given == read(str(each)) for each in accepted))


def _gold_number(gold: str) -> Decimal:
    text = gold.rpartition("####")[2].strip()
    match = _NUMBER.fullmatch(text.removeprefix("$"))
    if match is None:
        raise ValueError(f"the gold answer {gold!r:.80} is not a number")
    return Decimal(match[0].replace(",", "").replace("\u2212", "-"))


def _value(content: str | None) -> Decimal | str | None:
    if content is None:
        return None
    compact = "".join(content.split()).strip("$")
    return last_number(compact) if _NUMBER.fullmatch(compact) else compact
