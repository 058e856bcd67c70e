"""Arrays on their way between processes, by both ways, and what ends a way that leads nowhere.

The processes themselves: `tests/rollout/test_burnish.py`.
"""

import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.sync.carry import sockets, transfer
from burnish.sync.carry.offers import Carrier, CarryError, Way, fetch, make_carrier

WAYS: tuple[Way, ...] = ("transfer", "socket")


@pytest.fixture(params=WAYS)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    made = make_carrier(request.param, "127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5)])
def test_what_comes_is_what_was_offered(carrier: Carrier, shape: tuple[int, ...], dtype: type) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 50).astype(dtype)
    offer = carrier.offer(array)
    found = fetch(offer, within_s=30.0)
    carrier.withdraw(offer, fetched=True)
    assert found.dtype == array.dtype and found.shape == shape
    np.testing.assert_array_equal(np.asarray(found), array)


def test_an_offer_does_not_change_with_the_array() -> None:
    carrier, array = make_carrier("transfer", "127.0.0.1"), np.zeros(4, np.float32)
    offer = carrier.offer(array)
    array[:] = 7
    np.testing.assert_array_equal(np.asarray(fetch(offer, within_s=30.0)), np.zeros(4))


def test_frames_of_a_large_array_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "FRAME_BYTES", 1000)
    carrier, array = make_carrier("socket", "127.0.0.1"), np.arange(1234, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(fetch(carrier.offer(array), within_s=30.0)), array)
    carrier.close()


def test_what_nobody_offers_ends_within_its_time(carrier: Carrier) -> None:
    offer = dict(carrier.offer(np.ones(3, np.float32)))
    begun = time.monotonic()
    with pytest.raises(CarryError, match=r"127\.0\.0\.1:.*(nothing came|refuses this array)|nothing came from 127\.0\.0\.1"):
        fetch({**offer, "key": "1".zfill(43)}, within_s=0.3)
    assert time.monotonic() - begun < 60
    assert fetch(offer, within_s=30.0).tolist() == [1, 1, 1]


def test_an_offer_is_good_once_and_not_after_it_is_withdrawn(carrier: Carrier) -> None:
    one, other = (carrier.offer(np.ones(3, np.float32)) for _ in range(2))
    fetch(one, within_s=30.0)
    carrier.withdraw(other, fetched=False)
    for gone in (one, other):
        with pytest.raises(CarryError):
            fetch(gone, within_s=0.3)


def test_nobody_listens(carrier: Carrier) -> None:
    offer = carrier.offer(np.ones(3, np.float32))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        address = ["127.0.0.1", port] if offer["way"] == "socket" else f"127.0.0.1:{port}"
        with pytest.raises(CarryError, match=f"127.0.0.1:{port}"):
            fetch({**offer, "address": address}, within_s=0.3)
    carrier.withdraw(offer, fetched=False)


def said_by(data: bytes, *, stays: bool = False) -> tuple[str, int]:
    """The address of somebody who says this to the first who comes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(43)
            connection.sendall(data)
            if stays:
                connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[:2]


def frame(data: bytes, size: int | None = None, crc: int | None = None) -> bytes:
    return struct.pack("<QI", len(data) if size is None else size, zlib.crc32(data) if crc is None else crc) + data


EIGHT = b"abcdefgh"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"+" + frame(EIGHT, crc=zlib.crc32(EIGHT) ^ 1), "the frame at byte 0 from .* is damaged: its checksum is"),
        (b"+" + frame(b"abcdXfgh", crc=zlib.crc32(EIGHT)), "is damaged"),
        (b"+" + frame(EIGHT, size=1 << 60), "a frame of 1152921504606846976 bytes, 8 are left"),
        (b"+" + frame(b"", size=0), "a frame of 0 bytes"),
        (b"+" + frame(EIGHT)[:15], "it closed the connection after 3 of 8 bytes"),
        (b"", "it closed the connection"),
        (b"-", "refuses this array"),
    ],
    ids=["checksum", "bits", "huge", "empty", "short", "silent", "unknown"],
)
def test_damaged_frames_are_refused(data: bytes, said: str) -> None:
    offer = {"way": "socket", "address": said_by(data), "key": "k" * 43, "dtype": "float32", "shape": [2]}
    with pytest.raises(CarryError, match=said):
        fetch(offer, within_s=30.0)


def test_a_sender_that_stops_in_the_middle_is_left() -> None:
    offer = {"way": "socket", "address": said_by(b"+" + frame(EIGHT)[:14], stays=True), "key": "k" * 43, "dtype": "float32", "shape": [2]}
    with pytest.raises(CarryError, match=r"didn't send the whole array within 0\.3 s"):
        fetch(offer, within_s=0.3)


def test_a_jax_without_transfers_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    monkeypatch.delattr("jax.experimental.transfer", raising=False)
    with pytest.raises(UserError, match=r"needs jax.experimental.transfer, which jax .* use `transport: socket`"):
        transfer.TransferCarrier("127.0.0.1")
