"""One episode: agent ↔ engine ↔ environment, token in and token out.

Owns the turn loop and the token record. The ids that the sampler produced are kept as they are; text of the template and of the
environment is encoded once and never carries loss. An episode that fails becomes a status, never an exception and never a reward of 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from burnish.agentic.agents import ConversationAgentBase
from burnish.agentic.calls import EnvCalls, EnvError, EnvTimeout
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.data.length import OverlongPolicy, fit_prompt
from burnish.rollout.engine import Engine
from burnish.types import Completion, Message, Request, SamplingParams, Status, Step, StopReason, Trajectory


@runtime_checkable
class Template(Protocol):
    """What an episode needs of a chat template (`text.chat.ChatTemplate`)."""

    def encode(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> list[int]: ...


class HistoryRewritten(ValueError):
    """The chat template changed earlier turns when a new one was added, so the sampled ids can't be kept in one row."""


@dataclass(frozen=True)
class EpisodeContext:
    """What all episodes of a run share.

    decode: sampled ids → text without special tokens. context: the most tokens of a whole episode. max_prompt_tokens, overlong_prompts,
    bos_id: what the first prompt may be, as in `data.length`; a prompt that is to be dropped ends its episode as aborted.
    """

    engine: Engine
    template: Template
    decode: Callable[[Sequence[int]], str]
    context: int
    max_prompt_tokens: int
    overlong_prompts: OverlongPolicy = "drop"
    bos_id: int | None = None
    env_timeout_s: float = 60.0


class _Tokens:
    """The growing record of an episode: every id, whether the policy sampled it, and what the sampler said."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.logps: list[float] = []
        self.versions: list[int] = []
        self.kept: list[np.ndarray | None] = []

    def given(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.sampled.extend([False] * len(ids))
        self.logps.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))
        self.kept.extend([None] * len(ids))

    def drawn(self, completion: Completion) -> None:
        self.ids.extend(int(i) for i in completion.ids)
        self.sampled.extend([True] * len(completion.ids))
        self.logps.extend(float(x) for x in completion.logps)
        self.versions.extend(int(v) for v in completion.versions)
        self.kept.extend([None] * len(completion.ids) if completion.kept_ids is None else list(completion.kept_ids))

    def kept_ids(self) -> np.ndarray | None:
        width = max((len(row) for row in self.kept if row is not None), default=0)
        if width == 0:
            return None
        table = np.full((len(self.ids), width), -1, np.int32)
        for position, row in enumerate(self.kept):
            if row is not None:
                table[position, : len(row)] = row
        return table


class TrajectoryCollectEngine:
    """Plays one episode to its end. `collect` returns a `Trajectory` whatever happened; only cancellation passes through."""

    def __init__(self, context: EpisodeContext, *, params: SamplingParams, seed_path: tuple[int, ...]) -> None:
        self._context = context
        self._params = params
        self._seed_path = seed_path

    async def collect(self, agent: ConversationAgentBase, env: BaseTaskEnv, *, group: tuple[int, int], sample: int) -> Trajectory:
        tokens, steps = _Tokens(), []
        status, error, prompt_length, start = Status.OK, None, 0, time.monotonic()
        call = EnvCalls(timeout_s=self._context.env_timeout_s)
        agent.reset()
        try:
            agent.update_from_env(await call("env.reset", env._initial_observation))
            prompt = self._fitted(self._context.template.encode(agent.messages))
            if prompt is None:
                status, error = Status.ABORTED, f"the prompt is longer than {self._context.max_prompt_tokens} tokens"
            else:
                tokens.given(prompt)
                prompt_length = len(prompt)
                status = await self._play(agent, env, call, tokens, steps)
        except EnvTimeout as failure:
            status, error = Status.ENV_TIMEOUT, str(failure)
        except EnvError as failure:
            status, error = Status.ENV_ERROR, str(failure)
        finally:
            await _close(env, call)
        return Trajectory(
            steps=steps,
            ids=np.asarray(tokens.ids, np.int32),
            sampled=np.asarray(tokens.sampled, bool),
            sampler_logps=np.asarray(tokens.logps, np.float32),
            versions=np.asarray(tokens.versions, np.int32),
            prompt_length=prompt_length,
            group=group,
            sample=sample,
            status=status,
            kept_ids=tokens.kept_ids(),
            messages=list(agent.messages),
            timings={"episode_seconds": time.monotonic() - start},
            error=error,
        )

    def _fitted(self, ids: list[int]) -> list[int] | None:
        context = self._context
        return fit_prompt(ids, limit=context.max_prompt_tokens, policy=context.overlong_prompts, bos_id=context.bos_id)

    async def _play(self, agent: ConversationAgentBase, env: BaseTaskEnv, call: EnvCalls, tokens: _Tokens, steps: list[Step]) -> Status:
        """Turns until the environment is done or a limit strikes."""
        while True:
            if len(tokens.ids) >= self._context.context:
                return Status.TRUNCATED
            request = Request(tuple(tokens.ids), self._params, (*self._seed_path, len(steps)))
            completion = await self._context.engine.generate(request)
            step = Step(np.asarray(tokens.ids, np.int32), completion, self._context.decode(completion.ids.tolist()))
            steps.append(step)
            tokens.drawn(completion)
            before = list(agent.messages)
            action = agent.update_from_model(step.text)
            env.check_step()
            result = await call("env.step", env._step_impl, action)
            if not isinstance(result, EnvStepResult):
                raise EnvError(TypeError(f"{type(env).__name__}._step_impl must return an EnvStepResult, got {type(result).__name__}"))
            step.observation, step.reward, step.done, step.info = result.observation, result.reward, result.done, result.info
            if result.done:
                env.done = True
                cut = completion.stop in (StopReason.LENGTH, StopReason.CONTEXT)
                return Status.TRUNCATED if cut else Status.OK
            if env.num_steps >= env.max_steps:
                return Status.TRUNCATED
            said = agent.update_from_env(result.observation, info=result.info)
            tokens.given(self._between(before, said, ended=completion.stop is StopReason.STOP_ID))

    def _between(self, history: Sequence[Message], said: Sequence[Message], *, ended: bool) -> list[int]:
        """The ids between two sampled turns: the closing of the assistant's turn, what was said, the opening of the next turn.

        They are read off a conversation whose assistant turn is a placeholder, so the sampled text is never encoded again. When the model
        ended its turn itself, its stop id stands for the first closing token.
        """
        encode = self._context.template.encode
        opened = encode(history)
        turn: Message = {"role": "assistant", "content": "x"}
        closed = encode([*history, turn], add_generation_prompt=False)
        whole = encode([*history, turn, *said])
        if closed[: len(opened)] != opened or whole[: len(closed)] != closed:
            raise HistoryRewritten("the chat template rewrites earlier turns; this conversation can't be kept as one row of tokens")
        closing = closed[len(opened) + 1 :]
        return (closing[1:] if ended else closing) + whole[len(closed) :]


async def _close(env: BaseTaskEnv, call: EnvCalls) -> None:
    """Close in every path; an error in closing is the environment's affair and doesn't undo the episode."""
    with contextlib.suppress(EnvError, EnvTimeout):
        await call("env.close", env.close)
    call.end()


__all__ = ["EpisodeContext", "HistoryRewritten", "Template", "TrajectoryCollectEngine"]
