"""What SGLang documents of its own HTTP interface, as far as `rollout.sglang` speaks it, on top of nothing: a protocol double."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class SglangDouble:
    """One server; it streams what it has so far, again and again, as the real one does."""

    latency_s: float = 0.0
    context: int = 128
    version: str = "default"
    adapters: dict[str, str] = field(default_factory=dict)
    most_adapters: int = 0
    loaded: list[str] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    aborts: int = 0
    refusals: int = 0

    def app(self) -> Starlette:
        post = {"methods": ["POST"]}
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/generate", self.generate, **post),
                Route("/update_weights_from_disk", self.update, **post),
                Route("/load_lora_adapter", self.load, **post),
                Route("/unload_lora_adapter", self.unload, **post),
            ]
        )

    async def health(self, request: HttpRequest) -> Response:
        return Response(status_code=200)

    async def update(self, request: HttpRequest) -> Response:
        body = await request.json()
        if self.refusals or not Path(body["model_path"]).is_dir():
            self.refusals = max(0, self.refusals - 1)
            return JSONResponse({"success": False, "message": "Failed to get weights iterator"}, 400)
        self.loaded.append(body["model_path"])
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def load(self, request: HttpRequest) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if name in self.adapters:
            return JSONResponse({"success": False, "error_message": f"LoRA adapter {name} is already loaded"}, 400)
        self.adapters[name] = body["lora_path"]
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    async def unload(self, request: HttpRequest) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return JSONResponse({"success": False, "error_message": f"LoRA adapter {name} is not loaded"}, 400)
        del self.adapters[name]
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    async def generate(self, request: HttpRequest) -> Response:
        body = await request.json()
        if len(body["input_ids"]) >= self.context:
            return JSONResponse({"error": {"message": "The input is longer than the model's context length"}}, 400)
        await asyncio.sleep(self.latency_s)
        self.answered.append(body)
        if self.aborts:
            self.aborts -= 1
            return JSONResponse({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "out of memory"}}})
        ids = self.reply(body)
        if not body.get("stream"):
            return JSONResponse(self.answer(body, ids))
        return StreamingResponse(self.events(body, ids), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], ids: list[int]) -> Any:
        for count in range(1, len(ids) + 1):
            yield f"data: {json.dumps(self.answer(body, ids[:count]))}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    def reply(self, body: dict[str, Any]) -> list[int]:
        sampling = body["sampling_params"]
        start = sum(body["input_ids"]) + sampling.get("sampling_seed", 0) % 1000 + len(body.get("lora_path", self.version))
        ids = [(start + 7 * i) % 199 for i in range(min(sampling["max_new_tokens"], self.context - len(body["input_ids"])))]
        return ids[: next((n for n, token in enumerate(ids, 1) if token in sampling.get("stop_token_ids", ())), len(ids))]

    def answer(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        meta: dict[str, Any] = {"output_token_logprobs": [[-2.0, token, None] for token in ids], "weight_version": self.version}
        if num := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [[[-2.0, token + i, None] for i in range(num)] for token in ids]
        return {"text": "", "output_ids": ids, "meta_info": meta | {"finish_reason": {"type": "length", "length": len(ids)}}}
