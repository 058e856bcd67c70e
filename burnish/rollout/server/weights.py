"""The routes by which a trainer in another process changes the weights that an engine samples from; there with `burnish serve --weights`.

Owns their fields. They stand behind the same token as all others; arrays come another way (`sync.carry`), so a body is small. Who takes the
weights is `sync.inbox`, who sends them `rollout.burnish`. No jax.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from burnish.rollout.server.openai_api import number
from burnish.rollout.server.turns import CannotAnswer


class CannotTake(CannotAnswer):
    """Weights that weren't taken; the old ones stay."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 409)


class TakesWeights(Protocol):
    """See `sync.inbox.Inbox`. edition: what is used; prepared: what may be. All raise CannotTake."""

    @property
    def edition(self) -> str: ...

    @property
    def prepared(self) -> str | None: ...

    async def fetch(self, edition: str, leaf: str, offer: Mapping[str, Any], within_s: float) -> None: ...

    async def prepare(self, edition: str, checksum: int, scale: float | None) -> None: ...

    async def activate(self, edition: str, version: int) -> None: ...

    async def drop(self, edition: str) -> None: ...


Taking = Callable[[Mapping[str, Any]], Awaitable[None]]


def takings(weights: TakesWeights) -> dict[str, Taking]:
    """What each route does with its body. Raises CannotAnswer."""

    async def fetch(body: Mapping[str, Any]) -> None:
        offer = body.get("offer")
        if not isinstance(offer, dict) or offer.get("way") not in ("transfer", "socket"):
            raise CannotAnswer("`offer` must be an object with a `way`, transfer or socket")
        try:
            await weights.fetch(_name(body, "edition"), _name(body, "leaf"), offer, _given(body, "within_s", float))
        except (KeyError, TypeError) as error:
            raise CannotAnswer(f"the offer can't be read: {error!r}") from error

    async def prepare(body: Mapping[str, Any]) -> None:
        await weights.prepare(_name(body, "edition"), _given(body, "checksum", int), number(body, "scale", float))

    async def activate(body: Mapping[str, Any]) -> None:
        await weights.activate(_name(body, "edition"), _given(body, "version", int))

    async def drop(body: Mapping[str, Any]) -> None:
        await weights.drop(_name(body, "edition"))

    return {"fetch": fetch, "prepare": prepare, "activate": activate, "drop": drop}


def _name(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise CannotAnswer(f"`{key}` must be a name")
    return value


def _given(body: Mapping[str, Any], key: str, kind: type) -> Any:
    value = number(body, key, kind)
    if value is None:
        raise CannotAnswer(f"`{key}` is missing")
    return value


__all__ = ["CannotTake", "TakesWeights", "Taking", "takings"]
