"""What both ways of carrying have in common: an offer, who makes it, and fetching it.

Owns the choice of the way. An offer is plain data that travels by another road (HTTP, behind a token); whoever knows it may fetch the
array, so it holds a secret. Nothing is unpickled. Called by `sync.depot`, which offers, and `sync.inbox`, which fetches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from burnish.config.errors import BurnishError

Way = Literal["transfer", "socket"]
Offer = Mapping[str, Any]
"""`way`, `address`, `key`, `dtype` and `shape`, as JSON has them."""


class CarryError(BurnishError):
    """An array didn't come, or not as it was sent."""


@runtime_checkable
class Carrier(Protocol):
    """Offers arrays to other processes."""

    def offer(self, array: np.ndarray) -> Offer:
        """Hold the array until it is fetched, once, by who is given the offer."""
        ...

    def withdraw(self, offer: Offer, *, fetched: bool) -> None:
        """Let go of the array."""
        ...

    def close(self) -> None: ...


def make_carrier(way: Way, host: str) -> Carrier:
    """host: the address of this machine at which the others reach it. Raises UserError where this jax can't do `transfer`."""
    if way == "transfer":
        from burnish.sync.carry.transfer import TransferCarrier

        return TransferCarrier(host)
    from burnish.sync.carry.sockets import SocketCarrier

    return SocketCarrier(host)


def fetch(offer: Offer, *, within_s: float) -> jax.Array:
    """The array, on this process's first device. Raises CarryError, at the latest after `within_s`."""
    if offer["way"] == "transfer":
        from burnish.sync.carry import transfer

        return transfer.fetch(offer, within_s=within_s)
    from burnish.sync.carry import sockets

    return jax.device_put(sockets.fetch(offer, within_s=within_s), jax.local_devices()[0])


def layout_of(offer: Offer) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of what is offered."""
    return tuple(offer["shape"]), np.dtype(offer["dtype"])


__all__ = ["Carrier", "CarryError", "Offer", "Way", "fetch", "layout_of", "make_carrier"]
