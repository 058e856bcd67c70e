"""One episode: agent ↔ engine ↔ environment, token in and token out.

Owns the turn loop and its limits. The ids that the sampler produced are kept as they are; text of the template and of the environment is
encoded once and never carries loss. An episode that fails becomes a status, never an exception and never a reward of 0:

- `ok`: the environment ended it. In baselines and losses.
- `truncated`: a limit on turns or tokens ended it, or cut its last turn. In baselines and losses if the algorithm trains truncated ones.
- `env_error`, `env_timeout`: the environment raised, or it (or the whole episode) took too long. Counted, in no baseline and no loss.
- `aborted`: nothing was played: its prompt is too long, or it was lost twice. Counted, in no baseline and no loss.
- `grader_error` is the reward manager's. Counted, in no baseline and no loss.

A row goes on for as long as its text is what the chat template makes of the conversation. Where the template writes earlier turns in
another way (Qwen3 drops earlier reasoning), or an agent changed its history, the episode *forks*: the next turn is sampled after a new
rendering, and its ids are trained there, each once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from burnish.agentic.agents import ConversationAgentBase
from burnish.agentic.calls import Calls, EnvCalls
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.agentic.record import TokenRecord
from burnish.config.errors import CallError, CallLost, CallTimeout
from burnish.config.schema import EpisodeLimits
from burnish.data.length import OverlongPolicy, fit_prompt
from burnish.observe.trace import span
from burnish.rollout.engine import Engine
from burnish.text.chat import Rendering
from burnish.types import Message, Request, SamplingParams, Status, Step, StopReason, Trajectory


@runtime_checkable
class Template(Protocol):
    """What an episode needs of a chat template (`text.chat.ChatTemplate`)."""

    @property
    def takes_tools(self) -> bool: ...

    def start(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering: ...

    def follow(
        self, begun: Rendering, reply: str, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, ended: bool
    ) -> Rendering | None: ...


@dataclass(frozen=True)
class EpisodeContext:
    """What all episodes of a run share.

    decode: sampled ids → text without special tokens. context: the most tokens of a row. max_prompt_tokens, overlong_prompts, bos_id:
    what the first prompt may be, as in `data.length`; a prompt that is to be dropped ends its episode as aborted. calls: where plain
    environments and tools run.
    """

    engine: Engine
    template: Template
    decode: Callable[[Sequence[int]], str]
    context: int
    max_prompt_tokens: int
    overlong_prompts: OverlongPolicy = "drop"
    bos_id: int | None = None
    limits: EpisodeLimits = EpisodeLimits()
    calls: Calls = field(default_factory=lambda: Calls(None))


class TrajectoryCollectEngine:
    """Plays one episode to its end. `collect` returns a `Trajectory` whatever happened; only cancellation passes through."""

    def __init__(self, context: EpisodeContext, *, params: SamplingParams, seed_path: tuple[int, ...]) -> None:
        self._context = context
        self._params = params
        self._seed_path = seed_path
        self.worker_died = False
        """Whether the episode ended because the process of its environment did: it may be played again."""

    async def collect(self, agent: ConversationAgentBase, env: BaseTaskEnv, *, group: tuple[int, int], sample: int) -> Trajectory:
        agent, self._context = env.stage(agent, self._context)
        limits, record, steps = self._context.limits, TokenRecord(), []
        status, error, trace, start = Status.OK, None, "", time.monotonic()
        ids = {"step": group[0], "draw": group[1], "sample": sample, "attempt": env.episode.attempt}
        call, clock = (
            EnvCalls(env, self._context.calls, timeout_s=limits.step_timeout_s, ids=ids),
            asyncio.timeout(limits.episode_timeout_s),
        )
        agent.reset()
        try:
            async with clock:
                await call.open()
                env.calls = self._context.calls
                agent.update_from_env(_said(await call("env.reset", "_initial_observation"), env))
                status, error = await self._play(agent, env, call, record, steps)
        except CallTimeout as failure:
            status, error = Status.ENV_TIMEOUT, str(failure)
        except CallError as failure:
            self.worker_died = isinstance(failure, CallLost)
            status, error, trace = Status.ENV_ERROR, str(failure), failure.trace
        except TimeoutError:
            if not clock.expired():
                raise
            status, error = Status.ENV_TIMEOUT, f"the episode took longer than {limits.episode_timeout_s:g} s"
        finally:
            await _close(call)
        return Trajectory(
            steps=steps,
            **record.arrays(),
            group=group,
            sample=sample,
            status=status,
            messages=list(agent.messages),
            timings={"episode_seconds": time.monotonic() - start, "environment_seconds": call.seconds},
            error=error,
            traceback=trace,
        )

    async def _play(
        self, agent: ConversationAgentBase, env: BaseTaskEnv, call: EnvCalls, record: TokenRecord, steps: list[Step]
    ) -> tuple[Status, str | None]:
        """Turns until the environment is done or a limit strikes."""
        context, template = self._context, self._context.template
        max_steps = env.max_steps or context.limits.max_turns
        rendering, before = opening(agent, template), list(_shown(agent, template).messages)
        prompt = fit_prompt(rendering.ids, limit=context.max_prompt_tokens, policy=context.overlong_prompts, bos_id=context.bos_id)
        if prompt is None:
            return Status.ABORTED, f"the prompt is longer than {context.max_prompt_tokens} tokens"
        record.begin(prompt)
        while True:
            params = self._within_budget(record)
            if params is None:
                return Status.TRUNCATED, None
            request = Request(tuple(record.ids), params, (*self._seed_path, len(steps)))
            with span("model", turn=len(steps), prompt_tokens=len(record.ids)) as seen:
                completion = await context.engine.generate(request)
                seen.note(tokens=len(completion.ids), version=int(completion.versions[-1]) if len(completion.versions) else -1)
            step = Step(np.asarray(record.ids, np.int32), completion, context.decode(completion.ids.tolist()))
            steps.append(step)
            record.drawn(completion)
            if completion.stop in (StopReason.CANCELLED, StopReason.ERROR):
                return Status.ABORTED, completion.error or f"the engine ended a completion as {completion.stop}"
            action = agent.update_from_model(step.text)
            env.check_step()
            _note(step, await call("env.step", "_step_impl", action), env)
            if step.done:
                env.done = True
                cut = completion.stop in (StopReason.LENGTH, StopReason.CONTEXT)
                return Status.TRUNCATED if cut else Status.OK, None
            if env.num_steps >= max_steps:
                return Status.TRUNCATED, None
            agent.update_from_env(step.observation, info=step.info)
            shown, ended, following = _shown(agent, template), completion.stop is StopReason.STOP_ID, None
            if _goes_on(shown.messages, before):
                following = template.follow(rendering, step.text, shown.messages, tools=shown.tools, ended=ended)
            before = list(shown.messages)
            if following is None:
                rendering = opening(agent, template)
                record.begin(rendering.ids)
            else:
                rendering = following
                record.given(following.ids)

    def _within_budget(self, record: TokenRecord) -> SamplingParams | None:
        """How the next turn is sampled, cut to what the episode may still sample; None where nothing is left of that or of the row."""
        budget = self._context.limits.max_tokens
        left = self._params.max_tokens if budget is None else min(self._params.max_tokens, budget - record.num_sampled)
        if left < 1 or len(record.ids) >= self._context.context:
            return None
        return replace(self._params, max_tokens=left)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the template is given of an agent's conversation."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None


def _shown(agent: ConversationAgentBase, template: Template) -> _Shown:
    """The agent's messages and tools; the tools in words where the template doesn't know any."""
    if not agent.tools:
        return _Shown(agent.shown(), None)
    return _Shown(agent.shown(), agent.tools) if template.takes_tools else _Shown(agent.messages_with_tools_in_words(), None)


def _goes_on(messages: Sequence[Message], before: Sequence[Message]) -> bool:
    """Whether the model is shown all that it was shown before, and then its reply: an agent that forgets shows less."""
    return len(messages) > len(before) and messages[len(before)]["role"] == "assistant" and list(messages[: len(before)]) == list(before)


def opening(agent: ConversationAgentBase, template: Template) -> Rendering:
    """The agent's conversation up to the model's turn, its tools included."""
    shown = _shown(agent, template)
    return template.start(shown.messages, tools=shown.tools)


def _note(step: Step, result: Any, env: BaseTaskEnv) -> None:
    """Enter what the environment answered."""
    if not isinstance(result, EnvStepResult):
        raise CallError(f"{type(env).__name__}._step_impl must return an EnvStepResult, got {type(result).__name__}")
    step.observation, step.reward, step.done, step.info = _said(result.observation, env), result.reward, result.done, result.info


def _said(observation: Any, env: BaseTaskEnv) -> str | list[Message]:
    """The observation, if it is one."""
    is_messages = isinstance(observation, list) and all(isinstance(message, Mapping) and "role" in message for message in observation)
    if not isinstance(observation, str) and not is_messages:
        raise CallError(f"{type(env).__name__} must say a string or a list of messages, got {observation!r:.80}")
    return observation


async def _close(call: EnvCalls) -> None:
    """Close in every path; an error in closing is the environment's affair and doesn't undo the episode."""
    with contextlib.suppress(CallError, CallTimeout):
        await call("env.close", "close")
    call.end()


__all__ = ["EpisodeContext", "Template", "TrajectoryCollectEngine", "opening"]
