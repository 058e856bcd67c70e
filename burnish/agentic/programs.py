"""Agents that are programs of their own: one is started for each episode, with an address and a key, and asks the model there as it would
ask any other. What it asks is trained (`sessions.py`); its code isn't changed for it.

Owns a program's start, its end and its reward, and the endpoint in front of the engine under training: one for each event loop, on this
machine only, open while a program plays. A program is only ever answered as its own episode. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.agentic.agents import ConversationAgentBase, ModelAgent
from burnish.agentic.processes import kill_tree
from burnish.agentic.sessions import Finish, Session, total
from burnish.agentic.trajectory import EpisodeContext
from burnish.agentic.worker_process import describe
from burnish.config.errors import CallError, UserError, suggest
from burnish.rollout.server.turns import CannotAnswer, Reply, Turn
from burnish.text.tool_parsers import PARSERS
from burnish.types import Completion, SamplingParams

_TOLD_BYTES = 2000
"""How much of a command's last words is shown where it failed."""


class ProgramEnvironment(Session):
    """An episode that a program plays.

    program: a function, plain (then it runs in a worker process) or `async`, or a command as a list of words. A function gets by keyword
    what it names: `base_url` and `api_key`, as the `openai` package takes them; `session_url`, which is that without `/v1`, as `anthropic`
    takes it; any column of the row, `prompt` as messages. It returns its reward: a number, numbers by name that are added up, or None,
    where reward functions judge. A command finds address and key in the variables in which both packages look for them, the row as JSON on
    its input; it exits with 0, and may before post `{"reward": …}` to `$BURNISH_SESSION_URL/finish`, as a function may that returns None.
    tool_parser: the format that the model writes tool calls in.

    The program's end is the episode's; an exception, or another exit code, is an error of the environment. What ends the episode from
    outside (limits on turns, tokens and time) ends the program too: it is killed. `step_timeout_s` counts between two requests of it.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        *,
        program: Callable[..., Any] | Sequence[str],
        tool_parser: str = "qwen",
        max_steps: int | None = None,
    ) -> None:
        if tool_parser not in PARSERS:
            known = suggest(tool_parser, PARSERS) or f"; known: {', '.join(PARSERS)}"
            raise UserError(f"there is no tool parser {tool_parser!r}{known}")
        if not callable(program) and (isinstance(program, str) or not program or not all(isinstance(word, str) for word in program)):
            raise UserError(f"a program is a function or a command as a list of words, got {program!r}")
        super().__init__(task, "", PARSERS[tool_parser], fixed=True, max_steps=max_steps)
        self.program = program
        self.decode: Callable[[Sequence[int]], str] = lambda ids: ""
        self.told: Mapping[str, float | None] | None = None
        self._door: _Door | None = None
        self._running: asyncio.Task[None] | None = None

    def stage(self, agent: ConversationAgentBase, context: EpisodeContext) -> tuple[ConversationAgentBase, EpisodeContext]:
        if type(agent) is not ModelAgent or agent.system_prompt is not None or agent.remembers is not None:
            raise UserError("a program keeps its conversation itself: leave the agent and its options as they are by default")
        self.decode = context.decode
        return super().stage(agent, context)

    async def _initial_observation(self) -> Any:
        (step, draw), sample, *_ = self.episode
        self.name = f"{step}-{draw}-{sample}"  # an attempt at it that is played again shows the model the same ids of calls
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._door = _Door.here(self)
        self._running = asyncio.create_task(self._run(await self._door.address(self), self._door.key))
        return await super()._initial_observation()

    async def close(self) -> None:
        if self._door is None:
            return
        self.over.set_result(None)
        try:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
        finally:
            await self._door.leave(self)

    async def answer(self, turn: Turn) -> Reply:
        """To a request of the program."""
        reply = None if self.told is not None else await self.ask(turn, self.over)
        if reply is None:
            why = self.refused or "its session is finished, or its limits on turns, tokens or time are reached"
            raise CannotAnswer(f"the episode has ended: {why}", 409)
        return reply

    async def _run(self, url: str, key: str) -> None:
        """The program, to its end, which it tells the episode."""
        try:
            returned = await (self._called(url, key) if callable(self.program) else self._started(self.program, url, key))
            self.inbox.put_nowait(Finish(self.told or {} if returned is None else _rewards(returned)))
        except CallError as failure:
            self.inbox.put_nowait(Finish({}, failure))
        except Exception as error:
            self.inbox.put_nowait(Finish({}, CallError(*describe(error))))

    async def _called(self, url: str, key: str) -> Any:
        assert callable(self.program)
        given = {**self.task, "base_url": f"{url}/v1", "session_url": url, "api_key": key}
        parameters = inspect.signature(self.program).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return await self.calls(self.program, given, timeout_s=math.inf, name="the program")  # its limits are the episode's

    async def _started(self, command: Sequence[str], url: str, key: str) -> None:
        """A process, with all that it starts."""
        addresses = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        variables = os.environ | addresses | {"BURNISH_SESSION_URL": url}
        with tempfile.TemporaryFile() as said:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=said, stderr=said, env=variables, start_new_session=True
            )
            try:
                await process.communicate(json.dumps(self.task, default=str).encode())
            finally:
                if process.returncode is None:
                    kill_tree(process.pid)
                    await process.wait()
            if process.returncode:
                said.seek(-min(said.seek(0, os.SEEK_END), _TOLD_BYTES), os.SEEK_END)
                raise CallError(f"{command[0]} ended with {process.returncode}", said.read().decode(errors="replace"))


class _Door:
    """The endpoint of an event loop's programs, and who answers there: each session is the episode of the program that has its address."""

    model = "policy"

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        loop = asyncio.get_running_loop()
        self.key = secrets.token_urlsafe(24)
        self._decode = decode
        self._programs: dict[str, ProgramEnvironment] = {}
        self._empty = asyncio.Event()
        self._address: asyncio.Future[str] = loop.create_future()
        self._serving = loop.create_task(self._serve())

    @staticmethod
    def here(program: ProgramEnvironment) -> _Door:
        """The open one of this loop, or a new one. It stays open until `leave`."""
        loop = asyncio.get_running_loop()
        door = _doors.get(loop)
        if door is None:
            door = _doors[loop] = _Door(program.decode)
        door._programs[secrets.token_hex(8)] = program
        return door

    async def address(self, program: ProgramEnvironment) -> str:
        """Where the program asks. Raises what kept the endpoint from listening."""
        await asyncio.wait({self._serving, self._address}, return_when=asyncio.FIRST_COMPLETED)
        if not self._address.done():
            self._serving.result()
        (name,) = (name for name, one in self._programs.items() if one is program)
        return f"{self._address.result()}/sessions/{name}"

    async def leave(self, program: ProgramEnvironment) -> None:
        """The last one closes it."""
        self._programs = {name: one for name, one in self._programs.items() if one is not program}
        if not self._programs:
            del _doors[asyncio.get_running_loop()]  # before anything is awaited: whoever comes now opens another
            self._empty.set()
            with contextlib.suppress(UserError):  # it never listened, and `address` has said why
                await self._serving

    async def _serve(self) -> None:
        try:
            from burnish.rollout.server.app import make_app
            from burnish.rollout.server.listen import Guards, listening
        except ImportError as error:
            raise UserError('programs need the extra `serve`: pip install "burnish[serve]"') from error
        async with listening(make_app(self), Guards(self.key, connections=1 << 16)) as (host, port):
            self._address.set_result(f"http://{host}:{port}")
            await self._empty.wait()

    def encode(self, text: str) -> list[int]:
        raise CannotAnswer("only conversations are answered here", 404)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(ids)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, seed_path: Sequence[int] | None) -> Completion:
        raise CannotAnswer("only conversations are answered here", 404)

    async def chat(self, session: str | None, turn: Turn) -> Reply:
        return await self._program(session).answer(turn)

    async def finish(self, session: str, rewards: Mapping[str, float | None]) -> Mapping[str, Any]:
        program = self._program(session)
        program.told = dict(rewards)
        return {"session": session, "reward": total(rewards)}

    def _program(self, session: str | None) -> ProgramEnvironment:
        if session not in self._programs:
            raise CannotAnswer("no episode plays at this address: a program asks at the one that it was given", 404)
        return self._programs[session]


_doors: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Door] = weakref.WeakKeyDictionary()


def _rewards(returned: Any) -> dict[str, float | None]:
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    for value in named.values():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise TypeError(f"a program returns a finite number, numbers by name, or None; got {returned!r:.80}")
    return {name: None if value is None else float(value) for name, value in named.items()}


__all__ = ["ProgramEnvironment"]
