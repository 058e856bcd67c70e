"""Attention in blocks equals a dense reference, gradients, windows and caps included, and holds nothing of size [T, T]."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Bool

from burnish.models.attention import Visibility, _needed, _Rule, attention, total_weight

ROWS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 8


def dense_mask(rule: Visibility, positions: Array | None = None, window: Array | None = None) -> Bool[Array, "B T T"]:
    """The rule, written out."""
    if positions is not None and window is not None:
        return dense_mask(rule) & (positions[:, :, None] - positions[:, None, :] < window)
    columns = jnp.arange(rule.segments.shape[1])
    keys, own, parents = rule.segments[:, None, :], rule.segments[:, :, None], rule.parents[:, :, None]
    return (columns[None, None, :] <= columns[None, :, None]) & (keys != 0) & ((keys == own) | (keys == parents))


def reference(
    q: Array,
    k: Array,
    v: Array,
    rule: Visibility,
    *,
    positions: Array | None = None,
    window: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Softmax over a dense mask; a query that sees nothing gives 0."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    mask = dense_mask(rule, positions, window)[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs(length: int, *, seed: int = 0) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(ROWS, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v


def rule_of(name: str, length: int) -> Visibility:
    columns = np.arange(length)
    third = np.stack([columns // (length // 3 + 1), columns // (length // 4 + 1)]) + 1
    held = columns < [[length - 5], [length // 2]]
    segments, parents = {
        "causal": (np.ones_like(third), np.zeros_like(third)),
        "packed": (third, np.zeros_like(third)),
        # The prompt is segment 1; every completion after it sees the prompt and itself.
        "shared prompt": (third, np.where(third > 1, 1, 0)),
        "padded": (np.where(held, third, 0), np.where(held & (third > 1), 1, 0)),
        "empty row": (third * [[1], [0]], np.zeros_like(third)),
        # Numbers in no order: the skipping of blocks may not rely on it.
        "shuffled": (np.asarray([3, 9, 1, 7, 5])[third], np.where(third > 1, 9, 0)),
    }[name]
    return Visibility(jnp.asarray(segments, jnp.int32), jnp.asarray(parents, jnp.int32))


RULES = ["causal", "packed", "shared prompt", "padded", "empty row", "shuffled"]


@partial(jax.jit, static_argnames="block")
def ours_and_reference(q: Array, k: Array, v: Array, rule: Visibility, direction: Array, *, block: int | None) -> tuple[Any, Any]:
    """Outputs and gradients of both; one program for all rules."""

    def run(f: Any) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, rule), q, k, v)
        return out, pull(direction)

    return run(partial(attention, block=block)), run(reference)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients_equal_the_dense_reference(name: str, block: int | None) -> None:
    """In one block, and in blocks that don't divide the row (37 = 4·8 + 5)."""
    q, k, v = inputs(37)
    ours, wanted = ours_and_reference(q, k, v, rule_of(name, 37), jax.random.normal(jax.random.key(9), q.shape), block=block)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)


def test_padding_gives_nothing_and_takes_no_gradient() -> None:
    q, k, v = inputs(37)
    rule = rule_of("padded", 37)
    (out, gradients), _ = ours_and_reference(q, k, v, rule, jnp.ones_like(q), block=8)
    padding = np.asarray(rule.segments == 0)
    for x in (out, *gradients):
        assert np.abs(np.asarray(x)[padding]).max() == 0 < np.abs(np.asarray(x)[~padding]).max()


def test_a_block_is_skipped_only_where_nothing_is_visible() -> None:
    """Every visible pair lies in a needed pair of blocks; above the diagonal none is needed, nor between two packed sequences."""
    for name in RULES:
        rule = rule_of(name, 64)
        blocks = in_blocks(rule)
        visible = np.asarray(dense_mask(rule)).any(axis=0).reshape(8, 8, 8, 8).any(axis=(1, 3))
        assert not (visible & ~np.asarray(_needed(blocks))).any(), name
    segments = jnp.repeat(jnp.asarray([1, 2], jnp.int32), 32)[None]
    needed = _needed(in_blocks(Visibility(segments, jnp.zeros_like(segments))))
    np.testing.assert_array_equal(needed, np.kron(np.eye(2, dtype=bool), np.tril(np.ones((4, 4), bool))))


def in_blocks(rule: Visibility, positions: Array | None = None, window: int | None = None) -> _Rule:
    """Eight blocks of eight tokens."""
    cut = [None if x is None else x.reshape(-1, 8, 8).swapaxes(0, 1) for x in (*rule, positions)]
    return _Rule(*cut, None if window is None else jnp.int32(window))  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="cap")
def windowed(q: Array, k: Array, v: Array, rule: Visibility, positions: Array, window: Array, *, cap: float | None) -> tuple[Any, Any]:
    """As `ours_and_reference`, with a window that may be another at every call of the one program."""

    def run(f: Any) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, rule, positions=positions, window=window, cap=cap), q, k, v)
        return out, pull(jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape))

    return run(partial(attention, block=8)), run(reference)


@pytest.mark.parametrize("name", ["causal", "shared prompt", "padded"])
def test_windows_and_caps_equal_the_dense_reference(name: str) -> None:
    """A window of 1 sees the token itself; a completion's window reaches back into the prompt by positions, not by columns."""
    q, k, v = inputs(37)
    rule = rule_of(name, 37)
    position = np.stack([logical_positions(*(np.asarray(x)[row] for x in rule)) for row in range(ROWS)])
    results = []
    for window in (1, 5, 20, 2**30):
        ours, wanted = windowed(3 * q, 3 * k, v, rule, jnp.asarray(position, jnp.int32), jnp.int32(window), cap=2.0)
        for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(ours), strict=True):
            np.testing.assert_allclose(other, one, atol=5e-5)
        results.append(np.asarray(ours[0]))
    assert all(np.abs(one - other).max() > 0.1 for one, other in zip(results, results[1:], strict=False))


def logical_positions(segments: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Positions as a sequence counts them: a completion goes on where its prompt ended."""
    lengths = {int(segment): int((segments == segment).sum()) for segment in np.unique(segments)}
    starts = {int(segment): lengths.get(int(parents[segments == segment][0]), 0) * (segment > 1) for segment in np.unique(segments)}
    return np.asarray([starts[int(s)] + int((segments[:i] == s).sum()) for i, s in enumerate(segments)])


def test_blocks_beyond_the_window_are_skipped() -> None:
    ones = jnp.ones((1, 64), jnp.int32)
    needed = _needed(in_blocks(Visibility(ones, 0 * ones), jnp.arange(64, dtype=jnp.int32)[None], window=9))
    np.testing.assert_array_equal(needed, np.tril(np.ones((8, 8), bool)) & ~np.tril(np.ones((8, 8), bool), k=-2))


def test_a_window_without_positions_is_refused() -> None:
    q, k, v = inputs(37)
    with pytest.raises(ValueError, match="pass `positions`"):
        attention(q, k, v, rule_of("causal", 37), window=4)


def sizes(jaxpr: Jaxpr) -> list[int]:
    """The number of elements of every value in a program, loops and branches included."""
    avals = [variable.aval for equation in jaxpr.eqns for variable in equation.outvars]
    found = [int(np.prod(aval.shape)) for aval in avals]  # type: ignore[attr-defined]
    for equation in jaxpr.eqns:
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                found += sizes(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
    return found


def test_no_array_of_size_t_by_t_exists_at_1024() -> None:
    """Forward and gradient: the largest value is a block of scores or an input, far below [T, T] for one head."""
    length = 1024
    shapes = [jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    ones = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: Array, k: Array, v: Array, segments: Array, parents: Array) -> Array:
        return attention(q, k, v, Visibility(segments, parents)).sum()

    for f in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        largest = max(sizes(jax.make_jaxpr(f)(*shapes, ones, ones).jaxpr))
        assert HEADS * 256 * 256 <= largest < length * length


@pytest.mark.slow
def test_bf16_rounds_operands_and_keeps_statistics() -> None:
    q, k, v = inputs(37)
    rule = rule_of("shared prompt", 37)
    wanted = reference(q, k, v, rule)
    got = attention(q, k, v, rule, precision="bf16", block=16)
    assert got.dtype == jnp.float32
    difference = float(jnp.abs(got - wanted).max())
    assert 1e-5 < difference < 3e-2


def test_at_bf16_a_blocks_total_depends_on_no_order_and_no_place() -> None:
    weights = np.exp(-4 * np.random.default_rng(5).random((200, 48), np.float32))
    shuffled = np.random.default_rng(6).permuted(weights, axis=1)
    moved = np.concatenate([np.zeros((200, 30), np.float32), weights, np.zeros((200, 50), np.float32)], axis=1)
    totals = [np.asarray(total_weight(jnp.asarray(x), "bf16")) for x in (weights, shuffled, moved)]
    assert (totals[0] == totals[1]).all() and (totals[0] == totals[2]).all()
    np.testing.assert_allclose(totals[0], weights.sum(-1, dtype=np.float64), atol=48 * 2.0**-21)
    assert (weights.sum(-1) != shuffled.sum(-1)).any()  # what floating point would have done
