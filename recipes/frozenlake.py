"""FrozenLake on random 4 x 4 maps, told in words; a tenth of them, by a hash, is held out. See frozenlake.yaml. Needs the extra `envs`."""

import random
import zlib
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from burnish.agentic.agents import Action
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult

SIZE, MOVES, WORDS = 4, {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}, {"H": "hole", "G": "goal"}


def create_dataset(count: int, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """The first `count` different solvable maps of a split ("train" or "eval")."""
    maps: dict[str, list[str]] = {}
    for number in range(seed, seed + 100 * count):
        grid = generate_random_map(SIZE, p=0.8, seed=number)
        if (zlib.crc32("".join(grid).encode()) % 10 == 0) == (split == "eval") and len(maps) < count:
            maps["".join(grid)] = grid
    return [{"prompt": "", "map": grid} for grid in maps.values()]


def create_moves(count: int, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Fields of random maps as the environment tells them, each with the first move of a shortest way: for supervised training."""
    maps, rng, rows = create_dataset(50, split, seed), random.Random(seed), []
    while len(rows) < count:
        grid, far = rng.choice(maps)["map"], {(SIZE - 1, SIZE - 1): 0}
        fields = [(row, column) for row in range(SIZE) for column in range(SIZE) if grid[row][column] in "SF"]
        for steps in range(SIZE * SIZE):  # fields by their distance to the goal
            far |= {at: steps + 1 for at in fields if at not in far and any(far.get(_to(at, move)) == steps for move in MOVES)}
        at = rng.choice([place for place, steps in far.items() if steps])
        rows.append({"prompt": tell(grid, at), "completion": rng.choice([move for move in MOVES if far.get(_to(at, move), 99) < far[at]])})
    return rows


def _to(at: tuple[int, int], move: str) -> tuple[int, int]:
    return at[0] + MOVES[move][0], at[1] + MOVES[move][1]


def tell(grid: list[str], at: tuple[int, int]) -> str:
    fields = {(row, column): WORDS.get(letter, "ice") for row, line in enumerate(grid) for column, letter in enumerate(line)}
    around = ", ".join(f"{move} {fields.get(_to(at, move), 'edge')}" for move in MOVES)
    return f"{around}; goal {SIZE - 1 - at[0]} down {SIZE - 1 - at[1]} right. Move?"


class FrozenLake(BaseTaskEnv):
    """One move a turn: the answer's first word that is one. Without any, nothing moves."""

    def _initial_observation(self) -> str:
        self.at, self.game = 0, FrozenLakeEnv(desc=self.task["map"], is_slippery=False)
        self.game.reset(seed=self.task["seed"])
        return tell(self.task["map"], (0, 0))

    def _step_impl(self, action: Action) -> EnvStepResult:
        said, reward, ended = [word for word in action.text.lower().replace(".", " ").split() if word in MOVES], 0.0, False
        if said:
            self.at, reward, ended, _, _ = self.game.step(list(MOVES).index(said[0]))
        return EnvStepResult(tell(self.task["map"], divmod(int(self.at), SIZE)), float(reward), ended)
