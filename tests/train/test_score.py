"""Locks the passage from hidden states to log-probs: values, support, temperature, gradients, and that no logits of a batch exist."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl.batch import TokenBatch
from burnish.train.score import HeadOptions, entropy, target_scores, token_logps

ROWS, LENGTH, TARGETS, WIDTH, VOCAB = 2, 12, 9, 8, 50


def batch_of(
    columns: np.ndarray, ids: np.ndarray, mask: np.ndarray, *, temperature: float = 1.0, kept: np.ndarray | None = None
) -> TokenBatch:
    """A batch of which only what scoring reads matters."""
    rows, targets = columns.shape
    grid = np.zeros((rows, LENGTH), np.int32)
    zeros, ones = np.zeros((rows, targets), np.int32), np.ones((rows, targets), np.int32)
    return TokenBatch(
        tokens=grid,
        positions=grid,
        segments=grid,
        parents=grid,
        columns=columns.astype(np.int32),
        own_columns=zeros,
        target_ids=ids.astype(np.int32),
        mask=mask,
        sequences=zeros,
        prompts_index=zeros,
        sequence_tokens=ones,
        prompt_tokens=ones,
        advantages=np.zeros((rows, targets), np.float32),
        returns=np.zeros((rows, targets), np.float32),
        sampler_logps=np.zeros((rows, targets), np.float32),
        temperatures=np.full((rows, targets), temperature, np.float32),
        kept_ids=kept,
        num_sequences=1,
        num_prompts=1,
    )


@pytest.fixture
def case() -> tuple[jax.Array, jax.Array, TokenBatch]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    columns = rng.integers(0, LENGTH, (ROWS, TARGETS))
    columns[:, :4] = 3  # the first tokens of four completions share their predecessor
    mask = np.arange(TARGETS)[None, :] < np.array([[7], [4]])
    return hidden, head, batch_of(columns, rng.integers(0, VOCAB, (ROWS, TARGETS)), mask, temperature=0.7)


def plain(hidden: jax.Array, head: jax.Array, batch: TokenBatch) -> jax.Array:
    """The definition, with all logits at once."""
    features = jnp.take_along_axis(hidden, jnp.asarray(batch.columns)[..., None], axis=1)
    logits = features @ head.T / jnp.asarray(batch.temperatures)[..., None]
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.target_ids)[..., None], axis=-1)[..., 0]
    return jnp.where(batch.mask, logps, 0.0)


@pytest.mark.parametrize("chunk", [1, 4, 5, 512])
@pytest.mark.parametrize("train_head", [False, True])
def test_values_and_gradients_are_those_of_the_full_softmax(case, chunk, train_head):
    hidden, head, batch = case
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, TARGETS)), jnp.float32)
    options = HeadOptions(chunk=chunk, train_head=train_head)

    def ours_total(h, w):
        return jnp.sum(target_scores(h, w, batch, options=options)[0] * cotangent)

    def expected_total(h, w):
        return jnp.sum(plain(h, w, batch) * cotangent)

    ours = jax.value_and_grad(ours_total, (0, 1))
    value, (d_hidden, d_head) = jax.jit(ours)(hidden, head)
    expected, (e_hidden, e_head) = jax.value_and_grad(expected_total, (0, 1))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(d_hidden, e_hidden, atol=2e-5)
    np.testing.assert_allclose(d_head, e_head if train_head else 0 * e_head, atol=2e-5)


def test_masked_positions_never_reach_values_or_gradients_r17(case):
    hidden, head, batch = case
    hidden = hidden.at[:, LENGTH - 1].set(jnp.nan)
    columns = np.where(batch.mask, np.minimum(batch.columns, LENGTH - 2), LENGTH - 1).astype(np.int32)
    batch = dataclasses.replace(batch, columns=columns)
    for train_head in (False, True):
        options = HeadOptions(chunk=4, train_head=train_head)
        total = lambda h, w, o=options: jnp.sum(target_scores(h, w, batch, options=o)[0])  # noqa: E731
        value, gradients = jax.value_and_grad(total, (0, 1))(hidden, head)
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in gradients)
        assert not np.any(gradients[0][:, LENGTH - 1])


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270), (0.0, -0.407606)])
def test_scores_are_at_the_sampling_temperature_b037(temperature, expected):
    head = jnp.eye(3)
    hidden = jnp.zeros((1, LENGTH, 3)).at[0, 2].set(jnp.array([2.0, 1.0, 0.0]))
    batch = batch_of(np.array([[2]]), np.array([[0]]), np.array([[True]]), temperature=temperature)
    np.testing.assert_allclose(target_scores(hidden, head, batch)[0], [[expected]], atol=1e-6)


def test_truncated_support_is_scored_on_its_kept_set_b039():
    head = jnp.eye(3)
    hidden = jnp.zeros((1, LENGTH, 3)).at[0, 2].set(jnp.array([2.0, 1.0, 0.0]))
    kept = np.array([[[0, 1], [-1, -1]]], np.int32)  # a row without a kept set is over the whole vocabulary
    batch = batch_of(np.array([[2, 2]]), np.array([[0, 0]]), np.array([[True, True]]), kept=kept)

    def total(h):
        return jnp.sum(target_scores(h, head, batch)[0])

    np.testing.assert_allclose(target_scores(hidden, head, batch)[0], [[-0.313262, -0.407606]], atol=1e-6)
    truncated, full = np.array([0.268941, -0.268941, 0.0]), np.array([1 - 0.665241, -0.244728, -0.090031])
    np.testing.assert_allclose(jax.grad(total)(hidden)[0, 2], truncated + full, atol=1e-6)


def test_logps_of_low_precision_logits_are_float32_and_not_positive_b049():
    logits = jax.random.normal(jax.random.key(0), (4, 32_000))
    ids = jnp.argmax(logits, axis=-1)
    low = token_logps(logits.astype(jnp.bfloat16), ids)
    assert low.dtype == jnp.float32
    assert float(low.max()) <= 0
    np.testing.assert_allclose(low, token_logps(logits, ids), atol=2e-2)
    certain = token_logps(jnp.array([[40.0, 0.0, -40.0]]), jnp.array([0]))
    assert float(certain[0]) == 0.0


def test_entropy_of_an_impossible_id_is_zero_b049():
    np.testing.assert_array_equal(entropy(jnp.array([[0.0, -jnp.inf]]))["entropy"], [0.0])
    assert np.isfinite(jax.grad(lambda x: entropy(x)["entropy"][0])(jnp.array([[0.0, -jnp.inf]]))).all()
    np.testing.assert_allclose(entropy(jnp.zeros((1, 8)))["entropy"], [np.log(8)], rtol=1e-6)


@pytest.mark.slow
def test_head_fn_streams_with_and_without_a_gradient(case):
    hidden, head, batch = case

    def total(h, *, gradient):
        options = HeadOptions(chunk=4, head_fn=entropy, head_fn_gradient=gradient)
        logps, extras = target_scores(h, head, batch, options=options)
        return jnp.sum(logps) + jnp.sum(extras["entropy"])

    def expected(h):
        logits = jnp.take_along_axis(h, jnp.asarray(batch.columns)[..., None], axis=1) @ head.T / 0.7
        p = jax.nn.softmax(logits)
        return jnp.sum(plain(h, head, batch)) - jnp.sum(jnp.where(batch.mask, jnp.sum(p * jnp.log(p), -1), 0.0))

    np.testing.assert_allclose(total(hidden, gradient=True), expected(hidden), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda h: total(h, gradient=True))(hidden), jax.grad(expected)(hidden), atol=2e-5)
    measured_only = jax.grad(lambda h: total(h, gradient=False))(hidden)
    np.testing.assert_allclose(measured_only, jax.grad(lambda h: jnp.sum(plain(h, head, batch)))(hidden), atol=2e-5)


def test_head_fn_receives_aux_of_its_own_tokens(case):
    hidden, head, batch = case
    aux = jnp.arange(ROWS * TARGETS, dtype=jnp.float32).reshape(ROWS, TARGETS)
    options = HeadOptions(chunk=4, head_fn=lambda logits, a: {"aux": a})
    extras = target_scores(hidden, head, batch, options=options, aux=aux)[1]
    np.testing.assert_array_equal(extras["aux"], jnp.where(batch.mask, aux, 0.0))


def test_chunks_without_a_scored_token_are_not_computed(case):
    """Chunks visited follow the number of scored tokens, not the width: counted by a callback in the head."""
    hidden, head, batch = case
    visits = []

    def counting(logits, aux):
        jax.debug.callback(lambda: visits.append(1))
        return {}

    options = HeadOptions(chunk=3, head_fn=counting)
    jax.block_until_ready(jax.jit(lambda h: target_scores(h, head, batch, options=options)[0])(hidden))
    jax.effects_barrier()
    assert len(visits) == -(-11 // 3)  # 7 + 4 of 18 targets are scored


@pytest.mark.parametrize("train_head", [False, True])
def test_no_array_of_a_batch_of_logits_exists(train_head):
    rows, length, targets, width, vocab, chunk = 32, 256, 192, 64, 49_152, 256
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(0, length, (rows, targets)), rng.integers(0, vocab, (rows, targets)), np.ones((rows, targets), bool))
    options = HeadOptions(chunk=chunk, train_head=train_head, head_fn=entropy)
    hidden = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    step = jax.value_and_grad(lambda h, w: jnp.sum(target_scores(h, w, batch, options=options)[0]), (0, 1))
    largest = max(np.prod(shape) for shape in shapes_in(jax.make_jaxpr(step)(hidden, head).jaxpr))
    assert largest == chunk * vocab


def shapes_in(jaxpr):
    """Shapes of every value in a program, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


@pytest.mark.parametrize("train_head", [False, True])
def test_at_bf16_only_the_head_is_rounded_and_gradients_stay_near(case, train_head):
    """Hidden states keep 16 bits: rounded to bfloat16 like the head, they would move these log-probs by some 1e-2."""
    hidden, head, batch = case
    options = HeadOptions(chunk=4, precision="bf16", train_head=train_head)
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)

    def total(h, w, score):
        logps = score(h, w)
        return jnp.sum(logps * jnp.cos(jnp.arange(TARGETS, dtype=jnp.float32))[None]), logps

    ours = jax.value_and_grad(partial(total, score=lambda h, w: target_scores(h, w, batch, options=options)[0]), (0, 1), has_aux=True)
    exact = jax.value_and_grad(partial(total, score=lambda h, w: plain(h, w, batch)), (0, 1), has_aux=True)
    ((_, low), low_gradients), ((_, high), high_gradients) = ours(hidden, head), exact(hidden, rounded)
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, high, atol=3e-4)
    for one, other in list(zip(low_gradients, high_gradients, strict=True))[: 1 + train_head]:
        np.testing.assert_allclose(jnp.vdot(one, other), jnp.linalg.norm(one) * jnp.linalg.norm(other), rtol=1e-3)
        np.testing.assert_allclose(jnp.linalg.norm(one), jnp.linalg.norm(other), rtol=1e-2)


def test_capped_logits_are_scored_and_differentiated_as_such(case: tuple[jax.Array, jax.Array, TokenBatch]) -> None:
    """With the head trained or not: log-probs and gradients are those of cap · tanh(logits / cap), at the temperature."""
    hidden, head, batch = case

    def plainly(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logits = 2.0 * jnp.tanh(hidden @ head.T / 2.0) / 0.7
        rows = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.asarray(batch.columns)[..., None], axis=1)
        picked = jnp.take_along_axis(rows, jnp.asarray(batch.target_ids)[..., None], axis=2)[..., 0]
        return jnp.where(jnp.asarray(batch.mask), picked, 0.0)

    def ours(hidden: jax.Array, head: jax.Array, *, train_head: bool) -> jax.Array:
        return target_scores(hidden, head, batch, options=HeadOptions(chunk=4, train_head=train_head, logit_cap=2.0))[0]

    wanted = jax.grad(lambda *a: jnp.sin(plainly(*a)).sum(), argnums=(0, 1))(hidden, head)
    for train_head in (False, True):
        np.testing.assert_allclose(ours(hidden, head, train_head=train_head), plainly(hidden, head), atol=1e-5)
        scored = partial(ours, train_head=train_head)
        got = jax.grad(lambda hidden, head, f=scored: jnp.sin(f(hidden, head)).sum(), argnums=(0, 1))(hidden, head)
        np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)
        if train_head:
            np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
    assert np.abs(plainly(hidden, head) - target_scores(hidden, head, batch)[0]).max() > 0.1
