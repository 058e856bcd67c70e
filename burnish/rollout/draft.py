"""A completion in the making: its budget, what was sampled so far, and what ends it. Shared by the engines of this room; no jax.

Owns the meaning of stop reasons and how a finished completion looks. Whoever samples hands tokens to `Draft.extend` as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from burnish.types import Completion, Request, StopReason

DecodeText = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Draft:
    """What has been sampled for one request; `stop` is None while it goes on."""

    request: Request
    budget: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopReason | None = None

    @classmethod
    def begin(cls, request: Request, *, context: int) -> Draft:
        """Refuse a prompt that leaves no room in `context`; else give it what its parameters and the context allow."""
        length = len(request.prompt_ids)
        if not 1 <= length < context:
            raise ValueError(
                f"a prompt of {length} tokens can't run in a context of {context}: it needs 1 to {context - 1}, "
                "one place being for what is sampled; shorten the prompt or raise the context"
            )
        return cls(request, min(request.params.max_tokens, context - length))

    def extend(self, ids: np.ndarray, logps: np.ndarray, kept: np.ndarray, *, version: int, decode_text: DecodeText) -> None:
        """Take new tokens (kept: int32[N, K], -1 where nothing) and see whether they end the completion.

        The sampler has ended them at a stop id or the end of the budget itself; stop strings are found here.
        """
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

    def _cut_at_stop_string(self, start: int, decode_text: DecodeText) -> None:
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
        """What the caller gets; a draft that nothing has ended was cancelled."""
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
