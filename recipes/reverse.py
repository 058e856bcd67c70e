"""Reverse the digits: "314" -> "413". A task without downloads that a tiny random model can learn."""

from __future__ import annotations

import random
from collections.abc import Sequence


def create_dataset(size: int, digits: int = 3, seed: int = 0) -> list[dict[str, str]]:
    """Random digit strings of one length, a function of (digits, seed) only. They may repeat: there are 10 ** digits of them."""
    drawn = random.Random(f"{digits}:{seed}")
    prompts = ["".join(drawn.choices("0123456789", k=digits)) for _ in range(size)]
    return [{"prompt": prompt, "answer": prompt[::-1]} for prompt in prompts]


def reversed_digits(completions: Sequence[str], answer: Sequence[str], *, partial: bool = True) -> list[float]:
    """1.0 for the reversed digits and nothing else. `partial`: the share of places that are right; what is too long counts as misses."""
    given = [text.strip() for text in completions]
    if not partial:
        return [float(text == gold) for text, gold in zip(given, answer, strict=True)]
    hits = [sum(a == b for a, b in zip(text, gold, strict=False)) for text, gold in zip(given, answer, strict=True)]
    return [count / max(len(text), len(gold)) for count, text, gold in zip(hits, given, answer, strict=True)]
