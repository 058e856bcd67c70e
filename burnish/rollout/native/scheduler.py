"""Who runs in which slot: the queue, admission, and what has been sampled so far. Plain Python, no jax.

Owns the life of a request inside the engine. The engine asks `admit` for prefills, feeds sampled tokens to `Job.extend`, and releases slots.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from burnish.types import Completion, Request, StopReason

Decode = Callable[[Sequence[int]], str]


def bucket(length: int, limit: int) -> int:
    """The padded length for `length` tokens: 32, 64, 96, 128, 192, 256, 384, 512, 768 … but never more than `limit`.

    Few lengths so that few programs compile; steps of at most a half so that little is padding.
    """
    size = 32
    while size < length:
        half_more = size + size // 2
        if size >= 64 and length <= half_more:
            return min(half_more, limit)
        size *= 2
    return min(size, limit)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way to a completion."""

    request: Request
    budget: int
    key: np.ndarray
    future: Future[Completion] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopReason | None = None

    @classmethod
    def make(cls, request: Request, *, context: int) -> Job:
        length = len(request.prompt_ids)
        if not 1 <= length < context:
            raise ValueError(
                f"a prompt of {length} tokens can't run in a context of {context}: it needs 1 to {context - 1}, "
                "one place being for what is sampled; shorten the prompt or raise the context"
            )
        # A digest, not hash(): the same path gives the same noise in every process, whatever the size and number of its parts.
        digest = hashlib.blake2b(repr(tuple(map(int, request.seed_path))).encode(), digest_size=8).digest()
        return cls(request, min(request.params.max_tokens, context - length), np.frombuffer(digest, np.uint32))

    def extend(self, ids: np.ndarray, logps: np.ndarray, kept: np.ndarray, *, version: int, decode_text: Decode) -> None:
        """Take the tokens of one program and see whether they end the completion."""
        start = len(self.ids)
        self.ids.extend(ids.tolist())
        self.logps.extend(logps.tolist())
        self.versions.extend([version] * len(ids))
        if self.request.params.truncates:
            self.kept.extend(kept.copy())
        if self.ids[-1] in self.request.params.stop_ids:
            self.stop = StopReason.STOP_ID
        elif len(self.ids) >= self.budget:
            self.stop = StopReason.LENGTH if self.budget == self.request.params.max_tokens else StopReason.CONTEXT
        self._cut_at_stop_string(start, decode_text)

    def _cut_at_stop_string(self, start: int, decode_text: Decode) -> None:
        """End after the first new token that completes a stop string; a stop id at that very place stays the reason."""
        texts = self.request.params.stop_strings

        def complete(count: int) -> bool:
            text = decode_text(self.ids[:count])
            return any(stop in text for stop in texts)

        if not texts or not complete(len(self.ids)):
            return
        end = next(count for count in range(start + 1, len(self.ids) + 1) if complete(count))
        if end == len(self.ids) and self.stop is StopReason.STOP_ID:
            return
        self.stop = StopReason.STOP_STRING
        for column in (self.ids, self.logps, self.kept, self.versions):
            del column[end:]

    def completion(self) -> Completion:
        truncates = self.request.params.truncates
        return Completion(
            ids=np.asarray(self.ids, np.int32),
            logps=np.asarray(self.logps, np.float32),
            versions=np.asarray(self.versions, np.int32),
            stop=self.stop or StopReason.CANCELLED,
            support="truncated" if truncates else "full",
            kept_ids=_trimmed(self.kept) if truncates else None,
        )


def _trimmed(kept: list[np.ndarray]) -> np.ndarray:
    """int32[T, K]: kept ids moved to the front of each row, as wide as the widest needs."""
    rows = [row[row >= 0] for row in kept]
    out = np.full((len(rows), max((len(row) for row in rows), default=0)), -1, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


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

    def admit(self) -> list[Prefill]:
        """Seat waiting jobs in free slots. Jobs with the same prompt share one prefilled row; one call holds one padded length."""
        free = [slot for slot, job in enumerate(self.slots) if job is None]
        seats: dict[tuple[int, ...], list[int]] = {}
        for slot in free[: len(self.waiting)]:
            job = self.waiting.popleft()
            self.slots[slot] = job
            seats.setdefault(job.request.prompt_ids, []).append(slot)
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in seats:
            by_length.setdefault(bucket(len(prompt), self._context), []).append(prompt)
        return [
            Prefill(length, prompts[i : i + self._prefill_rows], [seats[prompt] for prompt in prompts[i : i + self._prefill_rows]])
            for length, prompts in by_length.items()
            for i in range(0, len(prompts), self._prefill_rows)
        ]

    def release(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        if job in self.waiting:
            self.waiting.remove(job)
        else:
            self.slots[self.slots.index(job)] = None

    def find(self, request: Request) -> list[Job]:
        """The jobs of this very request object; an equal one made elsewhere is another request."""
        return [job for job in (*self.waiting, *(job for _, job in self.running)) if job.request is request]

    def forsaken(self) -> list[Job]:
        """Jobs whose caller has stopped waiting."""
        return [job for job in (*self.waiting, *(job for _, job in self.running)) if job.future.cancelled()]
