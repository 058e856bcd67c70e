"""What must never be shown: which keys hold secrets, and a text without the secrets that this process has read.

Owns the rule for keys and the list of values. A secret is a value anywhere under such a key, in users' `options` for the most part.
The loader remembers what it reads; whoever shows or writes text that others' code had a hand in (an exception's) passes it through
`scrub`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from burnish.config.layers import items, join

HIDDEN = "***"
"""What is written in place of a secret."""
SHORTEST = 8
"""Shorter values are hidden where they stand, but not looked for in other texts, where they are parts of words."""

_WORDS = frozenset("apikey auth authorization bearer cookie credential credentials passphrase passwd password pwd secret secrets".split())
_KEYS = frozenset("access api auth encryption private secret signing".split())
_VOCABULARY = frozenset("bos cls end eos image mask pad sep start stop think unk".split())
_SPLIT = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_seen: set[str] = set()


def is_secret(key: str) -> bool:
    """Whether a key, by its words, holds a secret: `api_key`, `hf_token`, `X-Auth-Token`; not `max_tokens`, `pad_token`, `prompt_key`."""
    words = [word.lower() for word in _SPLIT.findall(key)]
    before, last = (words[-2] if len(words) > 1 else ""), (words[-1] if words else "")
    return bool(_WORDS & set(words)) or (last == "token" and before not in _VOCABULARY) or (last == "key" and before in _KEYS)


def hides(path: str) -> bool:
    """Whether the value at a dotted path is, or is part of, a secret."""
    return any(is_secret(part) for part in path.split("."))


def secrets(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every secret inside a value that stands at `path`."""
    for key, item in items(value):
        yield from secrets(item, join(path, key))
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "" and hides(path):
        yield path, value


def remember(value: Any, path: str = "") -> None:
    """From now on `scrub` hides the secrets inside a value."""
    for text in (str(secret) for _, secret in secrets(value, path) if secret != HIDDEN):
        if len(text) >= SHORTEST:  # also as it stands in JSON and in an exception's words
            _seen.update((text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]))


def mentions(text: str) -> bool:
    """Whether a text that can't be read as values has a secret's key in it."""
    return any(is_secret(name) for name in re.findall(r"[\w-]+", text))


def scrub(text: str) -> str:
    """The text with every secret that this process has read replaced by `***`."""
    for secret in sorted(_seen, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
