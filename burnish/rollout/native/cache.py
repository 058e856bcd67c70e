"""The engine's KV cache in pages of 64 positions, donated to every program that writes it; and attention where the pages lie.

Owns the layout, the programs that move pages, and cached attention. A decoding step reads the whole pool of pages in place: each page meets
the query of the slot that owns it, and the parts are put together per slot afterwards. Nothing is gathered but those small parts, so pages
cost no more than one long row a slot (0.6 to 0.9 of its time on a CPU; gathering pages first took 5 to 10 times as long), and memory
follows the tokens in use, not slots times the longest. Keys lie as [.., h, c] and values as [.., c, h], so that both products run along the
last axis. Which pages are whose is `pool.py`'s business, and the table of it comes with every call.

On a mesh pages are in banks, one for each part of the slots: a slot's pages are where the slot is. Heads are over `tp` (`Spread`).

Axes: Z banks, N pages of a bank, S slots, z slots of a bank, P pages of the longest sequence (a power of two), r rows of prefill in a bank,
Q pages of the longest context, c positions of a page, H/K query/key heads, G = H/K, h head_dim, L layers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int, Num

from burnish.models.attention import total_weight
from burnish.models.config import ModelConfig
from burnish.models.transformer import Precision, capped
from burnish.rollout.native.pool import PAGE

_HIDDEN = -1e30
Window = Array | np.ndarray | int
"""A query sees keys less than so many positions back."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, in the dtype that attention multiplies; bfloat16 on a CPU as its bits, in uint16.

    XLA writes to bfloat16 on a CPU by turning all of the array into float32 and back, whatever the size of what is written: a decoding step
    of attention took 4 to 5 times as long.
    """

    keys: Num[Array, "Z N K h c"]
    values: Num[Array, "Z N K c h"]


Cache = tuple[LayerCache, ...]


class Page(NamedTuple):
    """One page of all layers, outside the pool."""

    keys: Num[Array, "L K h c"]
    values: Num[Array, "L K c h"]


class Table(NamedTuple):
    """Which page holds what; pages and slots are counted within their bank, -1 is none.

    pages: of each slot, in the order of positions. owners: the slot whose query a page meets. starts: the page's first position.
    """

    pages: Int[Array, "S P"]
    owners: Int[Array, "Z N"]
    starts: Int[Array, "Z N"]


class Spread(NamedTuple):
    """Where the engine's arrays lie on a mesh. slots: those with an entry a slot or a bank, on their first axis; cache: the pool; page: one
    page; banks: in how many parts the slots are."""

    slots: NamedSharding
    cache: NamedSharding
    page: NamedSharding
    banks: int

    @classmethod
    def over(cls, mesh: Mesh, *, slots: int) -> Spread:
        """Slots over `data` and `fsdp` where these divide them, else all of them everywhere; heads over `tp`."""
        rows = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
        parts = math.prod(mesh.shape[axis] for axis in rows)
        spread, banks = (rows, parts) if slots % parts == 0 else ((), 1)
        heads = "tp" if "tp" in mesh.shape else None
        slot_place, cache_place, page_place = PartitionSpec(spread), PartitionSpec(spread, None, heads), PartitionSpec(None, heads)
        return cls(NamedSharding(mesh, slot_place), NamedSharding(mesh, cache_place), NamedSharding(mesh, page_place), banks)


def page_bytes(config: ModelConfig, *, precision: Precision, spread: Spread | None = None) -> int:
    """Bytes of a page, all layers, on each device that holds it."""
    size = config.num_layers * 2 * config.num_kv_heads * config.head_dim * PAGE * (2 if precision == "bf16" else 4)
    return size if spread is None else size // spread.page.mesh.shape.get("tp", 1)


def allocate(config: ModelConfig, *, banks: int, pages: int, precision: Precision, place: Sharding) -> Cache:
    """A pool of zeros: a page that nobody has written is read too, at weight 0, and must be finite."""
    heads, head_dim, dtype = config.num_kv_heads, config.head_dim, stored_dtype(precision, place)
    return tuple(
        LayerCache(
            jnp.zeros((banks, pages, heads, head_dim, PAGE), dtype, device=place),
            jnp.zeros((banks, pages, heads, PAGE, head_dim), dtype, device=place),
        )
        for _ in range(config.num_layers)
    )


def stored_dtype(precision: Precision, place: Sharding) -> jnp.dtype:
    if precision == "f32":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.uint16 if next(iter(place.device_set)).platform == "cpu" else jnp.bfloat16)


def stored(x: Float[Array, "*n"], dtype: jnp.dtype) -> Num[Array, "*n"]:
    """As a cache of this dtype holds it."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def _read(x: Num[Array, "*n"]) -> Float[Array, "*n"]:
    """What a cache holds, as attention multiplies it."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


# ---------------------------------------------------------------------------------------------------------------- moving pages


def kept(cache: LayerCache, spread: Spread | None) -> LayerCache:
    """Inside a program: the cache where it was, so that a donated one is written in place."""
    if spread is None:
        return cache
    return LayerCache(*(jax.lax.with_sharding_constraint(array, spread.cache) for array in cache))


@partial(jax.jit, static_argnames=("pages", "spread"))
def grow(layer: LayerCache, *, pages: int, spread: Spread | None = None) -> LayerCache:
    """One layer with room for more pages. A layer at a time, as old and new stand side by side."""

    def one(array: Array) -> Array:
        return jnp.pad(array, [(0, pages - array.shape[1] if axis == 1 else 0) for axis in range(array.ndim)])

    return kept(LayerCache(*map(one, layer)), spread)


@partial(jax.jit, static_argnames="spread")
def lift(cache: Cache, bank: Int[Array, ""] | int, index: Int[Array, ""] | int, *, spread: Spread | None = None) -> Page:
    """A copy of one page."""
    keys, values = zip(*((layer.keys[bank, index], layer.values[bank, index]) for layer in cache), strict=True)
    return _placed(Page(jnp.stack(keys), jnp.stack(values)), spread)


@partial(jax.jit, static_argnames="spread")
def pick(rows: Page, bank: Int[Array, ""] | int, row: Int[Array, ""] | int, *, spread: Spread | None = None) -> Page:
    """One page of the [Z, r, …] that a prefill returns."""
    return _placed(Page(*(array[bank, row] for array in rows)), spread)


@partial(jax.jit, static_argnames="spread", donate_argnames="cache")
def lower(cache: Cache, page: Page, bank: Int[Array, ""] | int, index: Int[Array, ""] | int, *, spread: Spread | None = None) -> Cache:
    """Write one page. Every bank writes, all but one to no page that it has: so no bank is moved to where another is."""

    def put(array: Array, new: Array) -> Array:
        places = jnp.where(jnp.arange(array.shape[0]) == bank, index, array.shape[1])
        return jax.vmap(lambda held, place: held.at[place].set(new, mode="drop"))(array, places)

    pairs = zip(cache, zip(*page, strict=True), strict=True)
    return tuple(kept(LayerCache(put(layer.keys, keys), put(layer.values, values)), spread) for layer, (keys, values) in pairs)


def _placed(page: Page, spread: Spread | None) -> Page:
    return page if spread is None else Page(*(jax.lax.with_sharding_constraint(array, spread.page) for array in page))


# -------------------------------------------------------------------------------------------------------------------- decoding


def append(
    cache: LayerCache, k: Float[Array, "S K h"], v: Float[Array, "S K h"], places: Int[Array, " S"], offsets: Int[Array, " S"]
) -> LayerCache:
    """Write one position of every slot: `offsets` in page `places`, nowhere where that is no page of the bank."""
    banks = cache.keys.shape[0]

    def one_bank(keys: Array, values: Array, k: Array, v: Array, places: Array, offsets: Array) -> tuple[Array, Array]:
        keys = keys.at[places, :, :, offsets].set(stored(k, keys.dtype), mode="drop")
        return keys, values.at[places, :, offsets].set(stored(v, values.dtype), mode="drop")

    return LayerCache(*jax.vmap(one_bank)(*cache, *(_by_bank(x, banks) for x in (k, v, places, offsets))))


def attend(
    q: Float[Array, "S H h"],
    cache: LayerCache,
    table: Table,
    positions: Int[Array, " S"],
    *,
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "S H h"]:
    """softmax(q·k / sqrt(h)) v over positions 0..positions[slot] of each slot, or the last `window` of them; scores go through `cap`.

    A page's part has the same bits wherever it lies, and parts are summed in pairs in the order of positions, so a slot's result doesn't
    depend on the size of the pool or on who else is in it: pages beyond its position only add exact zeros.
    """
    banks, kv_heads = cache.keys.shape[0], cache.keys.shape[2]
    grouped = (q * q.shape[-1] ** -0.5).reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    slots = (_by_bank(x, banks) for x in (grouped, table.pages, positions))
    return jax.vmap(partial(_attend_bank, window=window, cap=cap))(*cache, table.owners, table.starts, *slots).reshape(q.shape)


def _attend_bank(
    keys: Num[Array, "N K h c"],
    values: Num[Array, "N K c h"],
    owners: Int[Array, " N"],
    starts: Int[Array, " N"],
    q: Float[Array, "z K G h"],
    pages: Int[Array, "z P"],
    positions: Int[Array, " z"],
    *,
    window: Window | None,
    cap: float | None,
) -> Float[Array, "z K G h"]:
    owner, keys, values = jnp.maximum(owners, 0), _read(keys), _read(values)
    scores = capped(jnp.einsum("nkgh,nkhc->nkgc", q.astype(keys.dtype)[owner], keys, preferred_element_type=jnp.float32), cap)
    seen = _seen(starts[:, None] + jnp.arange(PAGE)[None], positions[owner][:, None], window)[:, None, None]
    peaks = jnp.max(jnp.where(seen, scores, _HIDDEN), axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - peaks[..., None]), 0.0)
    mixed = jnp.einsum("nkgc,nkch->nkgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    totals = _total(weights, values.dtype)
    own, there = jnp.maximum(pages, 0), (pages >= 0)[:, :, None, None]
    part_peaks = jnp.where(there, peaks[own], _HIDDEN)
    shares = jnp.where(there, jnp.exp(part_peaks - part_peaks.max(axis=1, keepdims=True)), 0.0)
    total = _sum_pairs(totals[own] * shares, 1)[:, 0]
    return _sum_pairs(mixed[own] * shares[..., None], 1)[:, 0] / jnp.maximum(total, 1e-30)[..., None]


def _seen(keys: Int[Array, "*n"], query: Int[Array, "*m"], window: Window | None) -> Bool[Array, "*k"]:
    """Which keys, by their positions, a query may see; arrays that broadcast."""
    return keys <= query if window is None else (keys <= query) & (query - keys < window)


def _by_bank(x: Array, banks: int) -> Array:
    return x.reshape(banks, -1, *x.shape[1:])


def _total(weights: Float[Array, "*n c"], dtype: jnp.dtype) -> Float[Array, "*n"]:
    """Sum over a page, the same whatever the batch: in pairs, or exactly as training has it where products are rounded."""
    return _sum_pairs(weights, weights.ndim - 1)[..., 0] if dtype == jnp.float32 else total_weight(weights, "bf16")


def _sum_pairs(x: Array, axis: int) -> Array:
    """Sum over an axis whose size is a power of two, neighbours first: ((0 + 1) + (2 + 3)) + …; the axis stays, of size 1."""
    while x.shape[axis] > 1:
        x = jax.lax.slice_in_dim(x, 0, None, 2, axis) + jax.lax.slice_in_dim(x, 1, None, 2, axis)
    return x


# --------------------------------------------------------------------------------------------------------------------- prefill


def write(cache: LayerCache, k: Num[Array, "Z r K h c"], v: Num[Array, "Z r K c h"], places: Int[Array, "Z r"]) -> LayerCache:
    """Fill page `places` of its bank with each row; none where that is no page of the bank."""
    put = jax.vmap(lambda held, new, places: held.at[places].set(new, mode="drop"))
    return LayerCache(put(cache.keys, k, places), put(cache.values, v, places))


def attend_rows(
    q: Float[Array, "Z r c H h"],
    cache: LayerCache,
    pages: Int[Array, "Z r Q"],
    reach: Int[Array, ""],
    starts: Int[Array, "Z r"],
    *,
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "Z r c H h"]:
    """Causal attention of prefilled rows over the first `reach` pages of their sequences, their own page being among them.

    Page after page with a running maximum (Milakov & Gimelshein, 2018, arXiv:1805.02867): a page that a row doesn't see multiplies by 1 and
    adds 0, so a row's bits don't depend on how far the others reach.
    """
    banks, rows, width, heads, head_dim = q.shape
    kv_heads = cache.keys.shape[2]
    stacked = (q * head_dim**-0.5).reshape(banks, rows, width, kv_heads, -1, head_dim).transpose(0, 1, 3, 4, 2, 5)
    stacked = stacked.reshape(banks, rows, kv_heads, -1, head_dim)
    one_bank = partial(_attend_rows_bank, reach=reach, window=window, cap=cap)
    out = jax.vmap(one_bank)(stacked, *cache, pages, starts)
    out = out.reshape(banks, rows, kv_heads, -1, width, head_dim).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(q.shape)


def _attend_rows_bank(
    q: Float[Array, "r K m h"],
    keys: Num[Array, "N K h c"],
    values: Num[Array, "N K c h"],
    pages: Int[Array, "r Q"],
    starts: Int[Array, " r"],
    *,
    reach: Int[Array, ""],
    window: Window | None,
    cap: float | None,
) -> Float[Array, "r K m h"]:
    groups = q.shape[2] // PAGE
    positions = jnp.tile(starts[:, None] + jnp.arange(PAGE)[None], (1, groups))

    def add(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, peak, total = carry
        page = jnp.take(pages, index, axis=1)
        own = jnp.maximum(page, 0)
        k, v = _read(keys[own]), _read(values[own])
        scores = capped(jnp.einsum("rkmh,rkhc->rkmc", q.astype(k.dtype), k, preferred_element_type=jnp.float32), cap)
        columns = (index * PAGE + jnp.arange(PAGE))[None, None]
        seen = (_seen(columns, positions[:, :, None], window) & (page >= 0)[:, None, None])[:, None]
        new_peak = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, _HIDDEN), axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        added = jnp.einsum("rkmc,rkch->rkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return mixed * shrink[..., None] + added, new_peak, total * shrink + _total(weights, v.dtype)

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], _HIDDEN), jnp.zeros(q.shape[:-1], jnp.float32)
    mixed, _, total = jax.lax.fori_loop(0, reach, add, start)
    return mixed / jnp.maximum(total, 1e-30)[..., None]
