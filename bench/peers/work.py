"""The work that every side does, and what each says of it. Standard library only: each side imports this in an environment of its own.

One step: 4 prompts × 8 completions of exactly 64 tokens, prompts of about 44 tokens, every weight of SmolLM2-135M trained by GRPO without a
reference, one optimizer update. Generation alone: the same 32 completions, and 64 requests whose lengths have a long tail.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

QUESTIONS = ("how rivers shape valleys", "why the sky is blue", "what makes bread rise", "how a clock keeps time")
PROMPTS, SAMPLES, TOKENS, PROMPT_LIMIT = 4, 8, 64, 64
LEARNING_RATE = 1e-6
# Lognormal around 30 tokens, at most 256: drawn once and written down, so that every side and every run has the same.
LENGTHS = [
    41,
    17,
    28,
    96,
    12,
    33,
    22,
    58,
    19,
    30,
    256,
    26,
    14,
    47,
    37,
    9,
    24,
    71,
    31,
    20,
    16,
    148,
    35,
    29,
    11,
    52,
    23,
    39,
    18,
    64,
    27,
    44,
] + [13, 25, 87, 34, 21, 8, 55, 32, 15, 202, 40, 28, 10, 49, 36, 19, 66, 24, 30, 117, 22, 45, 17, 38, 26, 12, 78, 31, 20, 59, 29, 42]
STARTED = time.monotonic()


def question(number: int) -> str:
    return f"Tell me {QUESTIONS[number % len(QUESTIONS)]}, please."


def vowels(texts: Sequence[str]) -> list[float]:
    """A reward that differs inside a group: without a signal some sides skip the update."""
    return [sum(text.count(vowel) for vowel in "aeiou") / 100 for text in texts]


def peak_memory_gib() -> float:
    """Of this process or of the largest that it has started and waited for, whichever is more."""
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return largest / 2**20


def versions(*packages: str) -> dict[str, str]:
    return {"python": sys.version.split()[0]} | {package: version(package) for package in packages}


def write(target: str, **record: Any) -> None:
    """What a side has to say, for `run.py`."""
    record = {"command": " ".join([Path(sys.executable).parent.parent.name + "/python", *sys.argv]), **record}
    Path(target).write_text(json.dumps(record | {"peak_memory_gib": peak_memory_gib()}), encoding="utf-8")
