"""Slots, pages, the queue and shared prompts, without a model; and what a draft makes of the tokens it is given."""

import numpy as np
import pytest

from burnish.rollout.draft import Draft
from burnish.rollout.native.pool import PAGE, OutOfPages, Pool
from burnish.rollout.native.prefixes import Prefixes, page_names
from burnish.rollout.native.scheduler import Job, Scheduler
from burnish.types import Request, SamplingParams, StopReason


def job(prompt: tuple[int, ...], seed: int = 0, max_tokens: int = 8) -> Job:
    return Job.make(Request(prompt, SamplingParams(max_tokens), (seed,)), context=1000)


def scheduler(slots: int, *, rows: int = 8, pages: int = 1000, banks: int = 1) -> Scheduler:
    return Scheduler(slots=slots, rows=rows, decode_chunk=4, pool=Pool(banks=banks, smallest=2 * slots, most=pages))


def seat(scheduler: Scheduler, *jobs: Job) -> list[Job]:
    scheduler.waiting.extend(jobs)
    return list(scheduler.admit(new=True))


def prefilled(scheduler: Scheduler) -> list[tuple[Job, int]]:
    """What the next prefill takes, as if it had been run."""
    chunks = scheduler.chunks()
    for one, number in chunks:
        one.filled = min((number + 1) * PAGE, one.target)
    return [(one, number) for one, number in chunks]


def test_seating_many_looks_at_each_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    bank = Scheduler.bank
    monkeypatch.setattr(Scheduler, "bank", lambda self, slot: looks.append(slot) or bank(self, slot))
    one = scheduler(64, banks=2)
    assert [job.slot for job in seat(one, *(job((1, 2), seed) for seed in range(64)))][:4] == [0, 32, 1, 33]
    assert len(looks) == 64


def test_a_group_is_prefilled_once() -> None:
    """4 prompts x 8 samples: 4 rows of prefill, every sample in a slot of its own; the others wait for these pages."""
    one = scheduler(32)
    jobs = [job((p, p + 1), 8 * p + sample) for p in range(4) for sample in range(8)]
    assert seat(one, *jobs) == jobs and sorted(job.slot for job in jobs) == list(range(32))
    assert prefilled(one) == [(jobs[8 * p], 0) for p in range(4)]
    assert one.unfilled() == [job for job in jobs if job not in jobs[::8]] and {job.names[0] for job in jobs} == {
        j.names[0] for j in jobs[::8]
    }


def test_rows_are_pages_of_any_prompts_the_oldest_first() -> None:
    one, lengths = scheduler(16, rows=5), (5, 200, 65, 64, 1, 129)
    jobs = [job(tuple(range(seed, seed + length)), seed) for seed, length in enumerate(lengths)]
    seat(one, *jobs)
    assert [len(job.names) for job in jobs] == [1, 4, 1, 1, 0, 2], "the last token of a prompt enters with decoding"
    assert prefilled(one) == [(jobs[0], 0), *((jobs[1], number) for number in range(4))]
    assert prefilled(one) == [(jobs[2], 0), (jobs[3], 0), (jobs[5], 0), (jobs[5], 1)]
    assert one.chunks() == [] and all(job.ready for job in jobs)


def test_a_common_beginning_is_prefilled_once_and_what_follows_by_each() -> None:
    one, start = scheduler(4), tuple(range(64))
    first, second, other = job((*start, 1, 2)), job((*start, 7, 8)), job((9, *start, 1))
    seat(one, first, second, other)
    assert prefilled(one) == [(first, 0), (first, 1), (other, 0), (other, 1)]
    second.filled = 64  # its first page was copied
    assert prefilled(one) == [(second, 1)]


def test_first_come_first_served_and_a_freed_slot_is_taken_at_once() -> None:
    one = scheduler(2)
    jobs = [job((i,)) for i in range(5)]
    assert seat(one, *jobs) == jobs[:2] and one.running == jobs[:2]
    one.release(jobs[1])
    assert list(one.admit(new=False)) == [] and list(one.admit(new=True)) == [jobs[2]]
    one.release(jobs[4])
    one.release(jobs[0])
    assert list(one.admit(new=True)) == [jobs[3]] and one.running == [jobs[2], jobs[3]] and not one.waiting
    one.release(jobs[3])
    with pytest.raises(LookupError, match="sits in no slot"):
        one.release(jobs[3])


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    """Three sequences that grow to four pages each, in seven pages."""
    one = scheduler(3, pages=7)
    jobs = [job(tuple(range(i, i + 61)), i, max_tokens=150) for i in range(3)]
    assert seat(one, *jobs, job((1,))) == jobs, "each with the two pages of its first tokens"

    def grow(num_tokens: int) -> None:
        for one_job in jobs:
            if one_job.slot >= 0:
                one_job.draft.ids += [0] * num_tokens
                one_job.filled = one_job.target

    grow(62)
    assert one.short_of_pages() is None and len(jobs[0].pages) == 2
    grow(6)
    assert one.short_of_pages() is jobs[2] and len(jobs[0].pages) == 3
    one.park(jobs[2])
    assert one.short_of_pages() is None and [len(job.pages) for job in jobs] == [3, 3, 0] and one.parked == [jobs[2]]
    assert list(one.admit(new=True)) == [], "nobody overtakes who was parked"
    one.release(jobs[0])
    assert list(one.admit(new=True))[0] is jobs[2] and len(jobs[2].pages) == 3


def test_pages_are_of_the_slots_own_bank_and_none_is_lost() -> None:
    one = scheduler(4, pages=3, banks=2)
    pool = one._pool
    jobs = [job((1,) * 100, i) for i in range(3)]
    assert seat(one, *jobs) == jobs[:2] and [one.bank(job.slot) for job in jobs[:2]] == [0, 1] and pool.taken == 4
    for held in jobs[:2]:
        one.release(held)
    assert pool.taken == 0 and [pool.available(bank) for bank in range(2)] == [3, 3]


def test_the_pool_grows_by_half_and_never_beyond_its_most() -> None:
    pool, sizes = Pool(banks=2, smallest=4, most=20), []
    for _ in range(20):
        pool.take(1, 1)
        sizes.append(pool.size)
    assert sorted(set(sizes)) == [4, 6, 8, 12, 16, 20] and sizes[3] == 4 and sizes[4] == 6
    with pytest.raises(OutOfPages, match="1 pages were asked of bank 1, which has 0 left of 20"):
        pool.take(1, 1)
    assert pool.available(0) == 20
    pool.give(1, list(range(20)))
    pool.reset()
    assert (pool.size, pool.taken) == (4, 0) and sorted(pool.take(0, 4)) == [0, 1, 2, 3]


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    ids = list(range(150))
    assert page_names(ids)[:2] == page_names(ids[:128]) and len(page_names(ids)) == 3 and page_names([]) == []
    for place in (0, 63, 64, 149):
        other = [*ids[:place], 1000, *ids[place + 1 :]]
        assert [a == b for a, b in zip(page_names(ids), page_names(other), strict=True)] == [i < place // 64 for i in range(3)]
    assert len({*page_names(ids), page_names(ids[:149])[2], page_names(ids[:65])[1]}) == 5


def test_kept_pages_go_from_the_end_of_the_sequence_that_was_asked_for_the_longest_ago() -> None:
    kept: Prefixes[str] = Prefixes()
    for name in ("a3", "a2", "a1", "b2", "b1"):
        kept.put(name.encode(), name, room=5)
    assert [kept.get(name) for name in (b"a3", b"a2", b"a1")] == ["a3", "a2", "a1"]
    kept.put(b"c1", "c1", room=4)
    assert [kept.get(name) for name in (b"b2", b"b1", b"a3", b"a2", b"a1", b"c1")] == [None, None, "a3", "a2", "a1", "c1"]
    kept.put(b"d1", "d1", room=0)
    assert len(kept) == 0


def test_a_request_is_found_by_identity() -> None:
    one, first, equal = scheduler(1), job((1,)), job((1,))
    seat(one, first, equal)
    assert first.draft.request == equal.draft.request
    assert one.find(first.draft.request) == [first] and one.find(equal.draft.request) == [equal]


def test_keys_depend_on_the_whole_path_and_on_nothing_else() -> None:
    def key(*path: int) -> tuple[int, ...]:
        return tuple(Job.make(Request((1,), SamplingParams(1), path), context=9).key.tolist())

    paths = [(0,), (0, 0), (1, 23), (12, 3), (2**70,), (-1,), ()]
    assert len({key(*path) for path in paths}) == len(paths)
    assert key(1, 2, 3) == key(*np.array([1, 2, 3])) == (1989434132, 1352583206)


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        ([5, 6, 1], {"stop_ids": (1, 106)}, ([5, 6, 1], StopReason.STOP_ID)),
        ([5, 106], {"stop_ids": (1, 106)}, ([5, 106], StopReason.STOP_ID)),
        ([5, 6, 7, 8], {}, ([5, 6, 7, 8], StopReason.LENGTH)),
        ([5, 6, 7, 1], {"stop_ids": (1,)}, ([5, 6, 7, 1], StopReason.STOP_ID)),
        ([5, 6], {}, ([5, 6], None)),
        ([5, 6, 7], {"stop_strings": ("<6>",)}, ([5, 6], StopReason.STOP_STRING)),
        ([5, 6, 7], {"stop_strings": ("6><7", "nothing")}, ([5, 6, 7], StopReason.STOP_STRING)),
        ([5, 6, 7, 8], {"stop_strings": ("<8>",)}, ([5, 6, 7, 8], StopReason.STOP_STRING)),
        ([5, 1], {"stop_strings": ("<1>",), "stop_ids": (1,)}, ([5, 1], StopReason.STOP_ID)),
        ([5, 1], {"stop_strings": ("<5>",), "stop_ids": (1,)}, ([5], StopReason.STOP_STRING)),
    ],
)
@pytest.mark.parametrize("step", [1, 4])
def test_b053_what_ends_a_draft(ids: list[int], params: dict, expected: tuple[list[int], StopReason | None], step: int) -> None:
    """Whether the tokens come one by one or all at once."""
    draft = Draft.begin(Request((9,), SamplingParams(4, **params)), context=100)
    for start in range(0, len(ids), step):
        if draft.stop is None:
            new = np.asarray(ids[start : start + step], np.int32)
            logps, kept = np.zeros(len(new), np.float32), np.zeros((len(new), 0), np.int32)
            draft.extend(new, logps, kept, version=3, decode_text=lambda ids: "".join(f"<{i}>" for i in ids))
    assert (draft.ids, draft.stop) == expected
    assert draft.versions == [3] * len(draft.ids) and len(draft.logps) == len(draft.ids)
