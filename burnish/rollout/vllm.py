"""vLLM servers as an engine: what is said to one, and how burnish starts one itself.

Owns the fields of vLLM's HTTP interface: `/inference/v1/generate` (ids in, ids and log-probs out), adapters that are loaded and unloaded
while it serves, `reload_weights` from a folder, version labels. Everything that isn't vLLM's is `rollout.remote`. A server needs the
switches that `serve_arguments` and `ENVIRONMENT` list; docs/engines.md says why. Tried with vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.rollout.draft import Draft
from burnish.rollout.remote.dialect import ServerSetup, WrongWeights, seed_of
from burnish.rollout.remote.editions import PUSHED, START, Edition
from burnish.rollout.remote.http import Http, Refused, refusing
from burnish.types import SamplingParams

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
"""`/collective_rpc` and `/reset_prefix_cache` are routes of the development mode; adapters may be loaded only where this is allowed."""
MODEL_NAME = "burnish"
NO_LOGP = -9999.0
"""What vLLM writes for a log-prob of minus infinity."""
TIES = 8
"""Ids beyond the k likeliest that are asked for: those that tie with the k-th are kept too."""


@dataclass(frozen=True)
class VllmDialect:
    """See `remote.dialect.Dialect`."""

    setup: ServerSetup

    name = "vllm"

    def command(self, port: int, index: int) -> tuple[Sequence[str], Mapping[str, str]]:
        setup = self.setup
        command = [setup.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        secret = {} if setup.token is None else {"VLLM_API_KEY": setup.token}  # not on the command line, which everybody can read
        return [*command, *self.serve_arguments(), *setup.arguments], {**ENVIRONMENT, **secret, **setup.environment_of(index)}

    def serve_arguments(self) -> list[str]:
        """What a server must be started with, besides host and port, to be an engine of ours."""
        arguments = ["--model", str(self.setup.model), "--served-model-name", MODEL_NAME, "--enable-scale-out"]
        arguments += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(self.setup.max_kept), "--generation-config", "vllm"]
        arguments += ["--max-model-len", str(self.setup.context), "--max-num-seqs", str(self.setup.slots), "--dtype", self.setup.dtype]
        if self.setup.adapter_rank is not None:
            rank = next((size for size in (8, 16, 32, 64, 128, 256) if size >= self.setup.adapter_rank), self.setup.adapter_rank)
            arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "2"]
        return arguments

    def check(self, params: SamplingParams) -> None:
        if self.keeps(params) and params.top_k > self.setup.max_kept - TIES:
            raise ValueError(
                f"top_k {params.top_k} needs a kept set of up to {params.top_k + TIES} ids, and rollout.max_kept is "
                f"{self.setup.max_kept}: raise that"
            )

    def keeps(self, params: SamplingParams) -> bool:
        return params.truncates and self.setup.support == "kept"

    async def is_healthy(self, http: Http, *, timeout_s: float) -> bool:
        await http.get("/health", timeout_s=timeout_s)
        return True

    async def sample(self, http: Http, draft: Draft, edition: Edition) -> None:
        """Streamed where the request has stop strings: they are found here, in the text that the trainer's tokenizer gives."""
        body = self._body(draft, edition)
        try:
            if not draft.request.params.stop_strings:
                self._take(draft, (await http.post("/inference/v1/generate", body, timeout_s=self.setup.timeout_s))["choices"][0], edition)
                return
            async for event in http.events("/inference/v1/generate", body | {"stream": True}, timeout_s=self.setup.timeout_s):
                for choice in event["choices"]:
                    self._take(draft, choice, edition)
                if draft.stop is not None:
                    return
        except Refused as error:
            if error.status == 404:  # an adapter that it doesn't know: a server that was started anew
                raise WrongWeights(f"{http.url} has no {_served(edition)}: {error}") from error
            raise

    def _body(self, draft: Draft, edition: Edition) -> dict[str, Any]:
        params = draft.request.params
        kept = self.keeps(params)
        top_k = min(params.top_k or self.setup.max_kept, self.setup.max_kept - TIES) if kept else params.top_k
        sampling = {
            "max_tokens": draft.budget,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": top_k if params.temperature > 0 else 0,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,  # what ends a turn is the request's to say
            "logprobs": top_k + TIES if kept else 0,
            "detokenize": False,
            "seed": seed_of(draft.request.seed_path) if params.temperature > 0 else None,
        }
        # The salt keeps what was cached under other weights from ever being found, whatever the server forgets.
        return {
            "model": _served(edition),
            "token_ids": list(draft.request.prompt_ids),
            "sampling_params": sampling,
            "cache_salt": edition.name,
        }

    def _take(self, draft: Draft, choice: Mapping[str, Any], edition: Edition) -> None:
        """Enter what one answer, or one event, brings."""
        spans = choice.get("weight_versions") or ()
        if self.setup.kind == "model" and not all(edition.is_labelled(span["version"]) for span in spans):
            raise WrongWeights(f"sampled from {spans}, expected {edition.name}")
        ids = choice["token_ids"] or []
        if not ids:
            return
        entries = choice["logprobs"]["content"]
        if len(entries) != len(ids):
            raise WrongWeights(f"{len(ids)} ids came with {len(entries)} log-probs")
        logps = np.minimum(np.array([entry["logprob"] for entry in entries], np.float32), 0.0)
        kept = self._kept(entries) if self.keeps(draft.request.params) else np.asarray(ids, np.int32)[:, None]
        draft.extend(np.asarray(ids, np.int32), logps, kept, version=edition.version, decode_text=self.setup.decode_text)

    def _kept(self, entries: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32[N, K], -1 where nothing: the ids that had any probability, since the log-probs are those after truncation."""
        rows = []
        for entry in entries:
            found = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"] if top["logprob"] > NO_LOGP}
            found[entry["token_id"]] = entry["logprob"]
            mass = float(np.exp(np.array(list(found.values()), np.float64)).sum())
            if mass < 0.99:
                raise ValueError(
                    f"the kept set has {len(found)} ids with {mass:.3f} of the probability: more tie than the server shows. Use top_k "
                    f"below {self.setup.max_kept - TIES}, or accept the bias with `support: biased`"
                )
            rows.append(list(found))
        width = max(map(len, rows))
        return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)

    async def prepare(self, http: Http, edition: Edition) -> None:
        if edition.kind != "adapter":
            return
        known = {model["id"] for model in (await http.get("/v1/models", timeout_s=self.setup.timeout_s))["data"]}
        if edition.name not in known:
            body = {"lora_name": edition.name, "lora_path": str(edition.folder)}
            with refusing(500):  # how it says that it can't read one
                await http.post("/v1/load_lora_adapter", body, timeout_s=self.setup.timeout_s)

    async def activate(self, http: Http, edition: Edition) -> None:
        """An adapter is used by its name, so there is nothing to do; a model's weights are read in place of the old ones.

        While they are read the label is that of no edition: should that be cut short, nobody takes what is there for its start.
        """
        if edition.kind != "model" or (edition.name == START and await self._has(http, edition)):
            return
        folder, timeout_s = {"weights_path": str(edition.folder)}, self.setup.timeout_s
        await http.post("/update_weight_version", {"new_version": f"{PUSHED}changing"}, timeout_s=timeout_s)
        with refusing(500):
            await http.post("/collective_rpc", {"method": "reload_weights", "kwargs": folder}, timeout_s=timeout_s)
        await http.post("/update_weight_version", {"new_version": edition.name}, timeout_s=timeout_s)
        await http.post("/reset_prefix_cache", timeout_s=timeout_s)

    async def _has(self, http: Http, edition: Edition) -> bool:
        return edition.is_labelled((await http.get("/weight_info", timeout_s=self.setup.timeout_s))["weight_version"])

    async def retire(self, http: Http, edition: Edition) -> None:
        if edition.kind == "adapter" and edition.folder is not None:
            try:
                await http.post("/v1/unload_lora_adapter", {"lora_name": edition.name}, timeout_s=self.setup.timeout_s)
            except Refused as error:
                if error.status != 404:  # it hadn't come so far
                    raise


def _served(edition: Edition) -> str | None:
    """An adapter's name; None means the model that the server was started with, whatever it calls it."""
    return edition.name if edition.kind == "adapter" and edition.folder is not None else None


__all__ = ["ENVIRONMENT", "MODEL_NAME", "VllmDialect"]
