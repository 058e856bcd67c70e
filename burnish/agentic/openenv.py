"""Environments that another process serves over OpenEnv's WebSocket protocol. Needs the extra `openenv` (the package `websockets`).

Owns the wire: one socket is one session; `reset`, `step`, `state` and `close` go out, an `observation` or an `error` comes back, all JSON.
What a reply means as an action is said by `action_key`, what of an observation is shown by `observation_key`. Methods are coroutines.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from burnish.agentic.agents import Action
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.config.errors import UserError

_MAX_BYTES = 2**24


class OpenEnv(BaseTaskEnv):
    """A session with an OpenEnv server.

    url: of the server (`ws://host:port`; `http://` is taken as that); a row's column of that name comes first. action_key: the field of
    an action that the reply is sent in; None: the reply is the action, as JSON, and one that can't be read is told the model. action:
    what else every action has. observation_key: the field that is shown; None: the whole observation as JSON. A row's column `reset`
    goes with the reset, beside the seed. secure sockets (`wss://`, `https://`) work as well.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        *,
        url: str | None = None,
        action_key: str | None = "message",
        action: Mapping[str, Any] = {},
        observation_key: str | None = None,
        open_timeout_s: float = 20.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(task, max_steps=max_steps)
        parts = urlsplit(task.get("url", url) or "")
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        if scheme not in ("ws", "wss") or not parts.netloc:
            raise UserError(f"OpenEnv needs the server's `url`, e.g. ws://127.0.0.1:8000; got {task.get('url', url)!r}")
        path = parts.path.rstrip("/")
        self.address = f"{scheme}://{parts.netloc}{path if path.endswith('/ws') else path + '/ws'}"
        self.action_key, self.action, self.observation_key, self.open_timeout_s = action_key, dict(action), observation_key, open_timeout_s
        self._socket: Any = None

    async def _initial_observation(self) -> str:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise UserError(f'OpenEnv needs the extra `openenv`: pip install "burnish[openenv]" ({error})') from error
        self._socket = await connect(self.address, open_timeout=self.open_timeout_s, max_size=_MAX_BYTES, proxy=None)
        data = await self._asked("reset", {"seed": self.task["seed"], **self.task.get("reset", {})})
        return self._shown(data)

    async def _step_impl(self, action: Action) -> EnvStepResult:
        if self.action_key is not None:
            sent = {**self.action, self.action_key: action.text}
        else:
            try:
                read = json.loads(action.text)
            except ValueError as error:
                return EnvStepResult(f"error: an action must be JSON: {error}", None, False)
            if not isinstance(read, dict):
                return EnvStepResult("error: an action must be a JSON object", None, False)
            sent = {**self.action, **read}
        data = await self._asked("step", sent)
        reward = data.get("reward")
        return EnvStepResult(self._shown(data), None if reward is None else float(reward), bool(data.get("done")))

    async def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError, RuntimeError, Exception):  # it may be gone already; nothing is waited for
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's answer to a message; its errors are raised in its words."""
        await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(await self._socket.recv())
        if answer.get("type") == "error":
            said = answer.get("data") or {}
            raise RuntimeError(f"the server refused {kind}: {said.get('message')} ({said.get('code')})")
        if answer.get("type") != "observation" or not isinstance(answer.get("data"), dict):
            raise RuntimeError(f"the server answered {kind} with {str(answer)!r:.200}, expected an observation")
        return answer["data"]

    def _shown(self, data: Mapping[str, Any]) -> str:
        seen = data.get("observation")
        if self.observation_key is not None:
            if not isinstance(seen, Mapping) or self.observation_key not in seen:
                raise RuntimeError(f"the observation has no {self.observation_key!r}: {str(seen)!r:.200}")
            seen = seen[self.observation_key]
        return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)


__all__ = ["OpenEnv"]
