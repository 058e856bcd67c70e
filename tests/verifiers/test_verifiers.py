"""An environment of the package verifiers, unchanged, is played through the endpoint of a run and trained. `make test-verifiers`."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish import GRPOConfig, GRPOLearner, RLCluster, RolloutConfig, TrainingConfig
from burnish.agentic.agents import ModelAgent
from burnish.agentic.calls import Calls
from burnish.agentic.programs import ProgramEnvironment
from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
from burnish.agentic.verifiers import create_dataset, play
from burnish.agentic.workers import WorkerPool
from burnish.config.schema import EpisodeLimits
from burnish.rollout.scripted import ScriptedEngine
from burnish.testing.byte_tokenizer import make_byte_tokenizer
from burnish.testing.tiny import write_tiny_model
from burnish.text.codec import Codec
from burnish.types import Completion, Group, Request, SamplingParams, Status, Trajectory

pytestmark = [pytest.mark.verifiers, pytest.mark.filterwarnings("ignore")]  # its own

END = 2
CALL = 'I add. <tool_call>\n{"name": "sums_add", "arguments": {"a": 3, "b": 3}}\n</tool_call>'
LIMITS = EpisodeLimits(step_timeout_s=300.0)  # its harness fetches its packages at the first


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # its tools are processes of its own


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    found = WorkerPool(1)
    yield found
    found.close()


def environment(*, with_tool: bool) -> dict[str, Any]:
    return {
        "taskset": {"id": "sums-task", "task": {"with_tool": with_tool}},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }


def test_an_episode_is_what_was_sampled_and_earns_what_verifiers_rewards(tmp_path: Path, pool: WorkerPool) -> None:
    make_byte_tokenizer(tmp_path)
    codec, kept = Codec.load(tmp_path), list[tuple[Request, Completion]]()

    class Keeping(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            out = await super().generate(request)
            kept.append((request, out))
            return out

    def reply(request: Request) -> list[int]:
        return [*codec.tokenizer.encode((CALL, "6")[request.seed_path[-1]]), END]

    engine = Keeping(reply, decode_text=codec.tokenizer.decode, version=4)
    decode = codec.tokenizer.decode
    context = EpisodeContext(engine, codec.template, decode, 4000, max_prompt_tokens=3000, limits=LIMITS, calls=Calls(pool))
    collector = TrajectoryCollectEngine(context, params=SamplingParams(300, stop_ids=(END,)), seed_path=(0,))
    (row,) = create_dataset(environment(with_tool=True), 1, first=3)
    got = asyncio.run(collector.collect(ModelAgent(), ProgramEnvironment(row, program=play), group=(0, 0), sample=0))
    assert (got.status, len(got.steps), list(got.forks)) == (Status.OK, 2, []), (got.error, got.traceback)
    assert got.steps[-1].reward == 1.25
    assert [message["role"] for message in got.messages] == ["user", "assistant", "tool", "assistant"]
    assert got.messages[2]["content"] == "6"
    assert got.ids[got.sampled].tolist() == [index for _, out in kept for index in out.ids.tolist()]
    for request, out in kept:
        start = len(request.prompt_ids)
        assert got.ids[:start].tolist() == list(request.prompt_ids) and got.ids[start : start + len(out.ids)].tolist() == out.ids.tolist()


def test_a_failed_episode_is_an_error_in_verifiers_words(tmp_path: Path, pool: WorkerPool) -> None:
    make_byte_tokenizer(tmp_path)
    codec = Codec.load(tmp_path)
    engine = ScriptedEngine(lambda request: [END])
    context = EpisodeContext(engine, codec.template, codec.tokenizer.decode, 4000, max_prompt_tokens=3000, limits=LIMITS, calls=Calls(pool))
    collector = TrajectoryCollectEngine(context, params=SamplingParams(300, stop_ids=(END,)), seed_path=(0,))
    (row,) = create_dataset({"taskset": {"id": "no-such-taskset"}}, 1)
    got = asyncio.run(collector.collect(ModelAgent(), ProgramEnvironment(row, program=play), group=(0, 0), sample=0))
    assert got.status is Status.ENV_ERROR and "no-such-taskset" in (got.error or "")


class Keep:
    """A sink that keeps the episodes."""

    def __init__(self) -> None:
        self.steps: list[list[Trajectory]] = []

    def step(self, report: Any) -> None:
        groups: list[Group] = report.groups
        self.steps.append([episode for group in groups for episode in group.trajectories])

    def evaluation(self, report: Any) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


def test_it_trains(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, alphabet="0123456789+")
    rollout = RolloutConfig(slots=8, prefill_rows=4, decode_chunk=2, max_prompt_tokens=64, sampling={"max_tokens": 2})  # type: ignore[arg-type]
    training = TrainingConfig(max_steps=2, batch_size=2, optimizer={"learning_rate": 1e-2})  # type: ignore[arg-type]
    cluster, sink = RLCluster(tmp_path, precision="f32", training=training, rollout=rollout), Keep()
    learner = GRPOLearner(
        cluster,
        GRPOConfig(num_generations=4),
        env_class=ProgramEnvironment,
        env_kwargs={"program": play},
        limits=EpisodeLimits(step_timeout_s=300.0, max_concurrency=2),
        train_ds=create_dataset(environment(with_tool=False), 5),
        sinks=[sink],
    )
    history = learner.train().history
    assert len(history) == 2 and max(step["mismatch/max"] for step in history) < 1e-4
    for version, episodes in enumerate(sink.steps):
        assert len(episodes) == 8 and {episode.status for episode in episodes} <= {Status.OK, Status.TRUNCATED}
        assert {at for episode in episodes for at in episode.versions[episode.sampled].tolist()} == {version}
        assert all(episode.reward is not None for episode in episodes)
