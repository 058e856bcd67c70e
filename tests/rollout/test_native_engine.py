"""The native engine samples what the model says: ids and log-probs against the full forward pass, and stop reasons."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from burnish.models import transformer
from burnish.models.config import LayerKind
from burnish.rollout.native import runner
from burnish.rollout.native.decode import prefill
from burnish.types import Completion, Request, SamplingParams, StopReason
from tests.rollout.conftest import MakeEngine
from tests.rollout.reference import CONFIG, forward_logits, generate, log_softmax, random_adapter, random_params, request, run

pytestmark = pytest.mark.optimised  # same ids and log-probs, bit for bit

PROMPTS = [(5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), tuple(range(40)), (11,)]


def greedy_reference(params: transformer.Params, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(forward_logits(params, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_greedy_is_the_argmax_of_the_full_forward_pass(params: transformer.Params, make_engine: MakeEngine) -> None:
    outs = generate(make_engine(), [request(prompt, temperature=0.0) for prompt in PROMPTS])
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.ids.tolist() == greedy_reference(params, prompt, 12)
        assert out.support == "full" and out.kept_ids is None
        logps = log_softmax(forward_logits(params, [*prompt, *out.ids])[len(prompt) - 1 : -1])
        np.testing.assert_allclose(out.logps, logps[np.arange(12), out.ids], atol=1e-4)


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logps_are_those_of_the_full_forward_pass(
    params: transformer.Params, make_engine: MakeEngine, top_p: float, with_adapter: bool
) -> None:
    adapter = random_adapter() if with_adapter else None
    temperatures = (0.7, 1.0, 1.3)
    requests = [request(PROMPTS[1], (3, i), temperature=t, top_p=top_p) for i, t in enumerate(temperatures)]
    for temperature, out in zip(temperatures, generate(make_engine(adapter=adapter), requests), strict=True):
        logits = forward_logits(params, [*PROMPTS[1], *out.ids], adapter)[len(PROMPTS[1]) - 1 : -1] / temperature
        if top_p < 1:
            assert out.support == "truncated" and out.kept_ids is not None
            for row, kept in zip(logits, out.kept_ids, strict=True):
                assert set(kept[kept >= 0].tolist()) == nucleus(row, top_p)
                row[[i for i in range(len(row)) if i not in kept]] = -np.inf
        np.testing.assert_allclose(out.logps, log_softmax(logits)[np.arange(12), out.ids], atol=1e-4)


def nucleus(logits: np.ndarray, top_p: float) -> set[int]:
    probs = np.exp(log_softmax(logits))
    order = np.argsort(-probs)
    return set(order[: int((np.cumsum(probs[order]) < top_p).sum()) + 1].tolist())


@pytest.mark.slow
def test_bf16_stays_close_to_f32(params: transformer.Params, make_engine: MakeEngine) -> None:
    out = generate(make_engine(precision="bf16"), [request(PROMPTS[1], (1, i)) for i in range(8)])
    logps = [log_softmax(forward_logits(params, [*PROMPTS[1], *one.ids])[len(PROMPTS[1]) - 1 : -1])[np.arange(12), one.ids] for one in out]
    difference = np.abs(np.concatenate(logps) - np.concatenate([one.logps for one in out]))
    assert 0 < difference.mean() < 0.05


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8])
def test_b067_greedy_ids_are_the_same_at_every_batch_size(params: transformer.Params, make_engine: MakeEngine, num_requests: int) -> None:
    outs = generate(make_engine(), [request(temperature=0.0)] * num_requests)
    assert [out.ids.tolist() for out in outs] == [greedy_reference(params, (5, 6, 7), 12)] * num_requests


def first_new(ids: list[int], start: int = 3) -> int:
    """The first place from `start` on whose id didn't occur before: what a stop id is tried on."""
    return next(i for i, token in enumerate(ids) if i >= start and token not in ids[:i])


def test_b053_b055_any_of_a_set_of_stop_ids_ends_and_nothing_comes_after(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = generate(engine, [request()])[0].ids.tolist()
    first = first_new(free)
    out = generate(engine, [request(stop_ids=(96, free[first], free[-1]))])[0]
    assert out.ids.tolist() == free[: first + 1] and out.stop is StopReason.STOP_ID
    # More stop ids than the usual program has room for.
    many = tuple(i for i in range(97) if i not in free[:first])
    assert generate(engine, [request(stop_ids=many)])[0].ids.tolist() == free[: first + 1]


def test_b053_a_stop_id_at_exactly_the_budget_is_a_stop_and_no_truncation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = generate(engine, [request()])[0].ids.tolist()
    first = first_new(free)
    stopped = request(max_tokens=first + 1, stop_ids=(free[first],))
    cut = request(max_tokens=first + 1, stop_ids=(next(i for i in range(97) if i not in free),))
    reasons = [(out.stop, len(out.ids)) for out in generate(engine, [stopped, cut])]
    assert reasons == [(StopReason.STOP_ID, first + 1), (StopReason.LENGTH, first + 1)]


def test_b073_one_token_and_stop_at_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one, whole = generate(engine, [request(temperature=0.0, max_tokens=1), request(temperature=0.0)])
    assert one.ids.tolist() == whole.ids[:1].tolist() and one.stop is StopReason.LENGTH and one.logps.shape == (1,)
    first = generate(engine, [request(temperature=0.0, stop_ids=(int(whole.ids[0]),))])[0]
    assert first.ids.tolist() == whole.ids[:1].tolist() and first.stop is StopReason.STOP_ID


def test_the_context_ends_a_completion_and_a_prompt_must_leave_room(make_engine: MakeEngine) -> None:
    engine = make_engine(context=32)
    fits, ends = generate(engine, [request(range(20), max_tokens=12), request(range(21), max_tokens=12)])
    assert (fits.stop, len(fits.ids)) == (StopReason.LENGTH, 12)
    assert (ends.stop, len(ends.ids)) == (StopReason.CONTEXT, 11)
    assert generate(engine, [request(range(31))])[0].stop is StopReason.CONTEXT
    for prompt in (range(32), ()):
        with pytest.raises(ValueError, match=rf"prompt of {len(prompt)} tokens .* context of 32"):
            generate(engine, [request(prompt)])


def test_a_stop_string_cuts_after_the_token_that_completes_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = generate(engine, [request()])[0]
    end = first_new(free.ids.tolist(), 5)
    stop = "".join(chr(33 + i) for i in free.ids[end - 1 : end + 1])
    for stop_strings in ((stop,), ("never", stop)):
        out = generate(engine, [request(stop_strings=stop_strings)])[0]
        assert out.stop is StopReason.STOP_STRING and out.ids.tolist() == free.ids[: end + 1].tolist()
        assert len(out.logps) == len(out.versions) == end + 1
    at_budget, both = generate(
        engine, [request(max_tokens=end + 1, stop_strings=(stop,)), request(stop_strings=(stop,), stop_ids=(int(free.ids[end]),))]
    )
    assert at_budget.stop is StopReason.STOP_STRING and both.stop is StopReason.STOP_ID


def test_one_program_serves_any_mix_of_parameters(make_engine: MakeEngine) -> None:
    engine = make_engine()
    mixed = [
        request((9, 8), temperature=0.0),
        request((9, 8), (1,)),
        request((9, 8), (2,), top_k=5),
        request((9, 8), (3,), min_p=0.1),
        request((9, 8), (4,), top_p=0.5, top_k=3),
        request((9, 8), (5,), temperature=0.5),
    ]
    together = generate(engine, mixed)
    for one, out in zip(mixed, together, strict=True):
        alone = generate(engine, [one])[0]
        np.testing.assert_array_equal(alone.ids, out.ids)
        np.testing.assert_array_equal(alone.logps, out.logps)
        assert (alone.kept_ids is None) == (not one.params.truncates)
    assert together[2].kept_ids is not None and together[2].kept_ids.shape == (12, 5)
    assert together[4].kept_ids is not None and together[4].kept_ids.shape[1] <= 3


def test_seeds_and_samples(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seeds = [(0, 1, 2, 3, 0), (0, 1, 2, 3, 0), (0, 1, 2, 4, 0), (0, 2, 2, 3, 0), (2**40, -1), (2**40, -2)]
    outs = [tuple(out.ids.tolist()) for out in generate(engine, [request(seed=seed, max_tokens=24) for seed in seeds])]
    assert outs[0] == outs[1]
    assert len(set(outs)) == 5


@pytest.mark.slow
def test_ids_and_logps_do_not_depend_on_batch_mates_or_arrival(make_engine: MakeEngine) -> None:
    """Bitwise in f32: alone, among others in either order, after others, in another slot, beside a request that truncates."""
    engine = make_engine()
    mates = [request(range(1, 2 + 5 * i), (8, i), max_tokens=3 + 7 * i, top_p=0.8 if i % 2 else 1.0) for i in range(11)]
    alone = {one: generate(engine, [one])[0] for one in mates}
    for batch in (mates, mates[::-1], mates[3:7] + mates[:3] + mates[7:]):
        for one, out in zip(batch, generate(engine, batch), strict=True):
            np.testing.assert_array_equal(alone[one].ids, out.ids)
            np.testing.assert_array_equal(alone[one].logps, out.logps)


def test_a_group_shares_its_prefill_and_still_samples_apart(make_engine: MakeEngine) -> None:
    engine = make_engine()
    group = [request((4, 5, 6), (1, i)) for i in range(8)]
    together = generate(engine, group)
    assert [out.ids.tolist() for out in together] == [generate(engine, [one])[0].ids.tolist() for one in group]
    assert len({tuple(out.ids.tolist()) for out in together}) == 8


def test_requests_made_together_are_prefilled_together(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an idle engine too, however long the caller takes to make them; and each gets what it gets alone, bit for bit."""
    prefills: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        prefills.append(int((args[2].places < args[1][0].keys.shape[1]).sum()))
        return prefill(*args, **options)

    monkeypatch.setattr(runner, "prefill", counted)
    engine = make_engine(slots=64, prefill_rows=64)
    requests = [request((1 + i, 2, 3), (i,), max_tokens=2) for i in range(64)]

    async def one(at: int) -> Completion:
        if at % 16 == 1:
            time.sleep(0.02)  # a caller who is slow
        return await engine.generate(requests[at])

    async def together() -> list[Completion]:
        return list(await asyncio.gather(*map(one, range(64))))

    outs = run(together())
    assert prefills == [64]
    for at in (0, 1, 40):
        (alone,) = generate(engine, [requests[at]])
        np.testing.assert_array_equal(alone.ids, outs[at].ids)
        np.testing.assert_array_equal(alone.logps, outs[at].logps)


def test_more_requests_than_slots_are_all_answered(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [Request((1 + i % 5, 2), SamplingParams(1 + i % 9), (i,)) for i in range(30)]
    assert [len(out.ids) for out in generate(engine, requests)] == [1 + i % 9 for i in range(30)]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.slots) == (0, 0, 8)
    assert stats.tokens == sum(1 + i % 9 for i in range(30))


def test_the_cache_follows_the_tokens_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine(context=256)
    page = 2 * 2 * 2 * 64 * 8 * 4  # keys and values, layers, kv heads, positions, head_dim, bytes
    pages = []
    for count, max_tokens in ((8, 60), (1, 240), (8, 130), (8, 200), (8, 60)):
        outs = generate(engine, [request(max_tokens=max_tokens)] * count)
        assert [len(out.ids) for out in outs] == [max_tokens] * count
        pages.append(engine.stats().kv_bytes // page)
    assert pages == [n + 1 for n in (16, 16, 24, 32, 16)], "the pool, and the prompt's page, which is kept"


def test_windows_and_caps_are_those_of_the_full_forward_pass(make_engine: MakeEngine) -> None:
    """Every other layer sees 70 positions, over borders of pages; scores are capped."""
    config = dataclasses.replace(CONFIG, layer_kinds=(LayerKind(window=70), LayerKind()), attention_cap=5.0)
    weights, prompt = random_params(config), tuple(range(90)) * 2
    (out,) = generate(make_engine(weights, config, context=256), [request(prompt, max_tokens=12)])
    logits = forward_logits(weights, [*prompt, *out.ids], config=config, length=256)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(out.logps, log_softmax(logits)[np.arange(12), out.ids], atol=1e-4)
