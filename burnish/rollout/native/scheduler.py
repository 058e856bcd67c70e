"""Who runs in which slot and on which pages: the queue, admission, what is prefilled next, who gives way. Plain Python, no jax.

Owns the life of a request inside the engine, which asks for what to run, feeds sampled tokens to drafts, and releases jobs.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from burnish.observe.trace import Lane, span
from burnish.rollout.draft import Draft
from burnish.rollout.native.pool import PAGE, Pool, pages_for
from burnish.rollout.native.prefixes import page_names
from burnish.types import Completion, Request

_numbers = itertools.count()


def noise_key(request: Request) -> np.ndarray:
    """uint32[2]. A digest, not hash(): the same path gives the same noise in every process, whatever the size and number of its parts."""
    return np.frombuffer(hashlib.blake2b(repr(tuple(map(int, request.seed_path))).encode(), digest_size=8).digest(), np.uint32)


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the engine: its draft, the key of its noise, who waits for it, and where its keys and values are.

    number: jobs count up as they come. slot, pages: where it sits, and its pages in the order of positions. filled: tokens in these pages.
    names: of the pages to prefill (see `prefixes`). swapped: contents of the pages, while it sits nowhere.
    """

    draft: Draft
    key: np.ndarray
    future: Future[Completion] = field(default_factory=Future)
    number: int = field(default_factory=_numbers.__next__)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    names: list[bytes] = field(default_factory=list)
    swapped: list[Any] = field(default_factory=list)
    asked_ns: int = field(default_factory=time.monotonic_ns)
    seated: span | None = None
    """Its time in a slot, as a span."""

    @classmethod
    def make(cls, request: Request, *, context: int) -> Job:
        job = cls(Draft.begin(request, context=context), noise_key(request))
        job.restart()
        return job

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that is known of the sequence. Its last token enters the cache when the next one is sampled."""
        return (*self.draft.request.prompt_ids, *self.draft.ids)

    @property
    def target(self) -> int:
        """Tokens that must be in the cache for the next one to be sampled."""
        return len(self.draft.request.prompt_ids) + len(self.draft.ids) - 1

    @property
    def ready(self) -> bool:
        return self.filled == self.target

    def restart(self) -> None:
        """Nothing of it is in the cache: what is known has to be prefilled."""
        self.filled, self.swapped = 0, []
        self.names = page_names(self.tokens[:-1])

    def need(self, num_tokens: int) -> int:
        """Pages for `num_tokens` more, or as many as its budget leaves."""
        return pages_for(self.target + min(num_tokens, self.draft.budget - len(self.draft.ids)))


class Chunk(NamedTuple):
    """A page of a job's sequence that is to be prefilled: which one, from 0 on."""

    job: Job
    number: int


class Scheduler:
    """Fixed slots, in equal parts over the pool's banks, and a first-in first-out queue. rows: pages of a bank in one prefill.

    parked: jobs that were swapped out; they come back before anyone new, the oldest first.
    """

    def __init__(self, *, slots: int, rows: int, decode_chunk: int, pool: Pool) -> None:
        self.slots: list[Job | None] = [None] * slots
        self.waiting: deque[Job] = deque()
        self.parked: list[Job] = []
        self.rows = rows
        self._pool, self._decode_chunk = pool, decode_chunk

    @property
    def running(self) -> list[Job]:
        """Who sits in a slot, the oldest first."""
        return sorted((job for job in self.slots if job is not None), key=lambda job: job.number)

    @property
    def begun(self) -> list[Job]:
        """Who runs, and who was swapped out."""
        return [*self.running, *self.parked]

    def bank(self, slot: int) -> int:
        return slot * self._pool.banks // len(self.slots)

    def admit(self, *, new: bool) -> Iterator[Job]:
        """Seat jobs in free slots, while there are pages for their first tokens and one for each that runs. new: not only parked ones."""
        free: dict[int, list[int]] = {}  # each bank's free slots, the first one last
        for slot in reversed(range(len(self.slots))):
            if self.slots[slot] is None:
                free.setdefault(self.bank(slot), []).append(slot)
        while free and (queue := self.parked or (self.waiting if new else None)):
            job = queue[0]
            bank = max(free, key=lambda bank: (self._pool.available(bank), -bank))
            need, taken = job.need(self._decode_chunk), len(self.slots) // self._pool.banks - len(free[bank])
            if need + taken > self._pool.available(bank):
                return
            slot = free[bank].pop()
            if not free[bank]:
                del free[bank]
            queue.remove(job)
            self.slots[slot], job.slot = job, slot
            job.pages = self._pool.take(bank, need)
            waited_ms = (time.monotonic_ns() - job.asked_ns) / 1e6
            job.seated = span("request", lane=Lane("engine slots", f"slot {slot:03}"), waited_ms=waited_ms).start()
            yield job

    def unfilled(self) -> list[Job]:
        return [job for job in self.running if not job.ready]

    def chunks(self) -> list[Chunk]:
        """What one prefill takes: pages of unfilled jobs, the oldest first; each page once, whoever else begins with the same tokens."""
        claimed: set[bytes] = set()
        left = [self.rows] * self._pool.banks
        found: list[Chunk] = []
        for job in self.unfilled():
            bank = self.bank(job.slot)
            for index in range(job.filled // PAGE, len(job.names)):
                if job.names[index] in claimed or not left[bank]:
                    break
                claimed.add(job.names[index])
                left[bank] -= 1
                found.append(Chunk(job, index))
        return found

    def short_of_pages(self) -> Job | None:
        """Give all who run the pages of their next chunk, the oldest first. Where a bank has too few: its youngest, who must be parked."""
        for job in self.running:
            bank, lack = self.bank(job.slot), job.need(self._decode_chunk) - len(job.pages)
            if lack > self._pool.available(bank):
                return self._seated(bank)[-1]
            if lack > 0:
                job.pages += self._pool.take(bank, lack)
        return None

    def park(self, job: Job) -> None:
        """Take a job whose pages were swapped out from its slot."""
        self._leave(job)
        self.parked = sorted([*self.parked, job], key=lambda job: job.number)

    def release(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.parked:
            self.parked.remove(job)
        else:
            self._leave(job)

    def find(self, request: Request) -> list[Job]:
        """The jobs of this very request object; an equal one made elsewhere is another request."""
        return [job for job in (*self.waiting, *self.begun) if job.draft.request is request]

    def forsaken(self) -> list[Job]:
        """Jobs whose caller has stopped waiting."""
        return [job for job in (*self.waiting, *self.begun) if job.future.cancelled()]

    def _seated(self, bank: int) -> list[Job]:
        return [job for job in self.running if self.bank(job.slot) == bank]

    def _leave(self, job: Job) -> None:
        if job.slot < 0:
            raise LookupError("this job sits in no slot")
        self._pool.give(self.bank(job.slot), job.pages)
        self.slots[job.slot], job.slot, job.pages = None, -1, []
        if job.seated is not None:
            job.seated.note(tokens=len(job.draft.ids))
            job.seated.stop()
