"""Gymnasium's text games and MiniGrid's rooms as environments. Needs gymnasium (extra `envs`), or minigrid (extra `minigrid`).

Owns how a board becomes text and a word an action. The games' own rewards are the rewards. Methods are plain: they run in workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.agentic.agents import Action
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.config.errors import UserError

_MARKED = re.compile(r"\x1b\[4\d(?:;\d+)*m(.)\x1b\[0m")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
ACTIONS: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
"""The words of each game's actions, in the order of their numbers."""


class GymText(BaseTaskEnv):
    """A text game of Gymnasium: FrozenLake, Taxi, CliffWalking, Blackjack, or any with actions that are numbered.

    env_id: e.g. "FrozenLake-v1"; a row's column of that name comes first. make: keyword arguments of `gymnasium.make`; a row's column
    `make` adds to them. actions: words, in the order of the actions' numbers; needed for games that aren't in `ACTIONS`. The action is the
    answer's last word that is one; an answer without any leaves the game as it is, and is told so. invalid_reward: for such an answer.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        *,
        env_id: str | None = None,
        make: Mapping[str, Any] = {},
        actions: tuple[str, ...] | list[str] | None = None,
        invalid_reward: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(task, max_steps=max_steps)
        name = task.get("env_id", env_id)
        if name is None:
            raise UserError(f"{type(self).__name__} needs `env_id`, as an option or as a column of the data")
        self.env_id: str = name
        self.make = {**make, **task.get("make", {})}
        words = actions if actions is not None else self._words()
        if not words:
            raise UserError(f"the words for the actions of {name} aren't known: give `actions`, in the order of their numbers")
        self.actions = tuple(words)
        self.invalid_reward = invalid_reward
        self.game: Any = None

    def _words(self) -> tuple[str, ...]:
        return ACTIONS.get(self.env_id.partition("-")[0], ())

    def _open(self) -> tuple[Any, Any]:
        """The game, and its first observation."""
        import gymnasium

        if self.env_id.partition("-")[0] in ("FrozenLake", "Taxi", "CliffWalking"):
            self.make = {"render_mode": "ansi", **self.make}
        game = gymnasium.make(self.env_id, **self.make)
        return game, game.reset(seed=self.task["seed"])[0]

    def _show(self, seen: Any) -> str:
        """The board in words. seen: the game's own observation."""
        if self.game.render_mode == "ansi":
            return _COLOUR.sub("", _MARKED.sub(r"[\1]", str(self.game.render()))).strip("\n")
        return f"observation: {tuple(int(part) for part in seen) if isinstance(seen, tuple) else seen}"

    def _initial_observation(self) -> str:
        self.game, seen = self._open()
        return f"{self._show(seen)}\nActions: {', '.join(self.actions)}."

    def _step_impl(self, action: Action) -> EnvStepResult:
        said = [word for word in re.findall(r"[a-z_]+", action.text.lower()) if word in self.actions]
        if not said:
            return EnvStepResult(f"That is no action. Actions: {', '.join(self.actions)}.", self.invalid_reward, False, {"action": None})
        seen, reward, ended, cut, _ = self.game.step(self.actions.index(said[-1]))
        return EnvStepResult(self._show(seen), float(reward), bool(ended or cut), {"action": said[-1]})

    def close(self) -> None:
        if self.game is not None:
            self.game.close()


class MiniGrid(GymText):
    """A room of MiniGrid, all of it, as letters: two for each field, what and of which colour; `V`, `<`, `>`, `^` twice is the agent."""

    def _words(self) -> tuple[str, ...]:
        return ("left", "right", "forward", "pickup", "drop", "toggle", "done")

    def _open(self) -> tuple[Any, Any]:
        try:
            import minigrid  # makes its rooms known to gymnasium
        except ImportError as error:
            raise UserError(f'MiniGrid needs the extra `minigrid`: pip install "burnish[minigrid]" ({error})') from error
        assert minigrid
        return super()._open()

    def _show(self, seen: Any) -> str:
        return f"Mission: {seen['mission']}\n{self.game.unwrapped.pprint_grid()}"


__all__ = ["ACTIONS", "GymText", "MiniGrid"]
