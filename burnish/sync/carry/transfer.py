"""Arrays through `jax.experimental.transfer`: from device to device, by jax's own servers.

Owns what that API lacks: a deadline. A pull of what nobody offers stays pending for ever, and so does one from an address where nobody
listens (its `timeout` does nothing on CPUs); an offer that nobody pulls is held for ever, even without its server. The API asks for no
token: the number of an offer, 62 random bits, is the secret. Tried with jax 0.10.2 on CPUs.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from burnish.config.errors import UserError
from burnish.sync.carry.offers import CarryError, Offer, layout_of

_LOOK_S = 0.002
_WITHDRAW_S = 5.0


class TransferCarrier:
    """See `offers.Carrier`."""

    def __init__(self, host: str) -> None:
        self._server = _start(host)

    def offer(self, array: np.ndarray) -> Offer:
        number = secrets.randbits(62)
        # A copy of jax's own: what is offered must not change, nor go, until it is pulled.
        self._server.await_pull(number, [jax.device_put(array, jax.local_devices()[0], may_alias=False)])
        return {
            "way": "transfer",
            "address": self._server.address(),
            "key": str(number),
            "dtype": str(array.dtype),
            "shape": list(array.shape),
        }

    def withdraw(self, offer: Offer, *, fetched: bool) -> None:
        """An offer can't be taken back, so who made it pulls it."""
        if not fetched:
            with contextlib.suppress(CarryError):
                _pull(self._server, offer, within_s=_WITHDRAW_S)

    def close(self) -> None:
        """It ends with this process."""


_lock = threading.Lock()
_receiving: dict[str, Any] = {}
"""Servers of this process by the address that they are at: who pulls needs one too."""


def fetch(offer: Offer, *, within_s: float) -> jax.Array:
    """See `offers.fetch`."""
    here = _way_to(offer["address"])
    with _lock:
        server = _receiving[here] = _receiving.get(here) or _start(here)
    return _pull(server, offer, within_s=within_s)


def _pull(server: Any, offer: Offer, *, within_s: float) -> jax.Array:
    (shape, dtype), peer = layout_of(offer), offer["address"]
    expected = jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(jax.local_devices()[0]))
    deadline = time.monotonic() + within_s
    try:
        (array,) = server.connect(peer).pull(int(offer["key"]), [expected])
        while not array.is_ready():
            if time.monotonic() > deadline:
                raise CarryError(
                    f"nothing came from {peer} within {within_s:g} s: it doesn't offer this array, or can't be reached from here. See "
                    "whether it runs, and at this address; give it more time, or carry by `transport: socket`"
                )
            time.sleep(_LOOK_S)
        return jax.block_until_ready(array)
    except (RuntimeError, ValueError) as error:
        raise CarryError(f"the transfer from {peer} broke off: {error}. See whether that process still runs") from error


def _way_to(address: str) -> str:
    """This machine's own address on the way to another; nothing is sent."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return probe.getsockname()[0]
    except OSError as error:
        raise CarryError(f"there is no way from here to {address}: {error}") from error


def _start(host: str) -> Any:
    module = _module()
    address = f"{_bracketed(host)}:0"
    return module.start_transfer_server(jax.local_devices()[0].client, address, [address])


def _module() -> ModuleType:
    try:
        from jax.experimental import transfer
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"`transport: transfer` needs jax.experimental.transfer, which jax {jax.__version__} doesn't have here ({error}); use "
            "`transport: socket`"
        ) from error
    return transfer


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


__all__ = ["TransferCarrier", "fetch"]
