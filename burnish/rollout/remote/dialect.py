"""What a kind of server must be able to say: the few calls of its HTTP interface that an engine needs.

Owns the protocol; `rollout.vllm` and `rollout.sglang` speak it, `remote.engine` is written against it. A call raises `http.ServerGone`
where the server is at fault, `http.Refused` where it won't, `http.Busy` where it has no room, and `WrongWeights` where it lives but has
other weights than it should: it was started anew by somebody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from burnish.rollout.draft import DecodeText, Draft
from burnish.rollout.remote.editions import Edition, Kind
from burnish.rollout.remote.http import Http
from burnish.types import SamplingParams

Support = Literal["kept", "biased"]


@dataclass(frozen=True)
class ServerSetup:
    """What every kind of server is set by.

    model: the folder that launched servers start with. kind: what is pushed. slots: requests that a server is given at one time. max_kept:
    the largest kept set of truncated sampling, and support: how that is trained on (docs/engines.md). adapter_rank: of adapters that are
    pushed, None where none is. timeout_s: longest wait for an answer. python, arguments, environment: of launched servers; `{index}` in
    the environment's values is the server's number.
    """

    model: Path
    decode_text: DecodeText
    kind: Kind
    context: int = 4096
    slots: int = 64
    max_kept: int = 512
    support: Support = "kept"
    adapter_rank: int | None = None
    dtype: str = "auto"
    token: str | None = None
    python: str = "python3"
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    def environment_of(self, index: int) -> dict[str, str]:
        return {name: value.replace("{index}", str(index)) for name, value in self.environment.items()}


def seed_of(path: Sequence[int]) -> int:
    """A seed of 63 bits that depends on the request's identity and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(path)).encode(), digest_size=8).digest(), "big") >> 1


class WrongWeights(Exception):
    """A server answers, but not with the weights that it was given last."""


@runtime_checkable
class Dialect(Protocol):
    """One kind of server."""

    @property
    def name(self) -> str: ...

    def command(self, port: int, index: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command that starts server `index` on this port of the loopback interface, and what it needs in its environment."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for sampling that this kind of server can't do, or can't say enough about to train on."""
        ...

    def keeps(self, params: SamplingParams) -> bool:
        """Whether a draft of truncated sampling gets its kept sets; where not, its log-probs pass for those of the full softmax."""
        ...

    async def is_healthy(self, http: Http, *, timeout_s: float) -> bool: ...

    async def sample(self, http: Http, draft: Draft, edition: Edition) -> None:
        """Sample to the end of the draft, on these weights."""
        ...

    async def prepare(self, http: Http, edition: Edition) -> None:
        """Make new weights ready beside those that are used; where a server can't hold two, do nothing."""
        ...

    async def activate(self, http: Http, edition: Edition) -> None:
        """Use these weights, which were prepared, from now on, and forget what was cached of others."""
        ...

    async def retire(self, http: Http, edition: Edition) -> None:
        """Free what the server holds of weights that aren't used, if it holds any."""
        ...


__all__ = ["Dialect", "ServerSetup", "Support", "WrongWeights", "seed_of"]
