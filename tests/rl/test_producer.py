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
from burnish.config.schema import TrainingConfig
from burnish.data.source import DataError, from_rows
from burnish.data.stream import PromptStream
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl.algorithms import from_config
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.handoff import Handoff, VersionGate
from burnish.rl.producer import Chunk, Producer, RolloutFailed
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
    ) -> None:
        record = from_config(GRPOConfig(**{"num_generations": 2, **(algorithm or {})}))
        plan = BatchPlan.from_config(TrainingConfig(**{"batch_size": 24, **(training or {})}), record)
        data = source or from_rows([{"prompt": f"{i}+1"} for i in range(rows)], name="rows")
        self.engine = ScriptedEngine(reply, latency_s=latency_s, version=3)
        context = EpisodeContext(self.engine, codec.template, codec.tokenizer.decode, context=40, max_prompt_tokens=20)
        orchestrator = RolloutOrchestrator(
            context,
            RewardManager([RewardSpec.of(reward)]),
            make_agent=ModelAgent,
            make_env=lambda prompt: TaskEnvironment({**prompt.meta, "prompt": list(prompt.messages)}),
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
            rows_multiple=1,
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
    """24 prompts, mini-batches of 12, micro-batches of 4, 2 iterations: 12 chunks, groups with the first iteration only."""
    with Line(codec, training={"mini_batch_size": 12, "train_micro_batch_size": 4}, algorithm={"num_iterations": 2}) as line:
        got = list(line.chunks())
    expected = [((0, mini, micro), iteration) for mini in range(2) for iteration in range(2) for micro in range(3)]
    assert [(chunk.key, chunk.iteration) for chunk in got] == expected
    assert [len(chunk.groups) for chunk in got] == [4, 4, 4, 0, 0, 0] * 2
    assert [group.id for chunk in got for group in chunk.groups] == [(0, i) for i in range(24)]
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
