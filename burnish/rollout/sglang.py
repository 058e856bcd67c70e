"""SGLang servers as an engine: what is said to one, and how burnish starts one itself.

Owns the fields of SGLang's own HTTP interface: `/generate` (ids in, ids and log-probs out), `/update_weights_from_disk`, adapters that are
loaded and unloaded while it serves. Everything that isn't SGLang's is `rollout.remote`. Written after its documentation and tested against
a double of that, as the server needs a GPU: docs/engines.md says what that leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.rollout.draft import Draft
from burnish.rollout.remote.dialect import ServerSetup, WrongWeights, seed_of
from burnish.rollout.remote.editions import PUSHED, START, Edition
from burnish.rollout.remote.http import Http, Refused, ServerGone
from burnish.types import SamplingParams


@dataclass(frozen=True)
class SglangDialect:
    """See `remote.dialect.Dialect`."""

    setup: ServerSetup

    name = "sglang"

    def command(self, port: int, index: int) -> tuple[Sequence[str], Mapping[str, str]]:
        setup = self.setup
        command = [setup.python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), "--model-path", str(setup.model)]
        command += ["--context-length", str(setup.context), "--max-running-requests", str(setup.slots)]
        # Seeds of requests count under this switch only, and with it an answer doesn't depend on what shares its batch.
        command += ["--enable-deterministic-inference"]
        if setup.dtype != "auto":
            command += ["--dtype", setup.dtype]
        if setup.adapter_rank is not None:
            command += [
                "--enable-lora",
                "--max-lora-rank",
                str(setup.adapter_rank),
                "--max-loaded-loras",
                "2",
                "--max-loras-per-batch",
                "2",
            ]
        if setup.token is not None:
            command += ["--api-key", setup.token]
        return [*command, *setup.arguments], setup.environment_of(index)

    def check(self, params: SamplingParams) -> None:
        if not params.truncates or self.setup.support == "biased":
            return
        if params.top_p < 1.0 or params.min_p > 0.0:
            raise ValueError(
                f"top_p {params.top_p}, min_p {params.min_p}: an SGLang server doesn't say which ids these keep, so what is trained would "
                "be another distribution than was sampled. Use top_k, or accept that with rollout.options.support=biased"
            )
        if params.top_k > self.setup.max_kept:
            raise ValueError(f"top_k {params.top_k} is more than rollout.max_kept {self.setup.max_kept}: raise that")

    def keeps(self, params: SamplingParams) -> bool:
        return params.truncates and self.setup.support == "kept"

    async def is_healthy(self, http: Http, *, timeout_s: float) -> bool:
        await http.get("/health", timeout_s=timeout_s)
        return True

    async def sample(self, http: Http, draft: Draft, edition: Edition) -> None:
        """Streamed where the request has stop strings, which are found here. Every event repeats what came before it."""
        body, timeout_s = self._body(draft, edition), self.setup.timeout_s
        if not draft.request.params.stop_strings:
            self._take(draft, await http.post("/generate", body, timeout_s=timeout_s), edition, http)
            return
        async for event in http.events("/generate", body | {"stream": True}, timeout_s=timeout_s):
            self._take(draft, event, edition, http)
            if draft.stop is not None:
                return

    def _body(self, draft: Draft, edition: Edition) -> dict[str, Any]:
        params = draft.request.params
        sampling = {
            "max_new_tokens": draft.budget,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": seed_of(draft.request.seed_path) % 2**31,
        }
        body: dict[str, Any] = {"input_ids": list(draft.request.prompt_ids), "sampling_params": sampling, "return_logprob": True}
        if self.keeps(params):
            body["top_logprobs_num"] = params.top_k
        if edition.kind == "adapter" and edition.folder is not None:
            body["lora_path"] = edition.name
        return body

    def _take(self, draft: Draft, answer: Mapping[str, Any], edition: Edition, http: Http) -> None:
        meta = answer["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise ServerGone(f"{http.url} aborted a request: {reason.get('message', 'no reason given')}")
        if edition.kind == "model" and not edition.is_labelled(meta.get("weight_version", edition.name)):
            raise WrongWeights(f"{http.url} sampled from {meta['weight_version']}, expected {edition.name}")
        start = len(draft.ids)
        entries = meta["output_token_logprobs"][start:]
        if not entries:
            return
        ids, logps = np.array([entry[1] for entry in entries], np.int32), np.array([entry[0] for entry in entries], np.float32)
        kept = ids[:, None]
        if self.keeps(draft.request.params):
            logps, kept = _renormalised(entries, meta["output_top_logprobs"][start:])
        draft.extend(ids, np.minimum(logps, 0.0), kept, version=edition.version, decode_text=self.setup.decode_text)

    async def prepare(self, http: Http, edition: Edition) -> None:
        if edition.kind != "adapter":
            return
        body = {"lora_name": edition.name, "lora_path": str(edition.folder)}
        answer = await _done(http, "/load_lora_adapter", body, timeout_s=self.setup.timeout_s, but=edition.name)
        if edition.name not in answer.get("loaded_adapters", {edition.name: ""}):
            raise WrongWeights(f"{http.url} has the adapters {list(answer['loaded_adapters'])} after {edition.name} was loaded")

    async def activate(self, http: Http, edition: Edition) -> None:
        if edition.kind != "model" or (edition.name == START and await self._has(http, edition)):
            return
        body = {"model_path": str(edition.folder), "weight_version": edition.name, "flush_cache": True}
        await _done(http, "/update_weights_from_disk", body, timeout_s=self.setup.timeout_s)

    async def _has(self, http: Http, edition: Edition) -> bool:
        """As an answer of one token says; one without a label says nothing."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        meta = (await http.post("/generate", body, timeout_s=self.setup.timeout_s))["meta_info"]
        return edition.is_labelled(meta.get("weight_version", PUSHED))

    async def retire(self, http: Http, edition: Edition) -> None:
        if edition.kind == "adapter" and edition.folder is not None:
            await _done(http, "/unload_lora_adapter", {"lora_name": edition.name}, timeout_s=self.setup.timeout_s, but="")


async def _done(http: Http, path: str, body: Mapping[str, Any], *, timeout_s: float, but: str | None = None) -> Mapping[str, Any]:
    """The answer, which says itself whether it succeeded. but: given where an adapter that is there already, or gone, is fine."""
    try:
        answer = await http.post(path, body, timeout_s=timeout_s)
    except Refused as error:
        if but is not None and ("already" in str(error) or "not found" in str(error) or but == ""):
            return {}
        raise
    if isinstance(answer, Mapping) and answer.get("success", True) is False:
        message = str(answer.get("error_message") or answer.get("message"))
        if but is None or not ("already" in message or but == ""):
            raise Refused(200, f"{http.url}{path}: {message}")
        return {}
    return answer if isinstance(answer, Mapping) else {}


def _renormalised(entries: Sequence[Any], tops: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs over the k likeliest ids, and these ids: int32[N, K]. The server's own are over the whole vocabulary."""
    logps, kept = [], []
    for entry, top in zip(entries, tops, strict=True):
        found = {int(token): float(logp) for logp, token, *_ in top}
        found[int(entry[1])] = float(entry[0])
        logps.append(float(entry[0]) - float(np.logaddexp.reduce(np.array(list(found.values())))))
        kept.append(list(found))
    width = max(map(len, kept))
    return np.array(logps, np.float32), np.array([row + [-1] * (width - len(row)) for row in kept], np.int32)


__all__ = ["SglangDialect"]
