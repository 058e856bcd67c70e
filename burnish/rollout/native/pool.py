"""Which pages of the KV cache are free, bank by bank, and how large the pool is. Plain Python, no jax; `memory.py` moves the contents."""

from __future__ import annotations

PAGE = 64
"""Positions of a page: what attention sums together, what a row of prefill holds, where the reuse of a prefix ends."""


def pages_for(length: int) -> int:
    """Pages that `length` positions take."""
    return -(-length // PAGE)


class OutOfPages(RuntimeError):
    """A bank has no page left and the pool may not grow."""


class Pool:
    """Banks of pages, all of one size, which grows from `smallest` as pages are taken but never passes `most`.

    Sizes are 1, 1.5, 2, 3, 4, 6, 8 … times the smallest: each is a program, and decoding reads all of the pool.
    """

    def __init__(self, *, banks: int, smallest: int, most: int) -> None:
        self.size = self._smallest = min(smallest, most)
        self.most, self.banks = most, banks
        self._free = [list(range(self.size)) for _ in range(banks)]

    @property
    def taken(self) -> int:
        return sum(self.size - len(free) for free in self._free)

    def available(self, bank: int) -> int:
        """Pages that could be taken, with those that the pool would get by growing."""
        return self.most - self.size + len(self._free[bank])

    def take(self, bank: int, count: int) -> list[int]:
        """Pages of a bank; all or none. Grows the pool where it must."""
        if count > self.available(bank):
            raise OutOfPages(f"{count} pages were asked of bank {bank}, which has {self.available(bank)} left of {self.most}")
        while count > len(self._free[bank]):
            self._grow()
        free = self._free[bank]
        return [free.pop() for _ in range(count)]

    def give(self, bank: int, pages: list[int]) -> None:
        self._free[bank].extend(pages)

    def reset(self) -> None:
        """Back to the smallest size; nothing may be taken."""
        assert not self.taken, "pages are in use"
        self.size = self._smallest
        self._free = [list(range(self.size)) for _ in self._free]

    def _grow(self) -> None:
        doubled = self._smallest
        while 2 * doubled <= self.size:
            doubled *= 2
        size = min(2 * doubled if self.size > doubled else doubled + doubled // 2, self.most)
        for free in self._free:
            free.extend(range(self.size, size))
        self.size = size
