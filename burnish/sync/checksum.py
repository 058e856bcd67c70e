"""A number by which an engine knows that what arrived is what was sent.

Owns the sum, which doesn't depend on how arrays are cut or where they lie: of a hash of every number's bits and place, modulo 2**32, each
leaf weighed by its name. Senders compute it of their arrays, the engine of those that came, before it changes them into its own layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Tally:
    """The checksum of arrays that come one by one, in any order. They may be of numbers of up to 4 bytes."""

    def __init__(self) -> None:
        self._sums: dict[str, UInt32[Array, ""]] = {}

    def add(self, name: str, array: Array) -> None:
        """Start one pass over the array, where it lies."""
        self._sums[name] = _sum(array)

    def total(self) -> int:
        """Waits for the passes that were started."""
        return sum(int(value) * (2 * zlib.crc32(name.encode()) + 1) for name, value in self._sums.items()) % 2**32


def checksum(leaves: Mapping[str, Array]) -> int:
    """Of all these arrays."""
    tally = Tally()
    for name, leaf in leaves.items():
        tally.add(name, leaf)
    return tally.total()


@jax.jit
def _sum(leaf: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    # With its place, so that numbers that change places don't cancel; and stirred, so that highest bits, as of signs, don't.
    places = jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
    return jnp.sum(_stirred(_stirred(bits) + places), dtype=jnp.uint32)


def _stirred(bits: Array) -> Array:
    """Every bit of the answer depends on every bit: the last step of MurmurHash3 (Appleby, 2011), a one-to-one map."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
