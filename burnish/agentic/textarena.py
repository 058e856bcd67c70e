"""TextArena's games: the samples of a group sit at tables together and play each other (self-play), or one sample plays an opponent.

Owns tables, seats and whose turn it is. A player is an episode with an agent and a trajectory of its own; rewards come when the game
closes. Samples 0 and 1 of a group share a table of two, 2 and 3 the next, and so on: a group's size must be a multiple of the number of
players. Whoever leaves early (a limit, an engine that fails) ends the game for all at its table: the others' episodes are errors then,
since they have no result. Methods are coroutines: a seat waits for the others without a thread. Needs the extra `textarena`.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from burnish.agentic.agents import Action
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.config.errors import UserError

Opponent = Callable[[str, random.Random], str]


def random_move(observation: str, rng: random.Random) -> str:
    """One of the moves in brackets of the observation's last line that has any, by chance: an opponent for games that list their moves."""
    for line in reversed(observation.splitlines()):
        if moves := re.findall(r"'(\[[^\]\[']+\])'", line):
            return rng.choice(moves)
    return "[0]"


class _Table:
    """One game, and the seats that wait for their turn. Lives on one event loop."""

    def __init__(self, env_id: str, players: int, seed: int) -> None:
        self.env_id, self.players, self.seed = env_id, players, seed
        self.changed = asyncio.Condition()
        self.game: Any = None
        self.turn: int | None = None
        self.seen = ""
        self.rewards: Mapping[int, float] | None = None
        self.left: str | None = None

    async def sit(self) -> None:
        """Begin the game, once somebody sits down."""
        async with self.changed:
            if self.game is None and self.left is None:
                arena = await asyncio.to_thread(_textarena)
                self.game = arena.make(self.env_id)
                self.game.reset(num_players=self.players, seed=self.seed)
                self._look()

    async def wait_for(self, seat: int) -> str | None:
        """What the seat sees when it is its turn; None once the game is over."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.turn == seat or self.rewards is not None or self.left is not None)
            if self.rewards is not None:
                return None
            if self.left is not None:
                raise RuntimeError(f"the game has no result: {self.left}")
            return self.seen

    async def move(self, text: str) -> None:
        async with self.changed:
            done, _ = self.game.step(text)
            if done:
                rewards, _ = self.game.close()
                self.rewards, self.turn = {int(player): float(reward) for player, reward in rewards.items()}, None
            else:
                self._look()
            self.changed.notify_all()

    async def leave(self, seat: int) -> None:
        async with self.changed:
            if self.rewards is None and self.left is None:
                self.left, self.turn = f"player {seat} left before its end", None
                self.changed.notify_all()

    def _look(self) -> None:
        player, seen = self.game.get_observation()
        self.turn, self.seen = int(player), str(seen)


class TextArena(BaseTaskEnv):
    """A seat at a game of TextArena.

    env_id: e.g. "TicTacToe-v0"; a row's column of that name comes first. players: how many seats. opponent: None is self-play; else a
    function `(observation, rng) -> move` that plays all other seats, "random_move" or your own, and the episode's seat follows from its
    sample. What a player is shown is what has been said since its last move.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        *,
        env_id: str | None = None,
        players: int = 2,
        opponent: Opponent | str | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(task, max_steps=max_steps)
        name = task.get("env_id", env_id)
        if name is None:
            raise UserError("TextArena needs `env_id`, as an option or as a column of the data")
        if players < 1:
            raise UserError(f"a game has at least one player, got {players}")
        self.env_id, self.players = name, players
        self.opponent: Opponent | None = random_move if opponent == "random_move" else None if isinstance(opponent, str) else opponent
        if isinstance(opponent, str) and self.opponent is None:
            raise UserError(f"opponent of TextArena is a function, or `random_move`; got {opponent!r}")
        self.table: _Table | None = None
        self.seen = ""

    async def _initial_observation(self) -> str:
        group, sample, samples, attempt = self.episode
        self.seat = sample % self.players
        if self.opponent is not None:
            self.table = _Table(self.env_id, self.players, int(self.task["seed"]))
            self.rng = random.Random(f"{self.task['seed']}:{sample}")
        else:
            if samples % self.players:
                raise UserError(
                    f"self-play at tables of {self.players} needs groups of a multiple of that, got {samples} (num_generations)"
                )
            self.key = (id(asyncio.get_running_loop()), group, sample // self.players, attempt)
            self.table = _tables.setdefault(self.key, _Table(self.env_id, self.players, int(self.task["seed"])))
            _seats[self.key] = _seats.get(self.key, 0) + 1
        await self.table.sit()
        seen = await self._my_turn()
        if seen is None:
            raise RuntimeError("the game ended before this player's first move")
        return seen

    async def _step_impl(self, action: Action) -> EnvStepResult:
        assert self.table is not None
        await self.table.move(action.text.strip())
        seen = await self._my_turn()
        if seen is not None:
            return EnvStepResult(seen, None, False)
        assert self.table.rewards is not None
        return EnvStepResult("", self.table.rewards.get(self.seat, 0.0), True, {"player": self.seat})

    async def _my_turn(self) -> str | None:
        """What is new at this seat's turn; None at the end."""
        table = self.table
        assert table is not None
        while self.opponent is not None and table.turn not in (self.seat, None):
            await table.move(self.opponent(table.seen, self.rng))
        seen = await table.wait_for(self.seat)
        if seen is None:
            return None
        new = seen.removeprefix(self.seen)
        self.seen = seen
        return new.strip("\n")

    async def close(self) -> None:
        if self.table is None:
            return
        await self.table.leave(self.seat)
        if self.opponent is None:
            _seats[self.key] -= 1
            if not _seats[self.key]:
                del _seats[self.key], _tables[self.key]


_tables: dict[Any, _Table] = {}
"""Games in play, by loop, group, table and attempt: the seats' environments are made apart from each other."""
_seats: dict[Any, int] = {}


def _textarena() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise UserError(f'TextArena needs the extra `textarena`: pip install "burnish[textarena]" ({error})') from error


__all__ = ["TextArena", "random_move"]
