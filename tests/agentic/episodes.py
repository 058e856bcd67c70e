"""Episodes without a model: a byte tokenizer, a scripted engine, and environments that say what they are told to."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.agentic.agents import Action, ConversationAgentBase, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
from burnish.config.schema import EpisodeLimits
from burnish.rollout.engine import Engine
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import Request, SamplingParams, Trajectory

END = 2  # <|im_end|> of the byte tokenizer


def script(codec: Codec, *texts: str, **options: Any) -> ScriptedEngine:
    """An engine that says the n-th text in the n-th turn of an episode, ending each turn itself."""

    def reply(request: Request) -> list[int]:
        return [*codec.tokenizer.encode(texts[request.seed_path[-1]]), END]

    return ScriptedEngine(reply, decode_text=codec.tokenizer.decode, **options)


def context(engine: Engine, codec: Codec, *, limits: Mapping[str, Any] = {}, **options: Any) -> EpisodeContext:
    sizes: dict[str, Any] = {"context": 400, "max_prompt_tokens": 200, "limits": EpisodeLimits(**({"step_timeout_s": 10.0} | {**limits}))}
    return EpisodeContext(engine=engine, template=codec.template, decode=codec.tokenizer.decode, **(sizes | options))


def play(
    episode_context: EpisodeContext,
    env: BaseTaskEnv,
    *,
    agent: ConversationAgentBase | None = None,
    max_tokens: int = 50,
    seed_path: tuple[int, ...] = (0, 3, 1, 0),
    end: tuple[int, ...] = (END,),
    **params: Any,
) -> Trajectory:
    """One episode as sample 0 of group (3, 1)."""
    sampling = SamplingParams(max_tokens, stop_ids=end, **params)
    collector = TrajectoryCollectEngine(episode_context, params=sampling, seed_path=seed_path)
    return asyncio.run(collector.collect(agent or ModelAgent(), env, group=(3, 1), sample=0))


class Talk(BaseTaskEnv):
    """Says `says` turn by turn, then is done; counts its calls, and calls `faults[method]` in each."""

    def __init__(
        self,
        task: Mapping[str, Any] = {},
        *,
        says: Sequence[str] = ("hi",),
        faults: Mapping[str, Callable[[], Any]] = {},
        max_steps: int = 9,
    ) -> None:
        super().__init__(task, max_steps=max_steps)
        self.says, self.faults = says, faults
        self.heard: list[str] = []
        self.closed = 0
        self.threads: set[int] = set()

    def _initial_observation(self) -> str:
        self._at("reset")
        return self.says[0]

    def _step_impl(self, action: Action) -> EnvStepResult:
        self._at("step")
        self.heard.append(action.text)
        done = self.num_steps >= len(self.says)
        return EnvStepResult("" if done else self.says[self.num_steps], reward=0.5, done=done, info={"step": self.num_steps})

    def close(self) -> None:
        self.closed += 1
        self._at("close")

    def _at(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        self.faults.get(method, lambda: None)()
