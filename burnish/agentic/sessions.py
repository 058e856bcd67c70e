"""Episodes that somebody else's agent plays through the endpoint: each session is an episode, and each request of it a turn.

Owns how requests become turns: a conversation that goes on from what was said goes on on the recorded ids, any other forks, by the rules of
`trajectory.py`, which plays the episode. The agent's program is the environment here: what it asks next is the observation. HTTP is
`rollout.server`; `burnish serve` puts both in front of an engine, a run starts its programs itself (`programs.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from burnish.agentic.agents import Action, ConversationAgentBase, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.agentic.trajectory import EpisodeContext, Template, TrajectoryCollectEngine, opening
from burnish.config.errors import CallError, UserError
from burnish.rollout.engine import Engine, EngineStats
from burnish.rollout.server.turns import CannotAnswer, Reply, Turn
from burnish.text.chat import Rendering
from burnish.text.tokenizer import Tokenizer
from burnish.text.tool_parsers import ToolParser
from burnish.types import Completion, Message, Request, SamplingParams, ToolCall, Trajectory


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a session. failure: why it is none."""

    rewards: Mapping[str, float | None]
    failure: CallError | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    turn: Turn
    reply: asyncio.Future[Reply]


@dataclass(slots=True)
class _Said:
    """What the agent was given for an assistant's turn, and what the model really said."""

    content: str
    call_ids: tuple[str, ...]
    text: str


class Session(BaseTaskEnv):
    """The environment of an episode whose observations are what somebody else's agent asks.

    name: of the session, in the ids of its calls. parser: of tool calls. fixed: requests may only shorten what is sampled. The agent and
    the engine of the episode are its own: the conversation is what was asked last, and it is sampled as was asked.
    """

    def __init__(self, task: Mapping[str, Any], name: str, parser: ToolParser, *, fixed: bool, max_steps: int | None = None) -> None:
        super().__init__(task, max_steps=max_steps)
        self.name, self.parser, self.fixed = name, parser, fixed
        self.inbox: asyncio.Queue[_Asked | Finish] = asyncio.Queue()
        self.asked: _Asked | None = None
        self.completion: Completion | None = None
        self.num_prompt_tokens = 0
        self.said: list[_Said] = []
        self.rewards: Mapping[str, float | None] = {}
        self.refused: str | None = None
        """Why a request ended the episode: nobody could sample what it asked."""

    def refuse(self, error: Exception) -> CallError:
        self.refused = str(error)
        return CallError(self.refused)

    def stage(self, agent: ConversationAgentBase, context: EpisodeContext) -> tuple[ConversationAgentBase, EpisodeContext]:
        return _Api(self), replace(context, engine=_AsAsked(context.engine, self), template=_Refusing(context.template, self))

    async def ask(self, turn: Turn, over: asyncio.Future[Any]) -> Reply | None:
        """The model's answer; None where the episode, at whose end `over` is done, has ended without one."""
        asked = _Asked(turn, asyncio.get_running_loop().create_future())
        self.inbox.put_nowait(asked)
        await asyncio.wait({asked.reply, over}, return_when=asyncio.FIRST_COMPLETED)
        return asked.reply.result() if asked.reply.done() else None

    async def _initial_observation(self) -> list[Message]:
        messages = await self._next()
        if messages is None:
            raise RuntimeError("the session ended before anything was asked")
        return messages

    async def _step_impl(self, action: Action) -> EnvStepResult:
        assert self.asked is not None and self.completion is not None, "a step answers what was asked"
        reply = _reply(action, self.completion, self.num_prompt_tokens, self.asked.turn, f"{self.name}-{len(self.said)}")
        self.said.append(_Said(reply.content, tuple(name for name, _ in reply.calls), action.text))
        if not self.asked.reply.done():
            self.asked.reply.set_result(reply)
        self.asked = None
        messages = await self._next()
        return EnvStepResult([], total(self.rewards), True) if messages is None else EnvStepResult(messages, None, False)

    async def _next(self) -> list[Message] | None:
        """The whole conversation that the next request holds; None at the end."""
        found = await self.inbox.get()
        if isinstance(found, Finish):
            if found.failure is not None:
                raise found.failure
            self.rewards = found.rewards
            return None
        self.asked = found
        return self.restored(found.turn.messages)

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """With the model's own words where the agent sends back what it was given of them."""
        names = {name: call for message in messages for name, call in _call_names(message)}
        found: list[Message] = []
        for message in messages:
            said = next((one for one in reversed(self.said) if message["role"] == "assistant" and _is_same(one, message)), None)
            if said is not None:
                found.append({"role": "assistant", "content": said.text})
            elif message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
                found.append({**message, "name": names[message.get("tool_call_id", "")]})
            else:
                found.append(message)
        return found

    async def close(self) -> None:
        return None


class _Api(ConversationAgentBase):
    """The conversation as the agent sent it last: it keeps the history itself, and may change it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def update_from_env(self, observation: str | Sequence[Message], *, info: Mapping[str, Any] | None = None) -> list[Message]:
        self.messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
        self.tools = self._session.asked.turn.tools if self._session.asked is not None else ()
        return self.messages

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response, self._session.parser.calls(response) if self.tools else [])

    def messages_with_tools_in_words(self) -> list[Message]:
        shown = super().messages_with_tools_in_words()
        how = f"\n\nTo call one, write:\n{self._session.parser.example}"
        return [{**shown[0], "content": shown[0]["content"] + how}, *shown[1:]]


class _AsAsked:
    """The engine of one session's episode: samples as the request at hand asks, and keeps what came for the answer."""

    def __init__(self, engine: Engine, session: Session) -> None:
        self._engine, self._session = engine, session

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def mesh(self) -> Any | None:
        return self._engine.mesh

    async def generate(self, request: Request) -> Completion:
        asked = self._session.asked
        assert asked is not None, "the episode samples because it was asked"
        try:
            params = asked_params(request.params, asked.turn, fixed=self._session.fixed)
        except CannotAnswer as error:
            raise self._session.refuse(error) from error
        out = await self._engine.generate(replace(request, params=params, session=self._session.name))
        self._session.completion, self._session.num_prompt_tokens = out, len(request.prompt_ids)
        return out

    async def cancel(self, request: Request) -> None:
        await self._engine.cancel(request)

    async def begin_update(self, version: int) -> None:
        await self._engine.begin_update(version)

    async def push(self, name: str, array: Any) -> None:
        await self._engine.push(name, array)

    async def commit_update(self, checksum: int | None = None) -> None:
        await self._engine.commit_update(checksum)

    async def abort_update(self) -> None:
        await self._engine.abort_update()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        """Nothing: the engine is everybody's."""


@dataclass(frozen=True, slots=True)
class _Refusing:
    """The chat template of one session's episode: what it can't write is the mistake of who asked it, not of the run."""

    template: Template
    session: Session

    @property
    def takes_tools(self) -> bool:
        return self.template.takes_tools

    def start(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering:
        try:
            return self.template.start(messages, tools=tools)
        except UserError as error:
            raise self.session.refuse(error) from error

    def follow(
        self, begun: Rendering, reply: str, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, ended: bool
    ) -> Rendering | None:
        try:
            return self.template.follow(begun, reply, messages, tools=tools, ended=ended)
        except UserError as error:
            raise self.session.refuse(error) from error


@dataclass(slots=True)
class _Open:
    """A session that somebody began, and its episode. used: when it was last asked."""

    session: Session
    playing: asyncio.Task[Trajectory]
    used: float


@dataclass
class Sessions:
    """Answers the endpoint: conversations of sessions as episodes, everything else without a record.

    model: the name that clients are told. params: of sampling, for what a request leaves open. fixed: requests may only shorten what
    `params` says, since what is trained must be sampled as training takes it to be. parser: of tool calls. on_end: gets each finished
    episode.
    max_sessions: open at one time; idle_s: after which an open one is given up.
    """

    model: str
    context: EpisodeContext
    tokenizer: Tokenizer
    params: SamplingParams
    parser: ToolParser
    on_end: Callable[[Trajectory], None] = lambda trajectory: None
    fixed: bool = False
    seed: int = 0
    max_sessions: int = 4096
    idle_s: float = 3600.0
    _open: dict[str, _Open] = field(default_factory=dict)
    _count: int = 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, seed_path: Sequence[int] | None) -> Completion:
        self._count += 1
        path = (self.seed, self._count) if seed_path is None else tuple(seed_path)
        return await self.context.engine.generate(Request(tuple(prompt_ids), params, path))

    async def chat(self, session: str | None, turn: Turn) -> Reply:
        if session is None:
            return await self._once(turn)
        found = self._session(session)
        reply = await found.session.ask(turn, found.playing)
        if reply is None:
            ended = found.playing.result()
            why = ended.error or f"it is {ended.status}: its limits on turns or tokens are reached"
            raise CannotAnswer(f"session {session} has ended: {why}; finish it", 409)
        return reply

    async def _once(self, turn: Turn) -> Reply:
        self._count += 1
        passing = Session({}, f"request-{self._count}", self.parser, fixed=self.fixed)
        agent = _Api(passing)
        passing.asked = _Asked(turn, asyncio.get_running_loop().create_future())
        agent.update_from_env(list(turn.messages))
        ids = tuple(_rendered(agent, self.context))
        params = asked_params(self.params, turn, fixed=self.fixed)
        out = await self.context.engine.generate(Request(ids, params, (self.seed, self._count)))
        action = agent.update_from_model(self.context.decode(out.ids.tolist()))
        return _reply(action, out, len(ids), turn, passing.name)

    def _session(self, name: str) -> _Open:
        if not (0 < len(name) <= 100 and name.replace("-", "").replace("_", "").isalnum()):
            raise CannotAnswer("a session's name has up to 100 letters, digits, dashes and underscores")
        if name not in self._open:
            self._drop_idle()
            if len(self._open) >= self.max_sessions:
                raise CannotAnswer(f"{self.max_sessions} sessions are open: finish some", 429)
            self._open[name] = self._begin(name)
        self._open[name].used = time.monotonic()
        return self._open[name]

    def _begin(self, name: str) -> _Open:
        session, number = Session({"session": name}, name, self.parser, fixed=self.fixed), zlib.crc32(name.encode())
        collector = TrajectoryCollectEngine(self.context, params=self.params, seed_path=(self.seed, number))
        playing = asyncio.create_task(collector.collect(ModelAgent(), session, group=(0, number), sample=0))
        return _Open(session, playing, time.monotonic())

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for name in [name for name, found in self._open.items() if now - found.used > self.idle_s]:
            self._open.pop(name).playing.cancel()

    async def finish(self, session: str, rewards: Mapping[str, float | None]) -> Mapping[str, Any]:
        if session not in self._open:
            raise CannotAnswer(f"there is no open session {session}", 404)
        found = self._open.pop(session)
        found.session.inbox.put_nowait(Finish(rewards))
        trajectory = await found.playing
        trajectory.rewards, trajectory.reward = dict(rewards), total(rewards)
        self.on_end(trajectory)
        return {
            "session": session,
            "status": str(trajectory.status),
            "turns": len(trajectory.steps),
            "rows": len(trajectory.forks) + 1,
            "ids": len(trajectory.ids),
            "sampled": trajectory.num_sampled,
            "reward": trajectory.reward,
            "error": trajectory.error,
        }

    async def close(self) -> None:
        """Give up what is open."""
        tasks = [found.playing for found in self._open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()


def total(rewards: Mapping[str, float | None]) -> float | None:
    """Their sum; None where none applies."""
    given = [value for value in rewards.values() if value is not None]
    return math.fsum(given) if given else None


def asked_params(params: SamplingParams, turn: Turn, *, fixed: bool) -> SamplingParams:
    """How a turn is sampled: as it asks, or, where that is fixed, cut at its length and its stop strings at most."""
    changes: dict[str, Any] = {"stop_strings": (*params.stop_strings, *turn.stop_strings)}
    if turn.max_tokens is not None:
        changes["max_tokens"] = min(turn.max_tokens, params.max_tokens) if fixed else turn.max_tokens
    if not fixed:
        changes |= {name: value for name in ("temperature", "top_p") if (value := getattr(turn, name)) is not None}
    try:
        return replace(params, **changes)
    except ValueError as error:
        raise CannotAnswer(str(error)) from error


def record(trajectory: Trajectory) -> dict[str, Any]:
    """An episode as plain values, whole: what `burnish serve --record` writes, a line each."""
    return {
        "group": trajectory.group,
        "sample": trajectory.sample,
        "status": str(trajectory.status),
        "error": trajectory.error,
        "rewards": trajectory.rewards,
        "reward": trajectory.reward,
        "prompt_length": trajectory.prompt_length,
        "forks": trajectory.forks,
        "ids": trajectory.ids.tolist(),
        "sampled": trajectory.sampled.astype(int).tolist(),
        "sampler_logps": trajectory.sampler_logps.tolist(),
        "versions": trajectory.versions.tolist(),
        "messages": trajectory.messages,
    }


def _rendered(agent: ConversationAgentBase, context: EpisodeContext) -> list[int]:
    try:
        return opening(agent, context.template).ids
    except ValueError as error:  # a conversation that the template can't write
        raise CannotAnswer(f"the chat template refuses this conversation: {error}") from error


def _reply(action: Action, out: Completion, num_prompt_tokens: int, turn: Turn, name: str) -> Reply:
    text = action.text
    for stop in turn.stop_strings:
        text = text.partition(stop)[0]
    calls: list[ToolCall] = action.tool_calls
    if not calls or any(call.error is not None for call in calls):
        return Reply(action.text, text, out, num_prompt_tokens)
    named = tuple((f"call-{name}-{index}", call) for index, call in enumerate(calls))
    return Reply(action.text, text.partition("<tool_call>")[0].strip() if "<tool_call>" in text else "", out, num_prompt_tokens, named)


def _call_names(message: Message) -> list[tuple[str, str]]:
    return [(call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ()]


def _is_same(said: _Said, message: Message) -> bool:
    ids = tuple(call.get("id", "") for call in message.get("tool_calls") or ())
    return said.call_ids == ids and said.content == message["content"]


__all__ = ["Finish", "Session", "Sessions", "asked_params", "record", "total"]
