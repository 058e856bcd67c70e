"""From prompts to chunks, without a model: what arrives, in which order, and how the thread ends."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from burnish.agentic.agents import ModelAgent
from burnish.agentic.environments import TaskEnvironment
from burnish.agentic.orchestrator import RolloutOrchestrator
from burnish.agentic.trajectory import EpisodeContext
from burnish.config.algorithms import GRPOConfig
from burnish.config.schema import RolloutConfig, SamplingConfig, TrainingConfig
from burnish.data.source import DataError, from_rows
from burnish.data.stream import PromptStream
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl.algorithms import from_config
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.handoff import Handoff, VersionGate
from burnish.rl.producer import Chunk, Producer, RolloutFailed, TooFewGroups
from burnish.rollout.scripted import ScriptedEngine
from burnish.testing.byte_tokenizer import make_tiny_tokenizer
from burnish.text.codec import Codec
from burnish.types import Request, SamplingParams

PARAMS = SamplingParams(4, stop_ids=(1,))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.load(make_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def say_by_identity(request: Request) -> list[int]:
    """One to three ids, a function of the seed path only."""
    rng = np.random.default_rng(request.seed_path)
    return [*rng.integers(7, 20, size=rng.integers(1, 4)).tolist(), 1]


def lengths(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Line:
    """A producer with both ends of its handoff, on a scripted engine."""

    def __init__(
        self,
        codec: Codec,
        *,
        rows: int = 24,
        epochs: int | None = None,
        steps: int = 1,
        training: dict[str, Any] | None = None,
        algorithm: dict[str, Any] | None = None,
        reward: Callable[..., Any] = lengths,
        latency_s: Callable[[Request], float] = lambda request: 0.0,
        reply: Callable[[Request], Sequence[int]] = say_by_identity,
        source: Any = None,
        rows_multiple: int = 1,
        env_class: Callable[[dict[str, Any]], TaskEnvironment] = TaskEnvironment,
    ) -> None:
        record = from_config(GRPOConfig(**{"num_generations": 2, **(algorithm or {})}))
        limits = RolloutConfig(max_prompt_tokens=20, sampling=SamplingConfig(max_tokens=20))
        plan = BatchPlan.from_config(TrainingConfig(**{"batch_size": 24, **(training or {})}), record, limits)
        data = source or from_rows([{"prompt": f"{i}+1"} for i in range(rows)], name="rows")
        self.engine = ScriptedEngine(reply, latency_s=latency_s, version=3)
        context = EpisodeContext(self.engine, codec.template, codec.tokenizer.decode, context=40, max_prompt_tokens=20)
        orchestrator = RolloutOrchestrator(
            context,
            RewardManager([RewardSpec.of(reward)]),
            make_agent=ModelAgent,
            make_env=lambda prompt: env_class({**prompt.meta, "prompt": list(prompt.messages)}),
            max_concurrency=1000,
        )
        self.handoff: Handoff[Chunk] = Handoff(plan.queue_size)
        self.gate = VersionGate()
        self.stream = PromptStream([data], seed=5, epochs=epochs)
        self.producer = Producer(
            stream=self.stream,
            orchestrator=orchestrator,
            algorithm=record,
            plan=plan,
            params=PARAMS,
            handoff=self.handoff,
            gate=self.gate,
            seed=5,
            steps=range(steps),
            rows_multiple=rows_multiple,
            pairs_per_token=1000.0,
        )

    def __enter__(self) -> "Line":
        self.producer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.stop()
        self.producer.join(5)
        assert not self.producer.is_alive(), "the producer didn't leave within 5 s"

    def chunks(self) -> Iterator[Chunk]:
        while (chunk := self.handoff.get()) is not None:
            yield chunk


def test_b045_each_micro_batch_comes_once_an_iteration(codec: Codec) -> None:
    """24 prompts, mini-batches of 12, micro-batches of 4, 2 iterations: 12 chunks, what is counted once with the first only."""
    with Line(codec, training={"mini_batch_size": 12, "train_micro_batch_size": 4}, algorithm={"num_iterations": 2}) as line:
        got = list(line.chunks())
    expected = [((0, mini, micro), iteration) for mini in range(2) for iteration in range(2) for micro in range(3)]
    assert [(chunk.key, chunk.iteration) for chunk in got] == expected
    assert {chunk.count for chunk in got} == {3} and {len(chunk.groups) for chunk in got} == {4}
    assert [len(chunk.sampled) for chunk in got] == [12, 0, 0, 0, 0, 0] * 2
    assert [group.id for chunk in got for group in chunk.sampled] == [(0, i) for i in range(24)]
    assert [chunk.rollout_seconds > 0 for chunk in got] == [True, False, False, False, False, False] * 2
    assert all(not chunk.counts for chunk in got), "what isn't measured is absent"
    assert got[0].batch is got[3].batch, "the second iteration sees the very same batch"
    assert all(chunk.batch.num_prompts == 4 and chunk.batch.num_sequences == 8 for chunk in got)


def test_batches_are_bitwise_the_same_whatever_finished_first(codec: Codec) -> None:
    def late_and_early(factor: float) -> Callable[[Request], float]:
        return lambda request: 0.02 * abs((request.seed_path[2] * 7 + request.seed_path[3]) % 5 - factor)

    async def slow_for_some(completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        await asyncio.sleep(0.03 * (len(completions[0]) % 3))
        return lengths(completions)

    runs = []
    for latency, reward in ((late_and_early(0), lengths), (late_and_early(4), slow_for_some)):
        with Line(codec, training={"train_micro_batch_size": 8}, latency_s=latency, reward=reward) as line:
            runs.append([chunk.batch for chunk in line.chunks()])
    assert len(runs[0]) == 3
    for left, right in zip(*runs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, left, right)
    assert any(batch.advantages.any() for batch in runs[0])


def test_data_that_ends_is_a_clean_end(codec: Codec) -> None:
    """60 rows in batches of 24: two steps; what doesn't fill a batch is left."""
    with Line(codec, rows=60, epochs=1, steps=100) as line:
        steps = []
        for chunk in line.chunks():
            steps.append(chunk.key[0])
            line.gate.publish(chunk.key[0] + 1)
    assert steps == [0, 1]


def test_a_step_waits_for_its_weights(codec: Codec) -> None:
    with Line(codec, steps=3) as line:
        assert line.handoff.get() is not None
        time.sleep(0.1)
        drawn = line.engine.stats().tokens
        time.sleep(0.2)
        assert line.engine.stats().tokens == drawn, "the next step began before its weights were published"
        line.gate.publish(1)
        chunk = line.handoff.get()
        assert chunk is not None and chunk.key[0] == 1


def test_a_source_that_raises_is_raised_where_batches_are_taken(codec: Codec) -> None:
    """R36: the cause itself, with the frames of the producer's thread."""

    def rows() -> Iterator[dict[str, str]]:
        for i in range(30):
            if i == 26:
                raise OSError("disk full at row 26")
            yield {"prompt": f"{i}"}

    with Line(codec, source=from_rows(rows(), name="feed"), steps=5, epochs=1) as line:
        assert line.handoff.get() is not None
        line.gate.publish(1)
        with pytest.raises(DataError, match="feed: row 26 could not be read: OSError: disk full") as caught:
            line.handoff.get()
    assert "_steps_in_turn" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_reward_that_raises_in_the_first_batch_stops_the_run_with_its_text(codec: Codec, kind: str) -> None:
    def broken(completions: Sequence[str]) -> list[float]:
        raise ZeroDivisionError("no tests were run")

    async def broken_too(completions: Sequence[str]) -> list[float]:
        raise ZeroDivisionError("no tests were run")

    with Line(codec, reward=broken if kind == "plain" else broken_too) as line:
        with pytest.raises(
            RolloutFailed, match="all 48 episodes of the first batch failed.*grader_error.*ZeroDivisionError: no tests were run"
        ):
            line.handoff.get()


class AlwaysRaises(TaskEnvironment):
    async def _initial_observation(self) -> Any:
        raise KeyError("no board")


def test_r24_an_environment_that_always_raises_stops_the_run_in_its_first_batch_with_the_traceback(codec: Codec) -> None:
    with Line(codec, steps=5, env_class=AlwaysRaises) as line:
        with pytest.raises(RolloutFailed, match=r"(?s)all 48 episodes of the first batch failed.*env_error.*KeyError: 'no board'") as found:
            line.handoff.get()
    assert 'raise KeyError("no board")' in str(found.value) and "in _initial_observation" in str(found.value)


def test_rewards_that_are_all_missing_stop_the_run(codec: Codec) -> None:
    with Line(codec, reward=lambda completions: [None for _ in completions]) as line:
        with pytest.raises(RolloutFailed, match="none of the 48 episodes of the first batch has a reward"):
            line.handoff.get()


def test_a_failure_of_the_engine_ends_the_stream(codec: Codec) -> None:
    with Line(codec, reply=lambda request: []) as line:
        with pytest.raises(ValueError, match="empty reply"):
            line.handoff.get()


def test_a_cancellation_that_nobody_asked_for_is_no_clean_end(codec: Codec) -> None:
    """It would look like the end of the data: a run of 0 steps, complete."""

    def cancelled(request: Request) -> Sequence[int]:
        raise asyncio.CancelledError("by a client's pool")

    with Line(codec, reply=cancelled) as line:
        with pytest.raises(asyncio.CancelledError):
            line.handoff.get()


def test_rollout_seconds_leave_out_the_wait_for_the_trainer(codec: Codec) -> None:
    with Line(codec, training={"mini_batch_size": 6}) as line:
        first = line.handoff.get()
        time.sleep(0.6)
        rest = list(line.chunks())
    assert first is not None and len(rest) == 3
    assert sum(chunk.rollout_seconds for chunk in rest) < 0.3


def test_stopping_cancels_what_hangs(codec: Codec) -> None:
    """Ctrl-C during a rollout: a reward that never returns, plain or async, doesn't hold the run."""
    never = threading.Event()

    async def hangs(completions: Sequence[str]) -> list[float]:
        await asyncio.sleep(1000)
        return []

    def hangs_too(completions: Sequence[str]) -> list[float]:
        never.wait(1000)
        return []

    for reward in (hangs, hangs_too):
        start = time.monotonic()
        with Line(codec, reward=reward):
            time.sleep(0.3)
        assert time.monotonic() - start < 5
    never.set()


def test_stopping_before_the_start_of_the_loop_and_after_its_end_is_fine(codec: Codec) -> None:
    with Line(codec) as line:
        line.producer.stop()
        line.producer.join(5)
        line.producer.stop()


# ------------------------------------------------------------------------------------------------------------- tokens_per_device


def mini_batches(line: Line) -> list[list[Chunk]]:
    """All that is handed on, taken as the trainer does: by the first chunk's count."""
    found = []
    while (first := line.handoff.get()) is not None:
        chunks = [first, *(line.handoff.get() for _ in range(first.count - 1))]
        assert [chunk.key[2] for chunk in chunks] == list(range(first.count))
        found.append(chunks)
    return found


def scored_ids(chunks: Sequence[Chunk]) -> dict[tuple[Any, ...], int]:
    """How often each scored id appears, by (group, sample, id, advantage)."""
    seen: dict[tuple[Any, ...], int] = {}
    for chunk in chunks:
        episodes = [t for group in chunk.groups for t in group.trajectories]
        for row, place in zip(*np.nonzero(chunk.batch.mask), strict=True):
            episode = episodes[chunk.batch.sequences[row, place]]
            key = (episode.group, episode.sample, int(chunk.batch.target_ids[row, place]), float(chunk.batch.advantages[row, place]))
            seen[key] = seen.get(key, 0) + 1
    return seen


@pytest.mark.parametrize("rows_multiple", [1, 4])
def test_micro_batches_follow_from_the_tokens_that_a_device_holds(codec: Codec, rows_multiple: int) -> None:
    """More chunks than the queue holds, twice over; one shape, and together what the whole mini-batch is."""
    with Line(codec, training={"mini_batch_size": 12}, algorithm={"num_generations": 16}) as line:
        whole = mini_batches(line)
    with Line(
        codec,
        training={"mini_batch_size": 12, "tokens_per_device": 40},
        algorithm={"num_generations": 16, "num_iterations": 2},
        rows_multiple=rows_multiple,
    ) as line:
        time.sleep(0.2)
        got = mini_batches(line)
    assert [len(g) for g in whole] == [1, 1] and len(got) == 4
    assert all(len({jax.tree.structure(c.batch) for c in chunks}) == 1 for chunks in got)
    assert {chunk.batch.tokens.shape for chunks in got for chunk in chunks} == {(rows_multiple, 40)}
    if rows_multiple == 1:
        assert got[0][0].count + got[1][0].count > 2 * 12 + 1, "nothing waited for room"
    for first, second, all_at_once in zip(got[::2], got[1::2], whole, strict=True):
        assert [a.batch is b.batch for a, b in zip(first, second, strict=True)] == [True] * len(first)
        assert scored_ids(first) == scored_ids(all_at_once)
        assert [len(chunk.sampled) for chunk in (*first, *second)] == [12] + [0] * (2 * len(first) - 1)


def test_micro_batches_by_tokens_are_bitwise_the_same_whatever_finished_first(codec: Codec) -> None:
    runs = []
    for slow in (0, 3):
        with Line(
            codec,
            training={"tokens_per_device": 64},
            algorithm={"num_generations": 4},
            latency_s=lambda request, slow=slow: 0.03 * (request.seed_path[2] % 4 == slow),
        ) as line:
            runs.append([chunk.batch for chunk in line.chunks()])
    assert len(runs[0]) > 1
    for left, right in zip(*runs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, left, right)


# ------------------------------------------------------------------------------------------------------------------- zero signal


def tied_unless(has_signal: Callable[[int], bool]) -> Callable[[Request], Sequence[int]]:
    """Completions whose lengths, which are their rewards, differ inside the groups of some draws and are equal in the others."""
    return lambda request: [7] * (1 + (request.seed_path[3] % 2 if has_signal(request.seed_path[2]) else 0)) + [1]


def resampling(codec: Codec, has_signal: Callable[[int], bool], *, batch_size: int = 4, **options: Any) -> Line:
    training = {"batch_size": batch_size, **options.pop("training", {})}
    algorithm = {"zero_signal": "resample", **options.pop("algorithm", {})}
    return Line(codec, training=training, algorithm=algorithm, reply=tied_unless(has_signal), **options)


def test_groups_that_tie_are_replaced_by_further_draws_B011(codec: Codec) -> None:
    """Every other group ties: 4 with a signal in at most 3 rounds, the first 4 in drawn order, all that were sampled still counted."""
    for parity in (0, 1):
        with resampling(codec, lambda draw, parity=parity: draw % 2 == parity) as line:
            chunk, *rest = line.chunks()
        assert not rest
        assert [group.id for group in chunk.groups] == [(0, parity + 2 * i) for i in range(4)]
        assert [group.id for group in chunk.sampled] == [(0, i) for i in range(8)]
        assert chunk.counts == {"group/resampled": 4, "group/dropped": 4, "group/surplus": 0, "group/missing": 0}
        assert set(scored_ids([chunk])) and all(advantage for *_, advantage in scored_ids([chunk]))


def test_rewards_that_never_differ_end_the_run_after_the_rounds_that_were_allowed_B011(codec: Codec) -> None:
    with resampling(codec, lambda draw: False) as line:
        with pytest.raises(TooFewGroups, match="step 1: 0 of 12 groups kept after 3 rounds; it needs 4, and all rewards"):
            line.handoff.get()


def test_a_short_step_is_spread_over_its_mini_batches_and_says_what_is_missing_B011(codec: Codec) -> None:
    """3 of 12 groups have a signal; two mini-batches of 4 were planned: 1 and 2, with the shape of full ones."""
    options = {"batch_size": 8, "training": {"mini_batch_size": 4}, "algorithm": {"on_shortage": "train_short", "max_resample_rounds": 1}}
    with resampling(codec, lambda draw: draw in (1, 4, 6), **options) as line:
        first, second = line.chunks()
    assert [[group.id[1] for group in chunk.groups] for chunk in (first, second)] == [[1], [4, 6]]
    assert (len(first.sampled), len(second.sampled)) == (8, 0)
    assert first.counts == {"group/resampled": 0, "group/dropped": 5, "group/surplus": 0, "group/missing": 5}
    assert first.batch.tokens.shape == second.batch.tokens.shape == (4, 64)
    assert (first.batch.num_sequences, first.batch.num_prompts) == (second.batch.num_sequences, second.batch.num_prompts) == (8, 4)


def test_a_short_step_without_any_group_is_padding(codec: Codec) -> None:
    for training in ({}, {"tokens_per_device": 40}):
        with resampling(codec, lambda draw: False, training=training, algorithm={"on_shortage": "train_short"}) as line:
            (chunk,) = line.chunks()
        assert not chunk.batch.mask.any() and chunk.counts["group/missing"] == 4 and len(chunk.sampled) == 12


def test_a_later_round_asks_for_what_is_likely_to_be_enough(codec: Codec) -> None:
    """7 of 8 kept, 1 missing: 2 · 1 · 8 / 7, so 3 more; the surplus is left, and the next step begins with fresh draws."""
    with resampling(codec, lambda draw: draw != 2, batch_size=8, steps=2) as line:
        first = line.handoff.get()
        line.gate.publish(1)
        second = line.handoff.get()
    assert first is not None and second is not None
    assert first.counts == {"group/resampled": 3, "group/dropped": 1, "group/surplus": 2, "group/missing": 0}
    assert [group.id for group in first.groups] == [(0, i) for i in (0, 1, 3, 4, 5, 6, 7, 8)]
    assert [group.id for group in second.sampled][:2] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("on_shortage", "steps"), [("error", 1), ("train_short", 2)])
def test_data_that_ends_while_resampling_ends_the_run(codec: Codec, on_shortage: str, steps: int) -> None:
    """14 rows: a step of 7, then 7 of which 2 are kept; that step is made only where a short one may be."""

    def reply(request: Request) -> Sequence[int]:
        step, draw, sample = request.seed_path[1:4]
        return [7] * (1 + (sample % 2 if draw < 2 or (step == 0 and draw % 2) else 0)) + [1]

    with Line(
        codec,
        rows=14,
        epochs=1,
        steps=10,
        training={"batch_size": 4},
        algorithm={"zero_signal": "resample", "on_shortage": on_shortage},
        reply=reply,
    ) as line:
        found = []
        for chunk in line.chunks():
            found.append(chunk)
            line.gate.publish(len(found))
    assert len(found) == steps
    assert steps == 1 or found[1].counts == {"group/resampled": 3, "group/dropped": 5, "group/surplus": 0, "group/missing": 2}


def test_dropped_groups_leave_the_loss_and_are_still_counted(codec: Codec) -> None:
    signal, drop = tied_unless(lambda draw: draw % 3 == 0), {"zero_signal": "drop"}
    for algorithm, carry in (({}, range(6)), (drop, (0, 3)), (drop | {"beta": 0.1, "kl_in": "reward"}, (0, 3))):
        with Line(codec, training={"batch_size": 6}, algorithm=algorithm, reply=signal) as line:
            (chunk,) = line.chunks()
        assert {draw for (_, draw), *_ in scored_ids([chunk])} == set(carry)
        assert len(chunk.sampled) == 6
        assert chunk.counts == ({"group/dropped": 4} if algorithm else {})
        assert chunk.batch.tokens.shape == (6, 64), "the shape is that of a batch in which nothing was dropped"
