"""Many episodes: identity and order are of the draws, never of who finished first; one failure of the engine ends everything."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest

from burnish.agentic.agents import ModelAgent
from burnish.agentic.environments import BaseTaskEnv, TaskEnvironment
from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import Group, Message, Prompt, Request, SamplingParams
from tests.agentic.episodes import END, Talk, context

PARAMS = SamplingParams(20, stop_ids=(END,))


def draws(count: int, samples: int, *, step: int = 5, seed: int = 11) -> list[Draw]:
    prompts = [Prompt(f"p:{i}", ({"role": "user", "content": f"question {i}"},), {"answer": str(i)}) for i in range(count)]
    return [Draw((step, i), prompt, (PARAMS,) * samples, (seed, step, i)) for i, prompt in enumerate(prompts)]


def orchestrator(
    engine: ScriptedEngine, codec: Codec, *, make_env: Any = None, reward: Any = None, max_concurrency: int = 100
) -> RolloutOrchestrator:
    def numbered(completions: Sequence[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    def task(prompt: Prompt) -> BaseTaskEnv:
        return TaskEnvironment({**prompt.meta, "prompt": list(prompt.messages)})

    return RolloutOrchestrator(
        context(engine, codec),
        RewardManager([RewardSpec.of(reward or numbered)]),
        make_agent=ModelAgent,
        make_env=make_env or task,
        max_concurrency=max_concurrency,
    )


async def everything(of: RolloutOrchestrator, what: list[Draw]) -> list[Group]:
    return [group async for group in of.groups(what)]


def test_groups_come_in_drawn_order_whatever_finished_first(codec: Codec) -> None:
    """The first draws take longest, and their samples finish in reverse."""

    def latency(request: Request) -> float:
        return 0.05 * (4 - request.seed_path[2]) + 0.01 * (3 - request.seed_path[3])

    engine = ScriptedEngine(lambda request: [*codec.tokenizer.encode("x" * (request.seed_path[3] + 1)), END], latency_s=latency)
    groups = asyncio.run(everything(orchestrator(engine, codec), draws(4, 3)))
    assert [group.id for group in groups] == [(5, 0), (5, 1), (5, 2), (5, 3)]
    assert [[(t.group, t.sample) for t in group.trajectories] for group in groups] == [[((5, i), s) for s in range(3)] for i in range(4)]
    assert [[t.reward for t in group.trajectories] for group in groups] == [[1.0, 2.0, 3.0]] * 4
    assert [group.trajectories[0].messages[0]["content"] for group in groups] == [f"question {i}" for i in range(4)]


def test_noise_is_a_function_of_seed_step_draw_sample_and_turn(codec: Codec) -> None:
    seen: set[tuple[int, ...]] = set()

    def reply(request: Request) -> list[int]:
        seen.add(request.seed_path)
        return [7, END]

    asyncio.run(everything(orchestrator(ScriptedEngine(reply), codec), draws(2, 3)))
    assert seen == {(11, 5, draw, sample, 0) for draw in range(2) for sample in range(3)}


def test_at_most_so_many_episodes_play_at_once(codec: Codec) -> None:
    open_now, most = 0, 0

    class Counted(Talk):
        def _initial_observation(self) -> str:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            return "hi"

        def close(self) -> None:
            nonlocal open_now
            open_now -= 1

    engine = ScriptedEngine(lambda request: [7, END], latency_s=lambda request: 0.01)
    asyncio.run(everything(orchestrator(engine, codec, make_env=lambda prompt: Counted(), max_concurrency=3), draws(4, 4)))
    assert (most, open_now) == (3, 0)


def test_a_failing_engine_ends_everything_and_closes_every_environment(codec: Codec) -> None:
    opened: list[Talk] = []

    def make_env(prompt: Prompt) -> Talk:
        opened.append(Talk())
        return opened[-1]

    def reply(request: Request) -> list[int]:
        if request.seed_path[2] == 1:
            raise OSError("the accelerator is gone")
        return [7, END]

    engine = ScriptedEngine(reply, latency_s=lambda request: 20.0 if request.seed_path[2] > 1 else 0.01)
    with pytest.raises(OSError, match="accelerator is gone"):
        asyncio.run(everything(orchestrator(engine, codec, make_env=make_env), draws(4, 2)))
    assert len(opened) == 8 and all(env.closed == 1 for env in opened)


def test_an_environment_that_raises_costs_its_episode_only(codec: Codec) -> None:
    """R22: the others of its group go on and are graded; the failed one has no reward."""
    count = iter(range(100))

    def fault() -> None:
        if next(count) == 0:
            raise ValueError("no board")

    engine = ScriptedEngine(lambda request: [7, END])
    groups = asyncio.run(everything(orchestrator(engine, codec, make_env=lambda prompt: Talk(faults={"step": fault})), draws(1, 4)))
    found = [(str(t.status), t.reward is None) for t in groups[0].trajectories]
    assert sorted(found) == [("env_error", True), ("ok", False), ("ok", False), ("ok", False)]


def test_whoever_stops_listening_cancels_the_rest(codec: Codec) -> None:
    opened: list[Talk] = []

    def make_env(prompt: Prompt) -> Talk:
        opened.append(Talk())
        return opened[-1]

    engine = ScriptedEngine(lambda request: [7, END], latency_s=lambda request: 0.0 if request.seed_path[2] == 0 else 20.0)

    async def first_only() -> Group:
        groups = orchestrator(engine, codec, make_env=make_env).groups(draws(3, 2))
        first = await anext(groups)
        await groups.aclose()  # type: ignore[attr-defined]
        return first

    assert asyncio.run(first_only()).id == (5, 0)
    assert len(opened) == 6 and all(env.closed == 1 for env in opened)


def test_rewards_see_the_task_and_each_episode(codec: Codec) -> None:
    def graded(completions: Sequence[str], answer: Sequence[str], conversations: Sequence[list[Message]]) -> list[float]:
        assert [len(conversation) for conversation in conversations] == [2, 2]
        return [float(answer[0]) for _ in completions]

    groups = asyncio.run(everything(orchestrator(ScriptedEngine(lambda request: [7, END]), codec, reward=graded), draws(3, 2)))
    assert [[t.reward for t in group.trajectories] for group in groups] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_an_environment_of_many_steps_needs_no_jax() -> None:
    """An author's tests start in milliseconds, and an environment's process can never grab an accelerator."""
    program = """
    import asyncio, sys, tempfile
    from burnish.agentic.agents import ModelAgent
    from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
    from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
    from burnish.rollout.scripted import ScriptedEngine
    from burnish.text.chat import Rendering
    from burnish.types import SamplingParams

    class Words:
        takes_tools = False
        def start(self, messages, *, tools=None):
            return Rendering("", [i for m in messages for i in (1, *map(ord, m["content"]), 2)] + [1])
        def follow(self, begun, reply, messages, *, tools=None, ended):
            return Rendering("", [1, *map(ord, messages[-1]["content"]), 2, 1])

    class MyEnv(BaseTaskEnv):
        def _initial_observation(self):
            return f"count to {self.task['n']}"
        def _step_impl(self, action):
            done = self.num_steps == self.task["n"]
            return EnvStepResult("more", float(action.text == str(self.num_steps)), done)

    engine = ScriptedEngine(lambda request: [ord(str(request.seed_path[-1] + 1)), 2])
    context = EpisodeContext(engine, Words(), lambda ids: "".join(chr(i) for i in ids if i > 2), context=200, max_prompt_tokens=100)
    collector = TrajectoryCollectEngine(context, params=SamplingParams(5, stop_ids=(2,)), seed_path=(0,))
    got = asyncio.run(collector.collect(ModelAgent(), MyEnv({"n": 3}, max_steps=5), group=(0, 0), sample=0))
    assert [s.reward for s in got.steps] == [1.0, 1.0, 1.0], got
    assert got.status == "ok"
    assert "jax" not in sys.modules, "jax was imported"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
