"""Overlong prompts: one policy, counted (B069, R37)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from burnish.data.length import fit_prompt, limit_prompts
from burnish.data.source import DataError, Source, from_rows
from burnish.types import Message

IDS = list(range(1, 13))


def count_letters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def texts(source: Source) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in source.prompts]


def test_b069_each_policy_on_twelve_ids_and_a_limit_of_eight() -> None:
    assert fit_prompt(IDS, limit=8, policy="left") == [5, 6, 7, 8, 9, 10, 11, 12]
    assert fit_prompt(IDS, limit=8, policy="drop") is None
    with pytest.raises(DataError, match="12 tokens, the limit is 8"):
        fit_prompt(IDS, limit=8, policy="error")


def test_b069_left_keeps_a_bos_in_front_only_when_told_which_id_it_is() -> None:
    assert fit_prompt(IDS, limit=8, policy="left", bos_id=1) == [1, 6, 7, 8, 9, 10, 11, 12]
    assert fit_prompt(IDS, limit=8, policy="left", bos_id=99) == IDS[4:]
    assert fit_prompt(IDS, limit=1, policy="left", bos_id=1) == [1]


@pytest.mark.parametrize("policy", ["drop", "error", "left"])
@pytest.mark.parametrize("count", [1, 8])
def test_r37_what_fits_is_unchanged(policy, count) -> None:  # type: ignore[no-untyped-def]
    assert fit_prompt(IDS[:count], limit=8, policy=policy, bos_id=1) == IDS[:count]


@pytest.mark.parametrize("policy", ["drop", "error", "left"])
def test_r37_no_tokens_is_an_error_whatever_the_policy(policy) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="no tokens"):
        fit_prompt([], limit=8, policy=policy)
    with pytest.raises(DataError, match="s:1: the prompt has no tokens"):
        limit_prompts(from_rows(["a", ""], name="s"), count_tokens=count_letters, max_tokens=4, policy=policy)


def test_r37_lengths_around_the_limit_are_dropped_and_counted() -> None:
    source = from_rows(["a", "a" * 4, "a" * 5, "a" * 40, "b"], name="s")
    limited, report = limit_prompts(source, count_tokens=count_letters, max_tokens=4)
    assert texts(limited) == ["a", "aaaa", "b"] and limited.num_rows == 3
    assert [prompt.id for prompt in limited.prompts] == ["s:0", "s:1", "s:4"]
    assert (report.kept, report.dropped, report.cut, report.longest) == (3, 2, 0, 40)
    assert str(report) == "3 of 5 prompts used, 2 dropped; the limit is 4 tokens, the longest has 40"


def test_left_keeps_the_prompts_and_counts_those_to_cut() -> None:
    limited, report = limit_prompts(from_rows(["a", "a" * 5], name="s"), count_tokens=count_letters, max_tokens=4, policy="left")
    assert limited.num_rows == 2 and (report.kept, report.cut, report.dropped) == (2, 1, 0)


def test_error_names_the_prompt_and_both_lengths() -> None:
    with pytest.raises(DataError, match="s:1: the prompt has 5 tokens, `rollout.max_prompt_tokens` is 4"):
        limit_prompts(from_rows(["a", "a" * 5], name="s"), count_tokens=count_letters, max_tokens=4, policy="error")


def test_b113_r37_all_too_long_is_an_error_with_counts() -> None:
    for rows in (["a" * 5, "a" * 9], ("a" * n for n in (5, 9))):
        source = from_rows(rows, name="s")
        with pytest.raises(DataError, match="0 of 2 prompts used, 2 dropped; the limit is 4 tokens, the longest has 9"):
            list(limit_prompts(source, count_tokens=count_letters, max_tokens=4)[0].prompts)


def test_an_endless_source_is_limited_as_it_is_read_and_cannot_spin() -> None:
    class Endless:
        def __init__(self, texts: Sequence[str]) -> None:
            self.texts = texts

        def __iter__(self) -> Iterator[str]:
            return itertools.cycle(self.texts)

    limited, report = limit_prompts(from_rows(Endless(["a", "bbbbb", "c"]), name="s"), count_tokens=count_letters, max_tokens=4)
    first = [prompt.id for prompt in itertools.islice(limited.prompts, 4)]
    assert first == ["s:0", "s:2", "s:3", "s:5"] and report.dropped == 1 + 1
    limited, _ = limit_prompts(from_rows(Endless(["bbbbb"]), name="s"), count_tokens=count_letters, max_tokens=4)
    with pytest.raises(DataError, match="0 of 10000 prompts used"):
        next(iter(limited.prompts))
