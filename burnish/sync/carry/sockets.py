"""Arrays through plain TCP: the fallback where jax's transfers don't work, without jax.

Owns the bytes. Who fetches sends the key of an offer, 43 characters; what comes back is a status byte, then frames of raw bytes, each after
its length and CRC-32 (8 and 4 bytes, little-endian), until the array is whole. A connection has 20 s to send its key.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
import zlib

import numpy as np

from burnish.config.errors import UserError
from burnish.sync.carry.offers import CarryError, Offer, layout_of

FRAME_BYTES = 16 << 20
_HEAD = struct.Struct("<QI")
_KEY_BYTES = 43
_KEY_S = 20.0
_SEND_S = 600.0
_CONNECTIONS = 64
_HERE, _UNKNOWN = b"+", b"-"


class SocketCarrier:
    """See `offers.Carrier`."""

    def __init__(self, host: str) -> None:
        self._held: dict[str, np.ndarray] = {}
        try:
            self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UserError(f"can't listen on {host}, at which servers are to fetch weights: {error}") from error
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        threading.Thread(target=self._listen, name="carrier", daemon=True).start()

    def offer(self, array: np.ndarray) -> Offer:
        key = secrets.token_urlsafe(32)
        self._held[key] = np.ascontiguousarray(array)
        host, port = self._listener.getsockname()[:2]
        return {"way": "socket", "address": [host, port], "key": key, "dtype": str(array.dtype), "shape": list(array.shape)}

    def withdraw(self, offer: Offer, *, fetched: bool) -> None:
        self._held.pop(offer["key"], None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else `accept` goes on
        self._listener.close()
        self._held.clear()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="carry", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):
                key = bytearray(_KEY_BYTES)
                _fill(connection, memoryview(key), time.monotonic() + _KEY_S)
                array = self._held.pop(key.decode("latin-1"), None)
                connection.settimeout(_SEND_S)
                connection.sendall(_UNKNOWN if array is None else _HERE)
                if array is not None:
                    _send(connection, array)
        finally:
            self._room.release()


def fetch(offer: Offer, *, within_s: float) -> np.ndarray:
    """The array in the host's memory. Raises CarryError, at the latest after `within_s`."""
    (shape, dtype), (host, port) = layout_of(offer), offer["address"]
    peer, deadline = f"{host}:{port}", time.monotonic() + within_s
    whole = np.empty(shape, dtype)
    room = whole.reshape(-1).view(np.uint8).data
    try:
        with socket.create_connection((host, port), timeout=within_s) as connection:
            connection.sendall(str(offer["key"]).encode())
            status = bytearray(1)
            _fill(connection, memoryview(status), deadline)
            if status != _HERE:
                raise CarryError(f"{peer} refuses this array: it doesn't offer one by this key, or has given it to somebody already")
            _receive(connection, room, deadline, peer)
    except TimeoutError as error:
        raise CarryError(f"{peer} didn't send the whole array within {within_s:g} s: is it slow, or stuck? Give it more time") from error
    except (OSError, EOFError) as error:
        raise CarryError(f"can't fetch from {peer}: {error}. See whether that process runs and this machine reaches it") from error
    return whole


def _send(connection: socket.socket, array: np.ndarray) -> None:
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), FRAME_BYTES):
        frame = data[start : start + FRAME_BYTES]
        connection.sendall(_HEAD.pack(len(frame), zlib.crc32(frame)))
        connection.sendall(frame)


def _receive(connection: socket.socket, room: memoryview, deadline: float, peer: str) -> None:
    at, head = 0, bytearray(_HEAD.size)
    while at < len(room):
        _fill(connection, memoryview(head), deadline)
        size, expected = _HEAD.unpack(head)
        if not 0 < size <= min(FRAME_BYTES, len(room) - at):
            raise CarryError(f"{peer} sent a frame of {size} bytes, {len(room) - at} are left of the array: it isn't what was offered")
        frame = room[at : at + size]
        _fill(connection, frame, deadline)
        if (found := zlib.crc32(frame)) != expected:
            raise CarryError(f"the frame at byte {at} from {peer} is damaged: its checksum is {found:08x}, sent was {expected:08x}")
        at += size


def _fill(connection: socket.socket, room: memoryview, deadline: float) -> None:
    """Read until `room` is full. Raises TimeoutError and EOFError."""
    at = 0
    while at < len(room):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        count = connection.recv_into(room[at:])
        if count == 0:
            raise EOFError(f"it closed the connection after {at} of {len(room)} bytes")
        at += count


__all__ = ["FRAME_BYTES", "SocketCarrier", "fetch"]
