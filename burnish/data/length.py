"""Prompts that are longer than the limit: one policy, counted.

`drop` leaves them out, `error` refuses them before anything is generated, `left` keeps their last tokens. Lengths are tokens after the
chat template. The learner filters its sources once at the start; agents fit what an episode appends later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from burnish.data.source import DataError, Source
from burnish.types import Message, Prompt

OverlongPolicy = Literal["drop", "error", "left"]
CountTokens = Callable[[Sequence[Message]], int]

_MAX_DROPPED_IN_A_ROW = 10_000


def fit_prompt(ids: Sequence[int], *, limit: int, policy: OverlongPolicy, bos_id: int | None = None) -> list[int] | None:
    """The prompt's ids within `limit`, or None where it is to be dropped.

    `left` keeps the last `limit` ids. If `bos_id` is given and the prompt starts with it, the BOS stays in front and the last `limit - 1`
    ids follow; without `bos_id` a BOS is cut like any other id. An empty prompt is an error: nothing could predict a first token.
    """
    if limit < 1:
        raise DataError(f"the longest prompt must have at least 1 token, got a limit of {limit}")
    if not ids:
        raise DataError("the prompt has no tokens")
    if len(ids) <= limit:
        return list(ids)
    if policy == "error":
        raise DataError(f"the prompt has {len(ids)} tokens, the limit is {limit}")
    if policy == "drop":
        return None
    if ids[0] == bos_id:
        return [ids[0], *ids[len(ids) - limit + 1 :]]
    return list(ids[-limit:])


@dataclass(slots=True)
class LengthReport:
    """What a limit did. For a source without a length the counts grow as it is read."""

    limit: int
    policy: OverlongPolicy
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    longest: int = 0

    @property
    def seen(self) -> int:
        return self.kept + self.dropped

    def admit(self, num_tokens: int, prompt: Prompt) -> bool:
        """Count one prompt; whether it is used."""
        self.longest = max(self.longest, num_tokens)
        if num_tokens < 1:
            raise DataError(f"{prompt.id}: the prompt has no tokens")
        if num_tokens > self.limit:
            if self.policy == "error":
                raise DataError(f"{prompt.id}: the prompt has {num_tokens} tokens, `rollout.max_prompt_tokens` is {self.limit}")
            if self.policy == "drop":
                self.dropped += 1
                return False
            self.cut += 1
        self.kept += 1
        return True

    def __str__(self) -> str:
        changed = f"{self.dropped} dropped" if self.policy == "drop" else f"{self.cut} cut on the left"
        return f"{self.kept} of {self.seen} prompts used, {changed}; the limit is {self.limit} tokens, the longest has {self.longest}"


def limit_prompts(
    source: Source, *, count_tokens: CountTokens, max_tokens: int, policy: OverlongPolicy = "drop"
) -> tuple[Source, LengthReport]:
    """The source without its overlong prompts, and the counts.

    A source with a length is measured at once, and if nothing fits that is an error. Another one is measured as it is read, and 10 000
    overlong prompts in a row are an error, so that an endless source can't spin. Prompts keep their identity: indices have gaps.
    """
    report = LengthReport(max_tokens, policy)
    if not isinstance(source.prompts, Sequence):
        limited = _LimitedPrompts(source, count_tokens, report)
        return replace(source, prompts=iter(limited) if isinstance(source.prompts, Iterator) else limited), report
    kept = [prompt for prompt in source.prompts if report.admit(count_tokens(prompt.messages), prompt)]
    if not kept:
        raise _all_too_long(source, report)
    return replace(source, prompts=kept), report


@dataclass(frozen=True, slots=True)
class _LimitedPrompts:
    source: Source
    count_tokens: CountTokens
    report: LengthReport

    def __iter__(self) -> Iterator[Prompt]:
        kept, dropped_in_a_row = 0, 0
        for prompt in self.source.prompts:
            if self.report.admit(self.count_tokens(prompt.messages), prompt):
                kept, dropped_in_a_row = kept + 1, 0
                yield prompt
                continue
            dropped_in_a_row += 1
            if dropped_in_a_row == _MAX_DROPPED_IN_A_ROW:
                raise _all_too_long(self.source, self.report)
        if kept == 0 and dropped_in_a_row:
            raise _all_too_long(self.source, self.report)


def _all_too_long(source: Source, report: LengthReport) -> DataError:
    return DataError(f"{source.name}: the prompts are too long: {report}. Raise `rollout.max_prompt_tokens` or shorten them")
