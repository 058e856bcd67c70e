"""The engine's KV memory within its byte budget: the pool that decoding reads, kept prefixes beside it, and swapped pages on the host.

Owns the cache arrays and every program that moves pages; the engine's worker is the only caller. Who gets pages, and who is swapped out,
is the scheduler's business.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from burnish.config.errors import UserError
from burnish.models.config import ModelConfig
from burnish.models.transformer import Precision
from burnish.rollout.native.cache import Cache, Page, Spread, allocate, grow, lift, lower, page_bytes, pick
from burnish.rollout.native.pool import Pool, pages_for
from burnish.rollout.native.prefixes import Prefixes


def budget_pages(
    config: ModelConfig, *, slots: int, context: int, num_bytes: int | None, precision: Precision, spread: Spread | None
) -> int:
    """Pages of a bank, kept ones included, for so many bytes on each device; None: full contexts in all slots, and half as many kept.

    Raises UserError where one sequence of the whole context wouldn't fit.
    """
    whole = pages_for(context)
    if num_bytes is None:
        return whole * slots * 3 // (2 * (1 if spread is None else spread.banks))
    size = page_bytes(config, precision=precision, spread=spread)
    if num_bytes < whole * size:
        raise UserError(
            f"kv_cache_bytes is {num_bytes:,}, and one sequence of the context's {context} tokens takes {whole * size:,} on a device: "
            "raise it, or lower the context"
        )
    return num_bytes // size


def pool_pages(*, slots: int, context: int, budget: int, spread: Spread | None) -> int:
    """Pages of a bank that running requests may take: the budget, unless all slots need less."""
    return min(budget, slots // (1 if spread is None else spread.banks) * pages_for(context))


class Memory:
    """cache: the pool's arrays; pool: which of its pages are free; prefixes: kept pages, on the device, of this version of the weights.

    budget: pages of a bank. Kept pages take what the pool leaves of it, and no more than the pool itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        context: int,
        budget: int,
        precision: Precision,
        spread: Spread | None,
        dispatch: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.banks = 1 if spread is None else spread.banks
        most = pool_pages(slots=slots, context=context, budget=budget, spread=spread)
        self.pool = Pool(banks=self.banks, smallest=2 * slots // self.banks, most=most)
        self.prefixes: Prefixes[Page] = Prefixes()
        self._budget = budget
        self.spread, self.dispatch = spread, dispatch
        self._config = config
        self._precision: Precision = precision
        self._place = SingleDeviceSharding(jax.local_devices()[0]) if spread is None else spread.cache
        self._page_place = self._place if spread is None else spread.page
        self._page_bytes = page_bytes(config, precision=precision)
        self.cache: Cache = self._allocate()

    @property
    def num_bytes(self) -> int:
        """Of the pool and of what is kept."""
        return (self.banks * self._allocated + len(self.prefixes)) * self._page_bytes

    def fit(self) -> None:
        """Make the arrays as large as the pool has become; kept pages give way."""
        if self.pool.size > self._allocated:
            self.prefixes.shrink(self._room())
            self._grow()

    def reset(self) -> None:
        """Nobody runs: give back what the pool has grown by."""
        self.pool.reset()
        if self.pool.size < self._allocated:
            self.cache = ()
            self.cache = self._allocate()

    def put(self, page: Page, bank: int, index: int) -> None:
        """Write a kept, or a swapped, page to the pool."""
        with self.dispatch:
            if isinstance(page.keys, np.ndarray):  # it was swapped; a kept one is where it should be
                page = Page(*jax.device_put(tuple(page), self._page_place))
            self.cache = lower(self.cache, page, bank, index, spread=self.spread)

    def swapped(self, bank: int, index: int) -> Page:
        """A page's contents on the host."""
        with self.dispatch:
            page = lift(self.cache, bank, index, spread=self.spread)
        return jax.tree.map(np.asarray, page)

    def made(self, rows: Page, bank: int, row: int) -> Page:
        """One of the pages that a prefill returned."""
        with self.dispatch:
            return pick(rows, bank, row, spread=self.spread)

    def keep(self, name: bytes, page: Page) -> None:
        self.prefixes.put(name, page, room=self._room())

    def _room(self) -> int:
        return min(self.pool.size, self._budget - self.pool.size)

    @property
    def _allocated(self) -> int:
        return self.cache[0].keys.shape[1]

    def _allocate(self) -> Cache:
        with self.dispatch:
            return allocate(self._config, banks=self.banks, pages=self.pool.size, precision=self._precision, place=self._place)

    def _grow(self) -> None:
        layers = list(self.cache)
        self.cache = ()  # each old layer goes when its successor is there
        for index in range(len(layers)):
            with self.dispatch:
                layers[index] = grow(layers[index], pages=self.pool.size, spread=self.spread)
        self.cache = tuple(layers)
