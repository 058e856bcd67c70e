"""Weights that a server is given by a trainer in another process: fetched, compared with their checksum, used or dropped.

Owns what came and the name of what is used. Three steps: `fetch` each array, `prepare` sees that all are there, as they were sent, while
the engine goes on with the old ones, `activate` makes them the engine's, as a whole. An adapter is merged into the base here. The routes to
it are `rollout.server.weights`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import jax

from burnish.models.lora import merge
from burnish.models.transformer import Adapter, Params
from burnish.rollout.engine import Engine
from burnish.rollout.server.weights import CannotTake
from burnish.sync.carry.offers import CarryError, fetch
from burnish.sync.checksum import checksum as checksum_of

START = "start"
_ADAPTER, _LAYERS = "adapter.", "layers."


class Inbox:
    """engine: whose weights change. params: what it started with; they stay here, as the base of adapters and to go back to."""

    def __init__(self, engine: Engine, params: Params) -> None:
        self._engine, self._params = engine, params
        self._shapes = {name: leaf.shape for name, leaf in _named(params).items()}
        self._coming, self._leaves = "", dict[str, jax.Array]()
        self._ready: tuple[str, Mapping[str, jax.Array]] | None = None
        self._lock = asyncio.Lock()
        self.edition = START

    @property
    def prepared(self) -> str | None:
        return None if self._ready is None else self._ready[0]

    async def fetch(self, edition: str, leaf: str, offer: Mapping[str, Any], within_s: float) -> None:
        """Take one array. One of another edition than the one before begins anew."""
        async with self._lock:
            if edition != self._coming:
                self._coming, self._leaves, self._ready = edition, {}, None
            try:
                self._leaves[leaf] = await asyncio.to_thread(fetch, offer, within_s=within_s)
            except CarryError as error:
                raise CannotTake(f"{leaf} of {edition}: {error}") from error

    async def prepare(self, edition: str, checksum: int, scale: float | None) -> None:
        """See that what came is what was sent. scale: of the adapter that came, None where weights did."""
        async with self._lock:
            if edition in (self.edition, self.prepared):
                return
            came, self._coming, self._leaves = self._leaves if self._coming == edition else {}, "", {}
            found = await asyncio.to_thread(checksum_of, came)
            if not came or found != checksum:
                raise CannotTake(f"what came of {edition}, {len(came)} arrays, has the checksum {found} and was sent with {checksum}")
            leaves = came if scale is None else await asyncio.to_thread(self._merged, came, scale)
            for name, leaf in leaves.items():
                if self._shapes.get(name) != leaf.shape:
                    raise CannotTake(f"{edition} has {name} of shape {leaf.shape}, this model has {self._shapes.get(name, 'none')}")
            self._ready = edition, leaves

    async def activate(self, edition: str, version: int) -> None:
        """Use what was prepared. `start` is what the server was started with."""
        async with self._lock:
            if edition == self.edition:
                return
            if edition == START:
                leaves: Mapping[str, jax.Array] = _named(self._params)
            elif self._ready is not None and self._ready[0] == edition:
                leaves = self._ready[1]
            else:
                raise CannotTake(f"{edition} isn't prepared here")
            try:
                await self._engine.begin_update(version)
                for name, leaf in leaves.items():
                    await self._engine.push(name, leaf)
                await self._engine.commit_update()
            except (RuntimeError, ValueError) as error:
                await self._engine.abort_update()
                raise CannotTake(f"the engine doesn't take {edition}: {error}") from error
            self.edition, self._ready = edition, None

    async def drop(self, edition: str) -> None:
        """Forget what came of an edition that won't be used."""
        async with self._lock:
            if self._coming == edition:
                self._coming, self._leaves = "", {}
            if self.prepared == edition:
                self._ready = None

    def _merged(self, came: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
        """The matrices that an adapter changes, with it in them."""
        pairs: dict[str, dict[str, jax.Array]] = {}
        for name, leaf in came.items():
            matrix, _, half = name.removeprefix(_ADAPTER).partition(".")
            if not name.startswith(_ADAPTER) or matrix not in self._params["layers"]:
                raise CannotTake(f"{name} is no part of an adapter for this model")
            pairs.setdefault(matrix, {})[half] = leaf
        layers = merge(self._params, Adapter(pairs, scale))["layers"]
        return {_LAYERS + matrix: layers[matrix] for matrix in pairs}


def _named(params: Params) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(params)}


__all__ = ["START", "Inbox"]
