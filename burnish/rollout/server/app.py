"""The endpoint's routes: `/v1/chat/completions`, `/v1/completions`, `/v1/messages`, `/v1/models`, `/inference/v1/generate`, and sessions;
where weights may be changed, `/weights/…`.

Owns which address means what and how an error looks to each kind of client; fields are `openai_api` and `anthropic_api`, who may call
`guard`, who answers `turns.Backend`. All routes also stand under `/sessions/NAME`: what is asked there is recorded as that session, which
`POST /sessions/NAME/finish` ends.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from burnish.rollout.server import anthropic_api, openai_api
from burnish.rollout.server.turns import Backend, CannotAnswer
from burnish.rollout.server.weights import TakesWeights, Taking, takings
from burnish.types import StopReason

DEFAULT_TOKENS = 256
KEEP_ALIVE_S = 10.0
"""A stream says at least this often that it is alive, while the model speaks."""

Answer = Callable[[Request, Mapping[str, Any]], Awaitable[Response]]


def make_app(backend: Backend, weights: TakesWeights | None = None) -> Starlette:
    """The application, without any guard. weights: who takes new ones; None: nobody does."""
    routes = _Routes(backend, weights)
    api = [
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/chat/completions", routes.answering(routes.chat), methods=["POST"]),
        Route("/v1/completions", routes.answering(routes.completion), methods=["POST"]),
        Route("/v1/messages", routes.answering(routes.messages), methods=["POST"]),
        Route("/inference/v1/generate", routes.answering(routes.generate), methods=["POST"]),
    ]
    finish = Route("/finish", routes.answering(routes.finish), methods=["POST"])
    health = Route("/health", _health, methods=["GET"])
    changes: list[Route] = []
    if weights is not None:
        changes = [Route(f"/weights/{name}", routes.taking(take), methods=["POST"]) for name, take in takings(weights).items()]
        changes.append(Route("/weights", routes.editions, methods=["GET"]))
    return Starlette(routes=[health, *changes, *api, Mount("/sessions/{session}", routes=[finish, *api])])


async def _health(request: Request) -> Response:
    return Response(status_code=200)


class _Routes:
    def __init__(self, backend: Backend, weights: TakesWeights | None) -> None:
        self._backend, self._weights = backend, weights

    def answering(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """The route, for a body that is a JSON object; what goes wrong is told in the words of the client's interface."""

        async def route(request: Request) -> Response:
            try:
                try:
                    raw = await request.body()
                    body = json.loads(raw.decode())
                    if b"\\u" in raw:
                        json.dumps(body, ensure_ascii=False).encode()  # half a pair of surrogates is no text: nobody could encode it
                except (ValueError, RecursionError) as error:
                    raise CannotAnswer(f"the body isn't JSON: {error}") from error
                if not isinstance(body, dict):
                    raise CannotAnswer(f"the body must be a JSON object, got {type(body).__name__}")
                return await answer(request, body)
            except CannotAnswer as error:
                return _error(request, str(error), error.status)
            except ValueError as error:  # the engine's: a prompt that can't run
                return _error(request, str(error), 400)

        return route

    def taking(self, take: Taking) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request, body: Mapping[str, Any]) -> Response:
            await take(body)
            return JSONResponse({})

        return self.answering(answer)

    async def editions(self, request: Request) -> Response:
        assert self._weights is not None, "the route is there where weights are taken"
        return JSONResponse({"edition": self._weights.edition, "prepared": self._weights.prepared})

    async def models(self, request: Request) -> Response:
        model = {"id": self._backend.model, "object": "model", "owned_by": "burnish", "created": 0}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request, body: Mapping[str, Any]) -> Response:
        turn, backend = openai_api.read_chat(body), self._backend
        asked = backend.chat(_session(request), turn)
        if body.get("stream"):
            return await _stream(asked, lambda reply: openai_api.chat_events(reply, body, backend.model, backend.decode))
        return JSONResponse(openai_api.chat_answer(await asked, body, backend.model, backend.decode))

    async def messages(self, request: Request, body: Mapping[str, Any]) -> Response:
        asked = self._backend.chat(_session(request), anthropic_api.read_messages(body))
        if body.get("stream"):
            return await _stream(asked, lambda reply: anthropic_api.events(reply, self._backend.model))
        return JSONResponse(anthropic_api.answer(await asked, self._backend.model))

    async def completion(self, request: Request, body: Mapping[str, Any]) -> Response:
        _refuse_session(request)
        prompt, params, seed = openai_api.read_completion(body, default_tokens=DEFAULT_TOKENS)
        ids = self._backend.encode(prompt) if isinstance(prompt, str) else prompt
        out = await self._backend.sample(ids, params, None if seed is None else (seed,))
        answer = openai_api.completion_answer(out, ids, body, self._backend.model, self._backend.decode)
        if body.get("stream"):
            return StreamingResponse(openai_api.completion_events(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def generate(self, request: Request, body: Mapping[str, Any]) -> Response:
        """vLLM's route: ids in, ids and log-probs out. Beyond vLLM's: `seed_path` in place of a seed, `kept_ids` of truncated sampling."""
        _refuse_session(request)
        ids, given = body.get("token_ids"), body.get("sampling_params")
        if not isinstance(ids, list) or not all(type(index) is int and index >= 0 for index in ids) or not isinstance(given, dict):
            raise CannotAnswer("`token_ids` must be a list of ids and `sampling_params` an object")
        params = openai_api.sampling(given, default_tokens=DEFAULT_TOKENS)
        seed, path = openai_api.number(given, "seed", int), given.get("seed_path")
        if path is None:
            path = None if seed is None else (seed,)
        elif not isinstance(path, list) or not all(type(part) is int for part in path):
            raise CannotAnswer("`seed_path` must be a list of whole numbers")
        out = await self._backend.sample(ids, params, path)
        entries = [
            {"token_id": i, "logprob": logp, "top_logprobs": []} for i, logp in zip(out.ids.tolist(), out.logps.tolist(), strict=True)
        ]
        reason = "length" if out.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"
        choice = {"index": 0, "finish_reason": reason, "token_ids": out.ids.tolist(), "logprobs": {"content": entries}}
        choice["weight_versions"] = _spans(out.versions.tolist())
        if out.kept_ids is not None:
            choice["kept_ids"] = out.kept_ids.tolist()
        if self._weights is not None:
            choice["edition"] = self._weights.edition
        return JSONResponse({"request_id": body.get("request_id"), "model": self._backend.model, "choices": [choice]})

    async def finish(self, request: Request, body: Mapping[str, Any]) -> Response:
        rewards = body.get("rewards", {"reward": body.get("reward")})
        if not isinstance(rewards, dict) or not all(map(_is_reward, rewards.values())):
            raise CannotAnswer("give `reward`, a number or null, or `rewards`, an object of them by name")
        session = _session(request)
        assert session is not None, "the route stands under a session only"
        return JSONResponse(await self._backend.finish(session, rewards))


async def _stream(asked: Awaitable[Any], events: Callable[[Any], Iterator[str]]) -> Response:
    """Events of a reply. What fails before long is an error with its status, as without a stream; after that the stream ends with it."""
    task = asyncio.ensure_future(asked)
    try:
        await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
        if task.done():
            task.result()
    except BaseException:
        task.cancel()
        raise

    async def body() -> AsyncIterator[str]:
        try:
            while not task.done():
                yield ": the model speaks\n\n"
                await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
            try:
                reply = task.result()
            except (CannotAnswer, ValueError) as error:
                yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'invalid_request_error'}})}\n\n"
                return
            for event in events(reply):
                yield event
        finally:
            task.cancel()

    return StreamingResponse(body(), media_type="text/event-stream")


def _is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _session(request: Request) -> str | None:
    return request.path_params.get("session")


def _refuse_session(request: Request) -> None:
    if _session(request) is not None:
        raise CannotAnswer("only conversations are recorded: ask this without /sessions/NAME, or use /v1/chat/completions", 404)


def _error(request: Request, message: str, status: int) -> Response:
    if request.url.path.endswith("/v1/messages"):
        return JSONResponse(anthropic_api.error_body(message), status)
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    """Runs of equal versions, as vLLM says them."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans


__all__ = ["make_app"]
