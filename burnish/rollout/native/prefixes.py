"""Pages of prompts that were prefilled under the engine's weights, by what they hold, for requests that begin with the same tokens.

Owns the names of pages and which is let go first. A page is named by all tokens up to its end, so a name says everything that the page
depends on but for the weights: entries die with their version (`clear`). Only what prefill wrote is kept, page by page, because a decoding
step rounds otherwise: so a hit has the bits of a prefill. A prompt's last page may be partly filled; it is found by the same prompt only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from burnish.rollout.native.pool import PAGE

T = TypeVar("T")


def page_names(ids: Sequence[int]) -> list[bytes]:
    """One for each page of a sequence, the last one's for as many tokens as it has."""
    tokens, names = np.asarray(ids, np.int32), [b""]
    for start in range(0, len(tokens), PAGE):
        names.append(hashlib.blake2b(names[-1] + tokens[start : start + PAGE].tobytes(), digest_size=16).digest())
    return names[1:]


class Prefixes(Generic[T]):
    """At most as many pages as there is room for; the one that wasn't asked for the longest goes first.

    Whoever asks for, or adds, the pages of a sequence does so from its last to its first: without its first pages the others are lost.
    """

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, name: bytes) -> T | None:
        page = self._pages.get(name)
        if page is not None:
            self._pages.move_to_end(name)
        return page

    def put(self, name: bytes, page: T, *, room: int) -> None:
        if room > 0:
            self._pages[name] = page
            self._pages.move_to_end(name)
        self.shrink(room)

    def shrink(self, room: int) -> None:
        while len(self._pages) > room:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
