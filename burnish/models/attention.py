"""Attention over packed rows, from segment metadata: in blocks, with its own gradient, no `[T, T]` array and no dense mask.

Owns the visibility rule and the only attention of training and scoring; cached attention of the engine is the engine's. Called by
`transformer.forward`.

The row is cut into blocks of queries and keys. A pair of blocks in which nothing is visible (above the diagonal, or no segment in common)
is never computed: the pairs that are needed are listed first and a loop runs over that list alone. Each pair updates a running maximum and
sum (online softmax; Milakov & Gimelshein, 2018, arXiv:1805.02867), and the backward pass computes the weights again from the logarithm of
that sum (Dao et al., 2022, arXiv:2205.14135). Statistics and sums are float32; at `bf16` only the operands of products are rounded.

Axes: B rows, T tokens, H/K query/key heads, G = H/K, h head_dim, N blocks of t tokens, m = G·t queries of one key head in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from burnish.models.config import Precision

KEPT = "kept"
"""Name of the values that a backward pass wants kept, whatever else is computed again."""

_BLOCK, _LEAST_BLOCK = 256, 64
_SCORES = 2**23
"""Scores of a pair of blocks, over all rows and heads: more of them and blocks get smaller. A backward pass holds four such arrays."""
_HIDDEN, _FLOOR = -1e30, -1e29
"""Score of what isn't visible, and the least maximum: far above the former, so that exp(score - maximum) is 0 where nothing is visible."""


class Visibility(NamedTuple):
    """Who sees whom: query i sees key j iff j <= i, segments[j] != 0 and segments[j] is segments[i] or parents[i].

    segments: 0 is padding, else a number that is unique in the row. parents: the segment of the shared prompt, 0 for none.
    """

    segments: Int[Array, "B T"]
    parents: Int[Array, "B T"]


def visible_pairs(rule: Visibility) -> Bool[Array, "B T T"]:
    """The rule as a dense mask, [row, query, key]: for decoders that take one."""
    segments, parents = rule
    own = segments[:, :, None] == segments[:, None, :]
    shared = parents[:, :, None] == segments[:, None, :]
    columns = jnp.arange(segments.shape[1])
    return (own | shared) & (segments != 0)[:, None, :] & (columns[None, :] <= columns[:, None])[None]


class _Rule(NamedTuple):
    """Visibility in blocks. Where there is a window, a query also sees a key only if it stands less than `window` positions back."""

    segments: Int[Array, "N B t"]
    parents: Int[Array, "N B t"]
    positions: Int[Array, "N B t"] | None
    window: Int[Array, ""] | None


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    rule: Visibility,
    *,
    precision: Precision = "f32",
    positions: Int[Array, "B T"] | None = None,
    window: Array | np.ndarray | int | None = None,
    cap: float | None = None,
    block: int | None = None,
) -> Float[Array, "B T H h"]:
    """softmax(q·k / sqrt(h)) v over what each query may see; a query that sees nothing gives 0.

    window: besides, a query sees only keys less than so many `positions` back (columns won't do: a shared prompt stands far from its
    completions); it may differ from layer to layer of a scan. cap: scores become cap · tanh(score / cap). block: tokens in a block, for
    tests; None takes blocks of equal size and at most 256 tokens, fewer where many rows are short.
    """
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    size = block or _block_size(length, matrices=q.shape[0] * q.shape[2])
    segments, parents = (_cut_columns(x, size) for x in rule)
    if window is None:
        cut = _Rule(segments, parents, None, None)
    else:
        if positions is None:
            raise ValueError("a window is counted in positions: pass `positions` with it")
        cut = _Rule(segments, parents, _cut_columns(positions, size), jnp.asarray(window, jnp.int32))
    out: Array = _attend(_cut(q * q.shape[-1] ** -0.5, size, groups), _cut(k, size), _cut(v, size), cut, precision, cap)
    return _join(out, groups)[:, :length]


def _block_size(length: int, *, matrices: int) -> int:
    most = min(_BLOCK, max(_LEAST_BLOCK, math.isqrt(_SCORES // matrices)))
    blocks = -(-length // most)
    return -(-length // blocks)


# -------------------------------------------------------------------------------------------------------------------------- layout


def _cut(x: Float[Array, "B T X h"], size: int, groups: int = 1) -> Float[Array, "N B K m h"]:
    """Blocks first, then heads; the queries of one key head stand in one matrix."""
    rows, length, heads, head_dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
    x = x.reshape(rows, -1, size, heads // groups, groups, head_dim).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], groups * size, head_dim)


def _join(x: Float[Array, "N B K m h"], groups: int) -> Float[Array, "B T H h"]:
    blocks, rows, kv_heads, stacked, head_dim = x.shape
    x = x.reshape(blocks, rows, kv_heads, groups, stacked // groups, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(rows, -1, kv_heads * groups, head_dim)


def _cut_columns(x: Int[Array, "B T"], size: int) -> Int[Array, "N B t"]:
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(x.shape[0], -1, size).swapaxes(0, 1)


# ------------------------------------------------------------------------------------------------------------------- which blocks


def _visible(rule: _Rule, i: Int[Array, ""] | int, j: Int[Array, ""] | int) -> Bool[Array, "B t s"]:
    """The rule for the queries of block i and the keys of block j."""
    size = rule.segments.shape[-1]
    own, parents, keys = rule.segments[i][:, :, None], rule.parents[i][:, :, None], rule.segments[j][:, None, :]
    columns = jnp.arange(size)
    causal = (j * size + columns[None, :] <= i * size + columns[:, None])[None]
    seen = causal & (keys != 0) & ((keys == own) | (keys == parents))
    if rule.positions is None or rule.window is None:
        return seen
    return seen & (rule.positions[i][:, :, None] - rule.positions[j][:, None, :] < rule.window)


def _needed(rule: _Rule) -> Bool[Array, "N N"]:
    """Pairs of blocks (queries, keys) in which some row may see something: below the diagonal, the ranges of segments meet, and the
    nearest positions are within the window."""

    def span(x: Int[Array, "N B t"]) -> tuple[Int[Array, "N B"], Int[Array, "N B"]]:
        return jnp.where(x == 0, jnp.iinfo(x.dtype).max, x).min(axis=-1), x.max(axis=-1)

    low, high = span(rule.segments)
    low_parent, high_parent = span(rule.parents)

    def meet(low_query: Int[Array, "N B"], high_query: Int[Array, "N B"]) -> Bool[Array, "N N"]:
        return ((low[None] <= high_query[:, None]) & (low_query[:, None] <= high[None])).any(axis=-1)

    blocks = jnp.arange(low.shape[0])
    needed = (blocks[None, :] <= blocks[:, None]) & (meet(low, high) | meet(low_parent, high_parent))
    if rule.positions is None or rule.window is None:
        return needed
    apart = rule.positions.min(axis=-1)[:, None] - rule.positions.max(axis=-1)[None]
    return needed & (apart < rule.window).any(axis=-1)


def _each_pair(rule: _Rule, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """Apply `body(i, j, carry)` to every needed pair, all keys of one block of queries after another."""
    blocks = rule.segments.shape[0]
    if blocks == 1:
        return body(0, 0, carry)
    needed = _needed(rule)
    queries, keys = jnp.nonzero(needed, size=blocks * (blocks + 1) // 2, fill_value=0)
    return jax.lax.fori_loop(0, needed.sum(), lambda n, carry: body(queries[n], keys[n], carry), carry)


# ---------------------------------------------------------------------------------------------------------------------- arithmetic


def _product(subscripts: str, a: Array, b: Array, precision: Precision) -> Array:
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def total_weight(weights: Float[Array, "*n s"], precision: Precision) -> Float[Array, "*n"]:
    """Sum of softmax weights, each at most 1, over the keys of a block.

    At `bf16` in steps of 2^-20, as integers: the one sum whose bits depend neither on the order of its terms nor on where a sequence lies
    in a row, so that sampling and training divide by the same number. The weights themselves, as products take them, are rounded to 2^-9.
    """
    if precision == "f32":
        return weights.sum(axis=-1)
    return jnp.round(weights * 2.0**20).astype(jnp.int32).sum(axis=-1).astype(jnp.float32) * 2.0**-20


def _scores(
    q: Float[Array, "N B K m h"], k: Float[Array, "N B K s h"], rule: _Rule, i: Any, j: Any, precision: Precision, cap: float | None
) -> Array:
    """Scores [B, K, m, s] of a pair of blocks, `_HIDDEN` where the rule forbids."""
    scores = _product("bkmh,bksh->bkms", q[i], k[j], precision)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    rows, kv_heads, stacked, keys = scores.shape
    mask = _visible(rule, i, j)[:, None, None]
    grouped = scores.reshape(rows, kv_heads, stacked // mask.shape[-2], mask.shape[-2], keys)
    return jnp.where(mask, grouped, _HIDDEN).reshape(scores.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: Float[Array, "N B K m h"],
    k: Float[Array, "N B K s h"],
    v: Float[Array, "N B K s h"],
    rule: _Rule,
    precision: Precision,
    cap: float | None,
) -> Float[Array, "N B K m h"]:
    return _forward(q, k, v, rule, precision, cap)[0]


def _forward(q: Array, k: Array, v: Array, rule: _Rule, precision: Precision, cap: float | None) -> tuple[Array, tuple[Any, ...]]:
    def body(i: Any, j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, peak, total = carry
        scores = _scores(q, k, rule, i, j, precision, cap)
        new_peak = jnp.maximum(peak[i], scores.max(axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        shrink = jnp.exp(peak[i] - new_peak)
        added = _product("bkms,bksh->bkmh", weights, v[j], precision)
        return (
            mixed.at[i].set(mixed[i] * shrink[..., None] + added),
            peak.at[i].set(new_peak),
            total.at[i].set(total[i] * shrink + total_weight(weights, precision)),
        )

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], _FLOOR), jnp.zeros(q.shape[:-1], jnp.float32)
    mixed, peak, total = _each_pair(rule, body, start)
    total = jnp.where(total == 0, 1.0, total)
    out, q, k, v, log_total = checkpoint_name((mixed / total[..., None], q, k, v, peak + jnp.log(total)), KEPT)
    return out, (q, k, v, rule, out, log_total)


def _backward(
    precision: Precision, cap: float | None, residuals: tuple[Any, ...], g: Float[Array, "N B K m h"]
) -> tuple[Array, Array, Array, None]:
    q, k, v, rule, out, log_total = residuals
    along = jnp.sum(g * out, axis=-1)

    def body(i: Any, j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        scores = _scores(q, k, rule, i, j, precision, cap)
        weights = jnp.exp(scores - log_total[i][..., None])
        dscores = weights * (_product("bkmh,bksh->bkms", g[i], v[j], precision) - along[i][..., None])
        if cap is not None:  # of tanh; a hidden score's square would be inf, and inf · 0 no number
            dscores = dscores * (1.0 - jnp.square(jnp.where(weights > 0, scores, 0.0) / cap))
        return (
            dq.at[i].add(_product("bkms,bksh->bkmh", dscores, k[j], precision)),
            dk.at[j].add(_product("bkms,bkmh->bksh", dscores, q[i], precision)),
            dv.at[j].add(_product("bkms,bkmh->bksh", weights, g[i], precision)),
        )

    return *_each_pair(rule, body, (jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v))), None


_attend.defvjp(_forward, _backward)
