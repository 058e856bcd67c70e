"""Games of several players: each sample a seat, each seat a trajectory, rewards when the game closes."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from burnish.agentic import textarena
from burnish.agentic.agents import ModelAgent
from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.agentic.textarena import TextArena, random_move
from burnish.rewards.manager import RewardManager
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import Group, Prompt, Request, SamplingParams, Status
from tests.agentic.episodes import END, context

pytest.importorskip("textarena")
WINS = {0: ["[0]", "[1]", "[2]"], 1: ["[3]", "[4]", "[5]"]}
"""Player 0 has the upper row after its third move."""


def played(
    codec: Codec, said: Callable[[Request], str], *, samples: int, limits: Mapping[str, Any] = {}, slots: int = 100, **options: Any
) -> Group:
    engine = ScriptedEngine(lambda request: [*codec.tokenizer.encode(said(request)), END], decode_text=codec.tokenizer.decode)
    orchestrator = RolloutOrchestrator(
        context(engine, codec, context=8000, max_prompt_tokens=4000, limits={"step_timeout_s": 20.0, **limits}),
        RewardManager([]),
        make_agent=ModelAgent,
        make_env=lambda prompt: TextArena(prompt.meta, env_id="TicTacToe-v0", **options),
        max_concurrency=slots,
    )
    draw = Draw((4, 0), Prompt("p", (), {"seed": 5}), (SamplingParams(20, stop_ids=(END,)),) * samples, (0, 4, 0))

    async def everything() -> list[Group]:
        return [group async for group in orchestrator.groups([draw])]

    return asyncio.run(everything())[0]


def by_plan(request: Request) -> str:
    *_, sample, turn = request.seed_path
    return WINS[sample % 2][turn]


@pytest.mark.parametrize("slots", [2, 100])
def test_samples_play_each_other_and_each_is_a_trajectory(codec: Codec, slots: int) -> None:
    group = played(codec, by_plan, samples=4, slots=slots)
    assert [t.status for t in group.trajectories] == [Status.OK] * 4
    assert [t.reward for t in group.trajectories] == [1.0, -1.0, 1.0, -1.0]
    assert [[step.text for step in t.steps] for t in group.trajectories] == [WINS[0], WINS[1][:2]] * 2
    first, second = group.trajectories[0].messages, group.trajectories[1].messages
    assert "You are Player 0" in first[0]["content"] and "You are Player 1" in second[0]["content"]
    assert "Player 0 placed their symbol (O) in cell 0" in second[0]["content"]
    assert "You are Player" not in first[2]["content"] and "in cell 3" in first[2]["content"], "only what is new"
    assert textarena._tables == {} and textarena._seats == {}


def test_whoever_leaves_ends_the_game_for_the_other(codec: Codec) -> None:
    group = played(codec, by_plan, samples=2, limits={"max_turns": 1})
    left, other = group.trajectories
    assert left.status is Status.TRUNCATED and left.reward is None
    assert other.status is Status.ENV_ERROR and "player 0 left before its end" in (other.error or "")
    assert textarena._tables == {}


def test_tables_of_two_want_groups_of_even_size(codec: Codec) -> None:
    group = played(codec, by_plan, samples=3)
    assert {t.status for t in group.trajectories} == {Status.ENV_ERROR}
    assert "needs groups of a multiple of that, got 3" in (group.trajectories[0].error or "")


def test_an_opponent_plays_the_other_seats(codec: Codec) -> None:
    group = played(codec, lambda request: f"[{request.seed_path[-1] * 2}]", samples=6, opponent="random_move")
    assert all(t.status is Status.OK and t.reward in (-1.0, 0.0, 1.0) for t in group.trajectories)
    assert ["Player 0" in t.messages[0]["content"].splitlines()[0] for t in group.trajectories] == [True, False] * 3
    again = played(codec, lambda request: f"[{request.seed_path[-1] * 2}]", samples=6, opponent="random_move")
    assert [t.messages for t in again.trajectories] == [t.messages for t in group.trajectories], "chance is of seed and sample"


def test_a_random_move_is_one_of_those_listed() -> None:
    import random

    said = {random_move("Available Moves: '[0]', '[7]'\nchoose", random.Random(n)) for n in range(20)}
    assert said == {"[0]", "[7]"}
