"""FrozenLake, written as in the documentation; a worker process imports it without jax."""

import gymnasium

from burnish.agentic.environments import BaseTaskEnv, EnvStepResult


class MyEnv(BaseTaskEnv):
    def _initial_observation(self):
        self.env = gymnasium.make("FrozenLake-v1", render_mode="ansi", desc=self.task["map"], is_slippery=False)
        self.env.reset(seed=self.task["seed"])
        return "You are on this map:\n" + self.env.render()

    def _step_impl(self, action):
        moves = {"left": 0, "down": 1, "right": 2, "up": 3}
        _, reward, terminated, truncated, info = self.env.step(moves.get(action.text.strip().lower(), 0))
        return EnvStepResult(self.env.render(), float(reward), terminated or truncated, info)

    def close(self):
        self.env.close()
