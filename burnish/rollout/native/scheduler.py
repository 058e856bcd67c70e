"""Who runs in which slot: the queue, admission, and sharing of prompts. Plain Python, no jax.

Owns the life of a request inside the engine, which asks `admit` for prefills, feeds sampled tokens to drafts, and releases slots.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from burnish.observe.trace import Lane, span
from burnish.rollout.draft import Draft
from burnish.types import Completion, Request


def bucket(length: int, limit: int) -> int:
    """The padded length for `length` tokens: 32, 48, 64, 96, 128, 192, 256 … but never more than `limit`.

    Few lengths so that few programs compile; steps of at most a half so that little is padding.
    """
    size = 32
    while size < length:
        half_more = size + size // 2
        if length <= half_more:
            return min(half_more, limit)
        size *= 2
    return min(size, limit)


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the engine: its draft, the key of its noise, and who waits for it."""

    draft: Draft
    key: np.ndarray
    future: Future[Completion] = field(default_factory=Future)
    asked_ns: int = field(default_factory=time.monotonic_ns)
    seated: span | None = None
    """Its time in a slot, as a span."""

    @classmethod
    def make(cls, request: Request, *, context: int) -> Job:
        # A digest, not hash(): the same path gives the same noise in every process, whatever the size and number of its parts.
        digest = hashlib.blake2b(repr(tuple(map(int, request.seed_path))).encode(), digest_size=8).digest()
        return cls(Draft.begin(request, context=context), np.frombuffer(digest, np.uint32))


class Prefill(NamedTuple):
    """Distinct prompts to run together, all padded to `length`, and the slots that start from each."""

    length: int
    prompts: list[tuple[int, ...]]
    targets: list[list[int]]


class Scheduler:
    """Fixed slots and a first-in first-out queue."""

    def __init__(self, *, slots: int, prefill_rows: int, context: int) -> None:
        self.slots: list[Job | None] = [None] * slots
        self.waiting: deque[Job] = deque()
        self._prefill_rows = prefill_rows
        self._context = context

    @property
    def running(self) -> list[tuple[int, Job]]:
        return [(slot, job) for slot, job in enumerate(self.slots) if job is not None]

    def seated(self, slot: int) -> Job:
        job = self.slots[slot]
        if job is None:
            raise LookupError(f"slot {slot} is free")
        return job

    def admit(self) -> list[Prefill]:
        """Seat waiting jobs in free slots. Jobs with the same prompt share one prefilled row; one call holds one padded length."""
        free = [slot for slot, job in enumerate(self.slots) if job is None]
        seats: dict[tuple[int, ...], list[int]] = {}
        for slot in free[: len(self.waiting)]:
            job = self.waiting.popleft()
            self.slots[slot] = job
            waited_ms = (time.monotonic_ns() - job.asked_ns) / 1e6
            job.seated = span("request", lane=Lane("engine slots", f"slot {slot:03}"), waited_ms=waited_ms).start()
            seats.setdefault(job.draft.request.prompt_ids, []).append(slot)
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in seats:
            by_length.setdefault(bucket(len(prompt), self._context), []).append(prompt)
        return [
            Prefill(length, prompts[i : i + self._prefill_rows], [seats[prompt] for prompt in prompts[i : i + self._prefill_rows]])
            for length, prompts in by_length.items()
            for i in range(0, len(prompts), self._prefill_rows)
        ]

    def reach(self, num_tokens: int) -> int:
        """Positions that the longest running sequence needs for `num_tokens` more, padding of its prompt included."""

        def need(draft: Draft) -> int:
            length, count = len(draft.request.prompt_ids), len(draft.ids)
            return max(bucket(length, self._context), length + min(count + num_tokens, draft.budget))

        return max((need(job.draft) for _, job in self.running), default=1)

    def release(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        if job in self.waiting:
            self.waiting.remove(job)
        else:
            self.slots[self.slots.index(job)] = None
            if job.seated is not None:
                job.seated.note(tokens=len(job.draft.ids))
                job.seated.stop()

    def find(self, request: Request) -> list[Job]:
        """The jobs of this very request object; an equal one made elsewhere is another request."""
        return [job for job in (*self.waiting, *(job for _, job in self.running)) if job.draft.request is request]

    def forsaken(self) -> list[Job]:
        """Jobs whose caller has stopped waiting."""
        return [job for job in (*self.waiting, *(job for _, job in self.running)) if job.future.cancelled()]
