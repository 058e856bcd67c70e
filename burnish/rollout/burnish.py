"""`burnish serve` as an engine: a run's own decoder in another process, on devices that the trainer has no mesh over.

Owns what is said to one: `/inference/v1/generate` with a seed's path and kept sets, and `/weights/…`, by which it fetches each array that
is offered to it. What is offered, and how arrays travel, is a `Depot`'s (`sync.depot`); everything else is `rollout.remote`. No jax.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from burnish.rollout.draft import Draft
from burnish.rollout.remote.dialect import ServerSetup, WrongWeights
from burnish.rollout.remote.editions import Edition
from burnish.rollout.remote.http import Http
from burnish.types import SamplingParams

TOKEN_VARIABLE = "BURNISH_SERVE_TOKEN"
GRACE_S = 10.0
"""How much longer than the server's own deadline its answer is waited for: so the error is its own."""


class Offers(Protocol):
    """The versions that a trainer keeps for its servers; see `sync.depot.Depot`."""

    scale: float | None

    def names(self, folder: Path) -> list[str]: ...

    def checksum(self, folder: Path) -> int: ...

    def offer(self, folder: Path, name: str) -> Mapping[str, Any]: ...

    def withdraw(self, offer: Mapping[str, Any], *, fetched: bool) -> None: ...


@dataclass(frozen=True)
class BurnishDialect:
    """See `remote.dialect.Dialect`. fetch_s: longest way of one array."""

    setup: ServerSetup
    offers: Offers
    fetch_s: float
    precision: Literal["f32", "bf16"] = "f32"

    name = "burnish"

    def command(self, port: int, index: int) -> tuple[Sequence[str], Mapping[str, str]]:
        setup = self.setup
        command = [setup.python, "-m", "burnish", "serve", str(setup.model), "--weights", "--port", str(port)]
        command += ["--context", str(setup.context), "--slots", str(setup.slots), "--max-kept", str(setup.max_kept)]
        command += ["--precision", self.precision, *setup.arguments]
        secret = {} if setup.token is None else {TOKEN_VARIABLE: setup.token}
        return command if secret else [*command, "--no-token"], {**secret, **setup.environment_of(index)}

    def check(self, params: SamplingParams) -> None:
        """Whatever the native engine can do."""

    def keeps(self, params: SamplingParams) -> bool:
        return params.truncates

    async def is_healthy(self, http: Http, *, timeout_s: float) -> bool:
        await http.get("/health", timeout_s=timeout_s)
        return True

    async def sample(self, http: Http, draft: Draft, edition: Edition) -> None:
        params = draft.request.params
        sampling = {
            "max_tokens": draft.budget,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_ids),
            "stop": list(params.stop_strings),
            "seed_path": list(draft.request.seed_path),
        }
        body = {"token_ids": list(draft.request.prompt_ids), "sampling_params": sampling}
        choice = (await http.post("/inference/v1/generate", body, timeout_s=self.setup.timeout_s))["choices"][0]
        if (used := choice.get("edition")) != edition.name:
            raise WrongWeights(f"{http.url} sampled from {used or 'weights that nobody may change'}, expected {edition.name}")
        ids = np.asarray(choice["token_ids"], np.int32)
        logps = np.asarray([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
        kept = np.asarray(choice["kept_ids"], np.int32) if self.keeps(params) else ids[:, None]
        if len(ids):
            draft.extend(ids, logps, kept, version=edition.version, decode_text=self.setup.decode_text)

    async def prepare(self, http: Http, edition: Edition) -> None:
        """Array by array, each offered only while it is fetched."""
        assert edition.folder is not None, "only what was pushed is prepared"
        if edition.name in (await http.get("/weights", timeout_s=self.setup.timeout_s)).values():
            return
        for name in self.offers.names(edition.folder):
            await self._carry(http, edition, edition.folder, name)
        body = {"edition": edition.name, "checksum": self.offers.checksum(edition.folder), "scale": self.offers.scale}
        await http.post("/weights/prepare", body, timeout_s=self.setup.timeout_s)

    async def _carry(self, http: Http, edition: Edition, folder: Path, name: str) -> None:
        offer, fetched = await asyncio.to_thread(self.offers.offer, folder, name), False
        try:
            body = {"edition": edition.name, "leaf": name, "offer": offer, "within_s": self.fetch_s}
            await http.post("/weights/fetch", body, timeout_s=self.fetch_s + GRACE_S)
            fetched = True
        finally:
            await asyncio.to_thread(self.offers.withdraw, offer, fetched=fetched)

    async def activate(self, http: Http, edition: Edition) -> None:
        body = {"edition": edition.name, "version": edition.version}
        await http.post("/weights/activate", body, timeout_s=self.setup.timeout_s)

    async def retire(self, http: Http, edition: Edition) -> None:
        await http.post("/weights/drop", {"edition": edition.name}, timeout_s=self.setup.timeout_s)


__all__ = ["BurnishDialect", "Offers"]
