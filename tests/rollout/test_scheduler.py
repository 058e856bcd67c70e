"""Slots, the queue and shared prompts, without a model; and what a draft makes of the tokens it is given."""

import numpy as np
import pytest

from burnish.rollout.draft import Draft
from burnish.rollout.native.scheduler import Job, Scheduler, bucket
from burnish.types import Request, SamplingParams, StopReason


def job(prompt: tuple[int, ...], seed: int = 0) -> Job:
    return Job.make(Request(prompt, SamplingParams(8), (seed,)), context=1000)


def test_buckets_are_few_and_at_most_half_padding() -> None:
    sizes = [bucket(length, 1000) for length in range(1, 1001)]
    assert sorted(set(sizes)) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert all(size >= length for length, size in enumerate(sizes, 1))
    assert bucket(40, 48) == 48


def test_a_group_is_prefilled_once() -> None:
    """4 prompts x 8 samples: 4 rows of prefill, every sample in a slot of its own."""
    scheduler = Scheduler(slots=32, prefill_rows=8, context=1000)
    scheduler.waiting.extend(job((p, p + 1), 8 * p + sample) for p in range(4) for sample in range(8))
    (plan,) = scheduler.admit()
    assert (plan.length, plan.prompts) == (32, [(p, p + 1) for p in range(4)])
    assert sorted(slot for targets in plan.targets for slot in targets) == list(range(32))
    for prompt, targets in zip(plan.prompts, plan.targets, strict=True):
        assert [scheduler.seated(slot).draft.request.prompt_ids for slot in targets] == [prompt] * 8
    assert scheduler.admit() == [] and not scheduler.waiting


def test_one_call_holds_one_padded_length_and_no_more_rows_than_fit() -> None:
    scheduler = Scheduler(slots=16, prefill_rows=3, context=1000)
    scheduler.waiting.extend(job(tuple(range(length))) for length in (5, 90, 6, 7, 33, 8, 91))
    plans = scheduler.admit()
    assert [(plan.length, [len(prompt) for prompt in plan.prompts]) for plan in plans] == [
        (32, [5, 6, 7]),
        (32, [8]),
        (96, [90, 91]),
        (48, [33]),
    ]


def test_first_come_first_served_and_a_freed_slot_is_taken_at_once() -> None:
    scheduler = Scheduler(slots=2, prefill_rows=8, context=1000)
    jobs = [job((i,)) for i in range(5)]
    scheduler.waiting.extend(jobs)
    scheduler.admit()
    assert scheduler.running == [(0, jobs[0]), (1, jobs[1])]
    scheduler.release(jobs[1])
    (plan,) = scheduler.admit()
    assert (plan.prompts, plan.targets) == ([(2,)], [[1]])
    scheduler.release(jobs[4])
    scheduler.release(jobs[0])
    scheduler.admit()
    assert scheduler.slots == [jobs[3], jobs[2]] and not scheduler.waiting
    with pytest.raises(LookupError, match="slot 0 is free"):
        scheduler.release(jobs[3])
        scheduler.seated(0)


def test_a_request_is_found_by_identity() -> None:
    scheduler = Scheduler(slots=1, prefill_rows=1, context=1000)
    first, equal = job((1,)), job((1,))
    scheduler.waiting.extend([first, equal])
    scheduler.admit()
    assert first.draft.request == equal.draft.request
    assert scheduler.find(first.draft.request) == [first] and scheduler.find(equal.draft.request) == [equal]


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
