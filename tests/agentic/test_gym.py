"""Gymnasium's text games and MiniGrid, as a model sees them."""

import pytest

from burnish.agentic.agents import Action
from burnish.agentic.gym import GymText, MiniGrid
from burnish.config.errors import UserError

pytest.importorskip("gymnasium")


def test_frozenlake_shows_where_you_are_and_pays_at_the_goal() -> None:
    env = GymText({"seed": 1, "env_id": "FrozenLake-v1", "make": {"desc": ["SF", "HG"], "is_slippery": False}})
    assert env._initial_observation() == "[S]F\nHG\nActions: left, down, right, up."
    moved = env._step_impl(Action("I go left, no: Right!"))
    assert (moved.observation, moved.reward, moved.done) == ("  (Right)\nS[F]\nHG", 0.0, False)
    lost = env._step_impl(Action("I don't know"))
    assert (lost.observation, lost.reward) == ("That is no action. Actions: left, down, right, up.", None)
    won = env._step_impl(Action("down"))
    assert (won.reward, won.done, won.info) == (1.0, True, {"action": "down"})
    env.close()


@pytest.mark.parametrize(
    ("env_id", "word", "shown"),
    [("Taxi-v4", "north", "+---------+"), ("CliffWalking-v1", "up", "o  o"), ("Blackjack-v1", "hit", "observation: (")],
)
def test_other_games_by_name(env_id: str, word: str, shown: str) -> None:
    env = GymText({"seed": 1}, env_id=env_id)
    first = env._initial_observation()
    assert shown in first and "\x1b" not in first and first == GymText({"seed": 1}, env_id=env_id)._initial_observation()
    assert env._step_impl(Action(word)).info == {"action": word}


def test_what_cant_be_played_says_why() -> None:
    with pytest.raises(UserError, match="needs `env_id`"):
        GymText({"seed": 1})
    with pytest.raises(UserError, match="give `actions`"):
        GymText({"seed": 1}, env_id="CartPole-v1")


def test_minigrid_is_told_whole_and_can_be_won() -> None:
    pytest.importorskip("minigrid")
    env = MiniGrid({"seed": 1}, env_id="MiniGrid-Empty-5x5-v0")
    first = env._initial_observation()
    assert first.startswith("Mission: get to the green goal square\nWGWGWGWGWG\nWG>>    WG\n") and "Actions: left, right, forward" in first
    moves = ["forward", "forward", "right", "forward", "forward"]
    results = [env._step_impl(Action(move)) for move in moves]
    assert [result.done for result in results] == [False] * 4 + [True]
    assert results[-1].reward is not None and 0 < results[-1].reward <= 1
    env.close()
