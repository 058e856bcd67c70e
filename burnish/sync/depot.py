"""Weights that were pushed, kept on this host until the servers have them: what `rollout.remote` writes where servers read no folders.

Owns the versions (`editions.WeightWriter`), and that each is what was sent. A server that comes back is given its version again, so the one
in use stays here, in the host's memory, the new one beside it until it is used. How an array travels is `carry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from burnish.sync.carry.offers import Offer, Way, make_carrier
from burnish.sync.checksum import Tally
from burnish.sync.reshard import on_host


@dataclass(frozen=True, slots=True)
class _Version:
    leaves: Mapping[str, np.ndarray]
    checksum: int


class Depot:
    """check: raises ValueError for a leaf that isn't one of the model's. scale: of the adapter that is pushed, None where weights are."""

    kind: Literal["adapter", "model"] = "model"  # a server merges an adapter, so what it samples from is a model

    def __init__(self, check: Callable[[str, Any], None], *, scale: float | None, way: Way, host: str) -> None:
        self._check = check
        self.scale = scale
        self._carrier = make_carrier(way, host)
        self._versions: dict[Path, _Version] = {}

    def check(self, name: str, array: Any) -> None:
        self._check(name, array)

    def write(self, folder: Path, leaves: Mapping[str, Any], *, last: Path | None, checksum: int | None) -> None:
        """`folder` is a name here."""
        came = {name: on_host(leaf) for name, leaf in leaves.items()}
        if checksum is not None and (found := _checksum(came)) != checksum:
            raise RuntimeError(f"what came has the checksum {found} and was sent with {checksum}: the old weights stay")
        before = self._versions.get(last) if last is not None else None
        whole = came if before is None else {**before.leaves, **came}
        self._versions[folder] = _Version(whole, _checksum(whole))

    def remove(self, folder: Path) -> None:
        self._versions.pop(folder, None)

    def close(self) -> None:
        self._carrier.close()
        self._versions.clear()

    def names(self, folder: Path) -> list[str]:
        return list(self._versions[folder].leaves)

    def checksum(self, folder: Path) -> int:
        return self._versions[folder].checksum

    def offer(self, folder: Path, name: str) -> Offer:
        return self._carrier.offer(self._versions[folder].leaves[name])

    def withdraw(self, offer: Offer, *, fetched: bool) -> None:
        self._carrier.withdraw(offer, fetched=fetched)


def _checksum(leaves: Mapping[str, np.ndarray]) -> int:
    tally = Tally()
    for name, leaf in leaves.items():
        tally.add(name, jnp.asarray(leaf))
    return tally.total()


__all__ = ["Depot"]
