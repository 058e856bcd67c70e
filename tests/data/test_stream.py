"""The order of prompts: repeatable, weighted, and resumed exactly from any place."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from burnish.data.source import DataError, Source, from_rows
from burnish.data.stream import PromptStream, epoch_order


def rows(name: str, count: int) -> Source:
    return from_rows([f"{name}{i}" for i in range(count)], name=name)


class Endless:
    def __iter__(self) -> Iterator[str]:
        return (str(i) for i in itertools.count())


class Again:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[str]:
        return (str(i) for i in range(self.count))


def drawn(stream: PromptStream, count: int | None = None) -> list[str]:
    return [prompt.id for prompt in itertools.islice(stream, count)]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    ids = drawn(PromptStream([rows("a", 20)], seed=0, epochs=3))
    epochs = [ids[:20], ids[20:40], ids[40:]]
    assert all(sorted(epoch) == sorted(f"a:{i}" for i in range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_seed_epoch_and_source_only() -> None:
    alone = drawn(PromptStream([rows("a", 30)], seed=4, epochs=2))
    beside = drawn(PromptStream([rows("b", 7), rows("a", 30)], weights=[3, 1], seed=4, epochs=2))
    assert [name for name in beside if name.startswith("a")] == alone
    assert drawn(PromptStream([rows("a", 30)], seed=5, epochs=2)) != alone


def test_epoch_order_is_pinned() -> None:
    """A changed order would break the resume of runs that exist."""
    assert epoch_order(8, seed=1, epoch=0, name="a").tolist() == [7, 0, 3, 5, 4, 1, 6, 2]
    assert epoch_order(8, seed=1, epoch=1, name="a").tolist() == [5, 3, 7, 2, 4, 0, 1, 6]


def test_unshuffled_order_is_the_sources() -> None:
    assert drawn(PromptStream([rows("a", 3)], seed=0, shuffle=False), 7) == ["a:0", "a:1", "a:2", "a:0", "a:1", "a:2", "a:0"]


def test_each_sources_share_is_right_at_every_moment() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    stream = PromptStream([rows(name, 11) for name in weights], weights=list(weights.values()), seed=0)
    counts: Counter[str] = Counter()
    for total, prompt in enumerate(itertools.islice(stream, 500), start=1):
        counts[prompt.id[0]] += 1
        assert all(abs(counts[name] - weight * total) <= 1.0 for name, weight in weights.items())


def test_a_source_that_is_through_leaves_the_mixture_and_the_rest_keep_their_shares() -> None:
    stream = PromptStream([rows("a", 10), rows("b", 100), rows("c", 100)], weights=[5, 3, 1], seed=0, epochs=1)
    ids = drawn(stream)
    assert len(ids) == 210
    after = Counter(name[0] for name in ids[30:90])
    assert after == {"b": 45, "c": 15}


@pytest.mark.parametrize("at", range(50))
def test_resumed_from_anywhere_the_rest_is_the_same(at: int) -> None:
    def fresh() -> PromptStream:
        sources = [rows("a", 8), from_rows(Again(5), name="b"), from_rows((str(i) for i in range(4)), name="once")]
        return PromptStream(sources, weights=[2, 1, 1], seed=3, epochs=2)

    unbroken = drawn(fresh())
    assert len(unbroken) == 16 + 10 + 4
    stream = fresh()
    assert drawn(stream, at) == unbroken[:at]
    resumed = fresh()
    resumed.restore(json.loads(json.dumps(stream.cursor())))
    assert drawn(resumed) == unbroken[at:]


def test_b105_a_position_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    stream = PromptStream([rows("a", 8)], seed=0, epochs=2)
    first_epoch = drawn(stream, 8)
    cursor = stream.cursor()
    assert (cursor["sources"]["a"]["epoch"], cursor["sources"]["a"]["index"]) == (1, 0)
    resumed = PromptStream([rows("a", 8)], seed=0, epochs=2)
    resumed.restore(cursor)
    steps = [drawn(resumed, 4), drawn(resumed, 4), drawn(resumed, 4)]
    assert sorted(steps[0] + steps[1]) == sorted(first_epoch) and steps[2] == []
    cursor["sources"]["a"].update(epoch=0, index=8)  # as a loader without normalisation would have written it
    resumed.restore(cursor)
    assert drawn(resumed) == steps[0] + steps[1]


def test_a_cursor_of_other_data_is_refused() -> None:
    cursor = PromptStream([rows("a", 8)], seed=0).cursor()
    with pytest.raises(DataError, match="num_rows = 8, now it is 9"):
        PromptStream([rows("a", 9)], seed=0).restore(cursor)
    with pytest.raises(DataError, match="seed 0, this run has seed 1"):
        PromptStream([rows("a", 8)], seed=1).restore(cursor)
    with pytest.raises(DataError, match=r"sources \['a'\], this run has \['b'\]"):
        PromptStream([rows("b", 8)], seed=0).restore(cursor)
    with pytest.raises(DataError, match="shuffle = True, now it is False"):
        PromptStream([rows("a", 8)], seed=0, shuffle=False).restore(cursor)
    with pytest.raises(DataError, match="of a source with a length"):
        PromptStream([from_rows(Endless(), name="a")], seed=0).restore(cursor)


def test_r36_an_endless_iterator_is_read_as_far_as_asked() -> None:
    stream = PromptStream([from_rows(Endless(), name="a")], seed=0)
    assert stream.num_rows is None
    assert drawn(stream, 3) == ["a:0", "a:1", "a:2"]
    assert drawn(stream, 2) == ["a:3", "a:4"]


def test_a_generator_gives_one_pass_and_then_a_clean_end() -> None:
    assert drawn(PromptStream([from_rows((c for c in "xy"), name="a")], seed=0)) == ["a:0", "a:1"]
    assert drawn(PromptStream([from_rows(Again(2), name="a")], seed=0), 5) == ["a:0", "a:1", "a:0", "a:1", "a:0"]


def test_b113_an_iterator_that_ends_at_once_is_an_error() -> None:
    with pytest.raises(DataError, match="a is empty"):
        next(PromptStream([from_rows(iter(()), name="a")], seed=0))


def test_r36_after_a_row_that_failed_the_stream_fails_again_and_never_starts_over() -> None:
    class Broken:
        def __iter__(self) -> Iterator[str]:
            yield from "abcdefg"
            raise OSError("disk gone")

    stream = PromptStream([from_rows(Broken(), name="a")], seed=0)
    assert len(drawn(stream, 7)) == 7
    for _ in range(2):
        with pytest.raises(DataError, match="row 7 could not be read"):
            next(stream)


def test_one_row_is_a_data_set() -> None:
    assert drawn(PromptStream([rows("a", 1)], seed=0), 3) == ["a:0"] * 3


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_are_checked(weights: list[float]) -> None:
    with pytest.raises(DataError, match="one positive weight for each of 2 sources"):
        PromptStream([rows("a", 1), rows("b", 1)], weights=weights, seed=0)


def test_sources_need_names_of_their_own() -> None:
    with pytest.raises(DataError, match="different names"):
        PromptStream([rows("a", 1), rows("a", 2)], seed=0)
    with pytest.raises(DataError, match="no source"):
        PromptStream([], seed=0)


def test_samples_are_first_rows_and_draw_nothing() -> None:
    stream = PromptStream([rows("a", 8), from_rows((str(i) for i in range(4)), name="once")], seed=3, epochs=1)
    assert [prompt.id for prompt in stream.samples()] == ["a:0"]
    assert len(drawn(stream)) == 12
