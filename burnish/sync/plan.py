"""What moves when an array changes its sharding: which piece, from which device to which, and its bytes.

Owns one pure function of two shardings; it touches no array, so it can be asked before there is one. `reshard` moves by it, piece by piece:
what is planned is what crosses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding

Region = tuple[tuple[int, int], ...]
"""A block of an array: first and last + 1 of every dimension."""
Device = Any
"""A jax device."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block that a device needs, and the device it is taken from: itself where it has it, and then nothing crosses."""

    source: Device
    target: Device
    region: Region

    @property
    def crosses(self) -> bool:
        return self.source != self.target

    @property
    def size(self) -> int:
        return math.prod(last - first for first, last in self.region)


@dataclass(frozen=True, slots=True)
class Plan:
    """One array's way: its moves by target device, each target's in the order of their blocks, and the width of a number in bytes."""

    moves: tuple[Move, ...]
    itemsize: int

    def bytes_by_link(self) -> dict[tuple[Device, Device], int]:
        """Bytes from one device to another; links that carry nothing aren't there."""
        links: Counter[tuple[Device, Device]] = Counter()
        for move in self.moves:
            if move.crosses:
                links[move.source, move.target] += move.size * self.itemsize
        return dict(links)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_link().values())


def plan(shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding) -> Plan:
    """How an array of `shape`, laid out as `source`, comes to lie as `target`: the smallest blocks that both cut it into.

    A device keeps what it has. What it lacks comes from those that have it, in turn, so that whole copies share the work.
    """
    held: dict[Region, list[Device]] = {}
    for device, index in source.devices_indices_map(shape).items():
        held.setdefault(region_of(index, shape), []).append(device)
    moves = []
    for turn, (device, index) in enumerate(target.devices_indices_map(shape).items()):
        for region, owner in _pieces(region_of(index, shape), held):
            owners = held[owner]
            moves.append(Move(device if device in owners else owners[turn % len(owners)], device, region))
    return Plan(tuple(moves), itemsize)


def region_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Region:
    """A device's index into an array, in numbers."""
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def _pieces(wanted: Region, held: dict[Region, list[Device]]) -> Iterator[tuple[Region, Region]]:
    """The blocks of `wanted` by the held regions they lie in, in row-major order. Held regions are a grid, as shardings' are."""
    found = []
    for region in held:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, region, strict=True))
        if all(first < last for first, last in common):
            found.append((common, region))
    yield from sorted(found)
