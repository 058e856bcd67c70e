"""Log-probs of the scored tokens, streamed through the head in chunks: the only place where logits exist.

Owns the passage from hidden states to per-token scalars, with its own gradient, and the passes without a gradient (old, reference). No
array of [rows, tokens, vocabulary] ever exists: at most `chunk` tokens' logits do, and a chunk in which nothing is scored costs nothing.
Doesn't own the decoder (`models.transformer`), losses (`rl.losses`) or updates (`train.step`, which calls `policy_scores` under `grad`).

The gradient of a log-prob needs nothing but a factor from the loss: d logp / d hidden = (W[id] - sum_v p_v W[v]) / temperature. So where
the head isn't trained it is computed beside the log-prob, in one pass over the vocabulary (two products instead of three); where the head
is trained, or `head_fn` has a gradient of its own, the backward pass computes the logits of each chunk once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.moe import Load
from burnish.models.transformer import (
    Adapter,
    Params,
    Precision,
    Remat,
    capped,
    forward,
    forward_with_load,
    head_matrix,
    vocab_logits,
)
from burnish.rl.batch import TokenBatch

HeadFn = Callable[[Float[Array, "C V"], Any], dict[str, Float[Array, " C"]]]
"""(logits of a chunk at the sampling temperature, float32; `aux` of those tokens, or (aux, `shared`) where that is given) → named scalars
a token."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the head is streamed.

    chunk: tokens whose logits exist at one time. train_head: whether the head gets a gradient (else it is a constant). head_fn: scalars of
    the whole distribution; a measurement without a gradient unless `head_fn_gradient`. logit_cap: the model's own
    (`policy_scores` sets it).
    """

    chunk: int = 512
    precision: Precision = "f32"
    train_head: bool = False
    head_fn: HeadFn | None = None
    head_fn_gradient: bool = False
    logit_cap: float | None = None

    @property
    def one_pass(self) -> bool:
        return not self.train_head and not self.head_fn_gradient


class Asked(NamedTuple):
    """What is asked about each of N tokens; `aux` is a tree of [N, ...] for `head_fn`."""

    ids: Int[Array, " N"]
    temperatures: Float[Array, " N"]
    kept_ids: Int[Array, "N K"] | None
    aux: Any


def policy_scores(
    config: ModelConfig,
    params: Params,
    batch: TokenBatch,
    *,
    adapter: Adapter | None = None,
    options: HeadOptions = HeadOptions(),
    remat: Remat = False,
    aux: Any = None,
    noise: Float[Array, "R T D"] | None = None,
) -> tuple[Float[Array, "R M"], dict[str, Float[Array, "R M"]]]:
    """The policy's log-probs of a batch's scored ids, and what `options.head_fn` makes of the same logits. Differentiable.

    noise: added to the embeddings.
    """
    return policy_scores_and_load(
        config, params, batch, adapter=adapter, options=options, remat=remat, aux=aux, noise=noise, with_load=False
    )[:2]


def policy_scores_and_load(
    config: ModelConfig,
    params: Params,
    batch: TokenBatch,
    *,
    with_load: bool,
    adapter: Adapter | None = None,
    options: HeadOptions = HeadOptions(),
    remat: Remat = False,
    aux: Any = None,
    noise: Float[Array, "R T D"] | None = None,
) -> tuple[Float[Array, "R M"], dict[str, Float[Array, "R M"]], Load | None]:
    """`policy_scores`, and with `with_load` what the routers did in the same pass."""
    inputs = jnp.asarray(batch.tokens), jnp.asarray(batch.positions), Visibility(jnp.asarray(batch.segments), jnp.asarray(batch.parents))
    how: dict[str, Any] = {"adapter": adapter, "precision": options.precision, "remat": remat, "noise": noise}
    if with_load:
        hidden, load = forward_with_load(config, params, *inputs, **how)
    else:
        hidden, load = forward(config, params, *inputs, **how), None
    options = dataclasses.replace(options, logit_cap=config.logit_cap)
    return *target_scores(hidden, head_matrix(config, params), batch, options=options, aux=aux), load


def make_score(
    config: ModelConfig, *, lora_scale: float = 1.0, options: HeadOptions = HeadOptions()
) -> Callable[[Params, Params | None, TokenBatch], Array]:
    """A compiled `(params, adapter pairs or None, batch) -> float32[R, M]` without gradient, for old and reference log-probs."""

    @jax.jit
    def score(params: Params, pairs: Params | None, batch: TokenBatch) -> Array:
        adapter = None if pairs is None else Adapter(pairs, lora_scale)
        return policy_scores(config, params, batch, adapter=adapter, options=options)[0]

    return score


def target_scores(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "V D"],
    batch: TokenBatch,
    *,
    options: HeadOptions = HeadOptions(),
    aux: Any = None,
    shared: Any = None,
) -> tuple[Float[Array, "R M"], dict[str, Float[Array, "R M"]]]:
    """log p(target id | everything its column sees) at the temperature it was sampled at, over the support it was sampled from.

    Temperature 0 (greedy) is scored at 1. Where `kept_ids` names a support, the softmax is over those ids only. 0 where the mask is False,
    whatever the hidden state is there. aux: a tree of [R, M, ...]; shared: a tree of what all tokens have in common, another model's head
    say; neither gets a gradient. Returns the log-probs and the scalars of `head_fn`, all [R, M].
    """
    rows, length, width = hidden.shape
    mask = jnp.asarray(batch.mask)
    num_targets = mask.size
    chunk = min(options.chunk, num_targets)
    # Scored tokens first: then padding lies in the last chunks, which the loop doesn't visit.
    order = jnp.argsort(jnp.logical_not(mask.reshape(-1)), stable=True)
    padded = jnp.pad(order, (0, -num_targets % chunk))
    count = jnp.sum(mask, dtype=jnp.int32)
    columns = (jnp.arange(rows, dtype=jnp.int32)[:, None] * length + batch.columns).reshape(-1)
    features = jnp.take(hidden.reshape(-1, width), jnp.take(columns, padded), axis=0)
    features = jnp.where((jnp.arange(padded.size) < count)[:, None], features, 0.0)

    def asked(x: Array | np.ndarray) -> Array:
        return jnp.take(jnp.asarray(x).reshape(num_targets, *x.shape[2:]), padded, axis=0)

    temperatures = asked(jnp.where(batch.temperatures > 0, batch.temperatures, 1.0))
    kept_ids = None if batch.kept_ids is None else asked(batch.kept_ids)
    questions = Asked(asked(batch.target_ids), temperatures, kept_ids, jax.tree.map(asked, aux))
    logps, extras = cast(Scalars, _stream(dataclasses.replace(options, chunk=chunk), features, head, questions, shared, count))

    def unsorted(values: Float[Array, " N"]) -> Float[Array, "R M"]:
        scattered = jnp.zeros(num_targets, jnp.float32).at[order].set(values[:num_targets])
        return jnp.where(mask, scattered.reshape(mask.shape), 0.0)

    return unsorted(logps), jax.tree.map(unsorted, extras)


def token_logps(logits: Float[Array, "N V"], ids: Int[Array, " N"], kept_ids: Int[Array, "N K"] | None = None) -> Float[Array, " N"]:
    """log softmax(logits)[ids] in float32, never above 0; over `kept_ids` (which hold the id, padded with -1) where a row has any."""
    logits = logits.astype(jnp.float32)
    # A comparison instead of a gather: its gradient fuses with the softmax's, where a gather's would be a scatter.
    picked = jnp.sum(jnp.where(jnp.arange(logits.shape[-1])[None, :] == ids[:, None], logits, 0.0), axis=-1)
    if kept_ids is None:
        return picked - jax.nn.logsumexp(logits, axis=-1)
    kept = kept_ids >= 0
    supported = jnp.take_along_axis(logits, jnp.maximum(kept_ids, 0), axis=-1)
    some = jnp.any(kept, axis=-1)
    over_kept = jax.nn.logsumexp(jnp.where(kept | jnp.logical_not(some)[:, None], supported, -jnp.inf), axis=-1)
    return picked - jnp.where(some, over_kept, jax.nn.logsumexp(logits, axis=-1))


def entropy(logits: Float[Array, "C V"], aux: Any = None) -> dict[str, Float[Array, " C"]]:
    """A `HeadFn`: -sum_v p_v log p_v in nats; ids of probability 0 add nothing."""
    logps = jax.nn.log_softmax(logits, axis=-1)
    p = jnp.exp(logps)
    return {"entropy": -jnp.sum(p * jnp.where(p > 0, logps, 0.0), axis=-1)}


# ------------------------------------------------------------------------------------------------------------------ the stream

Scalars = tuple[Float[Array, " N"], dict[str, Float[Array, " N"]]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stream(options: HeadOptions, features: Array, head: Array, asked: Asked, shared: Any, count: Array) -> Scalars:
    return _scan_head(options, features, head, asked, shared, count, slopes=False)[0]


def _stream_forward(options: HeadOptions, features: Array, head: Array, asked: Asked, shared: Any, count: Array) -> tuple[Scalars, Any]:
    scalars, slopes = _scan_head(options, features, head, asked, shared, count, slopes=options.one_pass)
    return scalars, slopes if options.one_pass else (features, head, asked, shared, count)


def _stream_backward(options: HeadOptions, residuals: Any, cotangents: Scalars) -> tuple[Array, Array | None, None, None, None]:
    if options.one_pass:
        return residuals * cotangents[0][:, None], None, None, None, None
    features, head, asked, shared, count = residuals
    weights = _operand(head, options)

    def body(start: Array, carry: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        d_features, d_head = carry
        x, questions, g = jax.tree.map(partial(_chunk, start=start, size=options.chunk), (features, asked, cotangents))
        # One product here at bf16, not the two halves' of the scores: the slope is rounded anyway.
        logits = _product(_operand(x, options), weights, 1, 1)
        _, pull = jax.vjp(lambda logits: _scalars(options, logits, questions, shared), logits)
        slope = _operand(pull(g)[0], options)
        d_features = _put(d_features, _product(slope, weights, 1, 0), start)
        return d_features, None if d_head is None else d_head + _product(slope, _operand(x, options), 0, 0)

    d_head = jnp.zeros(head.shape, jnp.float32) if options.train_head else None
    d_features, d_head = _over_chunks(options, count, body, (jnp.zeros(features.shape, jnp.float32), d_head))
    return d_features, None if d_head is None else d_head.astype(head.dtype), None, None, None


_stream.defvjp(_stream_forward, _stream_backward)


def _scan_head(
    options: HeadOptions, features: Array, head: Array, asked: Asked, shared: Any, count: Array, *, slopes: bool
) -> tuple[Scalars, Array | None]:
    """The scalars of every token, and with `slopes` d logp / d feature, [N, D]."""
    weights = _operand(head, options)

    def body(start: Array, carry: tuple[Scalars, Array | None]) -> tuple[Scalars, Array | None]:
        scalars, slope = carry
        x, questions = jax.tree.map(partial(_chunk, start=start, size=options.chunk), (features, asked))
        logits = vocab_logits(x, weights)
        if slope is None:
            new = _scalars(options, logits, questions, shared)
        else:
            logps, pull, extras = jax.vjp(lambda z: _scalars(options, z, questions, shared), logits, has_aux=True)
            new = logps, extras
            slope = _put(slope, _product(_operand(pull(jnp.ones_like(logps))[0], options), weights, 1, 0), start)
        return jax.tree.map(partial(_put, start=start), scalars, new), slope

    like = jax.eval_shape(lambda a: _scalars(options, jnp.zeros((a.ids.shape[0], head.shape[0]), jnp.float32), a, shared), asked)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like), jnp.zeros(features.shape, jnp.float32) if slopes else None
    return _over_chunks(options, count, body, start)


def _scalars(options: HeadOptions, logits: Float[Array, "C V"], asked: Asked, shared: Any) -> Scalars:
    tempered = capped(logits, options.logit_cap) / asked.temperatures[:, None]
    aux = asked.aux if shared is None else (asked.aux, shared)
    extras = {} if options.head_fn is None else options.head_fn(tempered, aux)
    return token_logps(tempered, asked.ids, asked.kept_ids), extras


def _operand(x: Array, options: HeadOptions) -> Array:
    return x.astype(jnp.bfloat16 if options.precision == "bf16" else jnp.float32)


def _product(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def _over_chunks(options: HeadOptions, count: Array, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """`body(first token, carry)` for as many chunks as hold the first `count` tokens."""
    return jax.lax.fori_loop(0, (count + options.chunk - 1) // options.chunk, lambda i, c: body(i * options.chunk, c), carry)


def _chunk(x: Array, *, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(whole: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)
