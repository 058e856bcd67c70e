"""What vLLM documents of its HTTP interface, as far as `rollout.vllm` speaks it, on top of a scripted engine: a protocol double.

It samples nothing; it keeps the rules (context, stop ids, adapters by name, version labels, errors with their status) and counts. Run as a
program it is a server of its own process, for tests that kill one: `python vllm_double.py --port N [--latency S]`.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def reply(ids: list[int], seed: int | None, name: str, version: str, vocabulary: int) -> list[int]:
    """A function of what a model's answer may depend on."""
    start = sum(ids) + (seed or 0) % 1000 + len(name) + len(version)
    return [(start + 7 * i) % vocabulary for i in range(512)]


@dataclass
class Double:
    """One server. slots: requests that are answered at one time, each for `latency_s`. fails: path → statuses that it answers next."""

    latency_s: float = 0.0
    slots: int = 64
    context: int = 128
    vocabulary: int = 199
    version: str = "default"
    adapters: dict[str, str] = field(default_factory=dict)
    most_adapters: int = 0
    reloaded: list[str] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0
    aborted: int = 0
    fails: dict[str, list[int]] = field(default_factory=dict)
    healthy: bool = True
    token: str | None = None

    def __post_init__(self) -> None:
        self.seats = asyncio.Semaphore(self.slots)

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/collective_rpc", self.rpc, methods=["POST"]),
            Route("/update_weight_version", self.label, methods=["POST"]),
            Route("/weight_info", self.info),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def failure(self, request: HttpRequest) -> Response | None:
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        planned = self.fails.get(request.url.path)
        return refusal(planned.pop(0), "planned") if planned else None

    async def health(self, request: HttpRequest) -> Response:
        if not self.healthy:
            await asyncio.sleep(60)
        return Response(status_code=200)

    async def models(self, request: HttpRequest) -> Response:
        return self.failure(request) or JSONResponse({"data": [{"id": name} for name in ["base", *self.adapters]]})

    async def load(self, request: HttpRequest) -> Response:
        body = await request.json()
        if failed := self.failure(request):
            return failed
        if not Path(body["lora_path"]).is_dir():
            return refusal(404, f"no adapter at {body['lora_path']}")
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return Response("Success: LoRA adapter added")

    async def unload(self, request: HttpRequest) -> Response:
        body = await request.json()
        if body["lora_name"] not in self.adapters:
            return refusal(404, "no such adapter")
        del self.adapters[body["lora_name"]]
        return Response("Success: LoRA adapter removed")

    async def rpc(self, request: HttpRequest) -> Response:
        body = await request.json()
        if failed := self.failure(request):
            return failed
        assert body["method"] == "reload_weights", body
        if not Path(body["kwargs"]["weights_path"]).is_dir():
            return refusal(500, "no weights there")
        self.reloaded.append(body["kwargs"]["weights_path"])
        return JSONResponse({"results": [None]})

    async def label(self, request: HttpRequest) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def info(self, request: HttpRequest) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def reset(self, request: HttpRequest) -> Response:
        return JSONResponse({"success": True})

    async def generate(self, request: HttpRequest) -> Response:
        body = await request.json()
        self.begun += 1
        if failed := self.failure(request):
            return failed
        name = body["model"] or "base"
        if name not in {"base", *self.adapters}:
            return refusal(404, f"The model `{name}` does not exist.")
        if len(body["token_ids"]) >= self.context:
            return refusal(400, "The decoder prompt is longer than the maximum model length")
        try:
            async with self.seats:
                await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if await request.is_disconnected():
            self.aborted += 1
            return Response(status_code=499)
        choice = self.choice(body, name)
        self.answered.append(body)
        if not body.get("stream"):
            return JSONResponse({"request_id": "r", "choices": [choice]})
        return StreamingResponse(self.events(choice), media_type="text/event-stream")

    async def events(self, choice: dict[str, Any]) -> Any:
        for at in range(len(choice["token_ids"])):
            last = at == len(choice["token_ids"]) - 1
            part = {"token_ids": [choice["token_ids"][at]], "logprobs": {"content": [choice["logprobs"]["content"][at]]}}
            yield f"data: {json.dumps({'choices': [part | {'finish_reason': choice['finish_reason'] if last else None}]})}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    def choice(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        sampling = body["sampling_params"]
        said = reply(body["token_ids"], sampling["seed"], name, self.version, self.vocabulary)
        ids = said[: min(sampling["max_tokens"], self.context - len(body["token_ids"]))]
        end = next((n for n, token in enumerate(ids, 1) if token in sampling["stop_token_ids"]), None)
        ids = ids[: end or len(ids)]
        kept = sampling["top_k"] or 1
        entries = []
        for token in ids:
            top = [{"token_id": token + i, "logprob": -1.0986123 if kept == 3 else -0.5} for i in range(kept)]
            top += [{"token_id": 190 + i, "logprob": -9999.0} for i in range(max(0, sampling["logprobs"] - kept))]
            entries.append({"token_id": token, "logprob": top[0]["logprob"], "top_logprobs": top})
        return {
            "index": 0,
            "finish_reason": "stop" if end else "length",
            "token_ids": ids,
            "logprobs": {"content": entries},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


@contextlib.contextmanager
def served(double: Any) -> Iterator[str]:
    """The address of a double that runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(double.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--vocabulary", type=int, default=199)
    args, _ = parser.parse_known_args()

    async def serve() -> None:
        double = Double(latency_s=args.latency, vocabulary=args.vocabulary)
        config = uvicorn.Config(double.app(), host="127.0.0.1", port=args.port, log_level="warning", lifespan="off")
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
