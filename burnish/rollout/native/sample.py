"""Drawing one id for each row of logits, and the log-probability it was drawn with. Pure functions, no model.

Owns temperature, top-k, top-p, min-p and the noise; `decode.py` calls it inside its compiled programs. A row's result depends on its own
logits, rules and key only, never on the other rows.

Axes: S slots, V vocabulary, K kept ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_BLOCK = 256  # ids in one block of the two-level draw; near the root of usual vocabularies, where both levels cost the same


class Rules(NamedTuple):
    """How each row is sampled; the fields mean what they mean in `types.SamplingParams`."""

    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]


class Sampled(NamedTuple):
    """The drawn ids, their log-probabilities, and the kept set where the row's distribution was truncated (else all -1).

    A program that truncates nothing has K = 0.
    """

    ids: Int[Array, "*n S"]
    logps: Float[Array, "*n S"]
    kept_ids: Int[Array, "*n S K"]


def uniforms(keys: UInt32[Array, "S 2"], indices: Int[Array, " S"]) -> Float[Array, "S 2"]:
    """Two uniform numbers for each row, a function of its key and of the index of the token to be drawn."""

    def one(key: Array, index: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index), (2,))

    return jax.vmap(one)(keys, indices)


def sample(logits: Float[Array, "S V"], rules: Rules, noise: Float[Array, "S 2"], *, max_kept: int) -> Sampled:
    """Draw from softmax(logits / temperature), truncated where a row's rules say so; temperature 0 takes the likeliest id.

    The log-probability is over what was drawn from: the whole softmax at the temperature (at temperature 1 where greedy), or the kept ids.
    The kept set is the intersection of top-k, top-p and min-p within the likeliest `max_kept` ids, with top-p and min-p measured on the
    whole softmax; `max_kept` 0 compiles a program for rows that don't truncate.
    """
    vocabulary = logits.shape[-1]
    logits = jnp.pad(logits, ((0, 0), (0, -vocabulary % _BLOCK)), constant_values=-jnp.inf)
    likeliest, highest = _argmax(logits)
    greedy = rules.temperature == 0
    scaled = (logits - highest[:, None]) / jnp.where(greedy, 1.0, rules.temperature)[:, None]
    drawn, total = _draw(jnp.exp(scaled), noise)
    ids = jnp.where(greedy, likeliest, drawn)
    logps = _at(scaled, ids) - jnp.log(total)
    if max_kept == 0:
        return Sampled(ids, logps, jnp.zeros((*ids.shape, 0), jnp.int32))
    truncates = ~greedy & ((rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0))
    inside = _sample_kept(scaled, total, rules, noise[:, 0], min(max_kept, vocabulary))
    return Sampled(
        jnp.where(truncates, inside.ids, ids),
        jnp.where(truncates, inside.logps, logps),
        jnp.where(truncates[:, None], inside.kept_ids, -1),
    )


def _sample_kept(scaled: Float[Array, "S V"], total: Float[Array, " S"], rules: Rules, noise: Float[Array, " S"], limit: int) -> Sampled:
    """Draw within the kept set. Weights are relative to the likeliest id's, `total` is their sum over the vocabulary."""
    values, candidates = jax.lax.top_k(scaled, limit)
    weights = jnp.exp(values)
    share = weights / total[:, None]
    rank = jnp.arange(limit)[None]
    kept = (rules.top_k[:, None] == 0) | (rank < rules.top_k[:, None])
    # An id stays while the mass before it is below top-p, so the id that crosses the threshold is in; the likeliest always is.
    kept &= (rules.top_p[:, None] >= 1) | (jnp.cumsum(share, axis=-1) - share < rules.top_p[:, None])
    kept &= weights >= rules.min_p[:, None]
    weights = jnp.where(kept, weights, 0.0)
    place = _pick(weights, noise)
    logps = _at(values, place) - jnp.log(weights.sum(-1))
    return Sampled(_at(candidates, place), logps, jnp.where(kept, candidates, -1))


def _draw(weights: Float[Array, "S V"], noise: Float[Array, "S 2"]) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Inverse CDF in two levels, a block and then an id within it; also the total weight.

    One pass over the vocabulary instead of a Gumbel number for each id: 15 times cheaper than `jax.random.categorical` at 49,152 ids.
    A uniform number for each level keeps ids of probability under 2^-23 within reach.
    """
    blocks = weights.reshape(weights.shape[0], -1, _BLOCK)
    sums = blocks.sum(-1)
    block = _pick(sums, noise[:, 0])
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _pick(chosen, noise[:, 1]), sums.sum(-1)


def _pick(weights: Float[Array, "S N"], noise: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first place whose running total exceeds `noise` times the total. Never one of weight 0, however the sums are rounded."""
    ends = jnp.cumsum(weights, axis=-1)
    hit = (ends > noise[:, None] * ends[:, -1:]) & (weights > 0)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def _argmax(logits: Float[Array, "S V"]) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """The first likeliest id and its logit, in two levels: a plain maximum vectorises, an argmax over the vocabulary doesn't."""
    blocks = logits.reshape(logits.shape[0], -1, _BLOCK)
    highest = blocks.max(-1)
    block = jnp.argmax(highest, axis=-1).astype(jnp.int32)
    within = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1).astype(jnp.int32)
    return block * _BLOCK + within, highest.max(-1)


def _at(values: Array, places: Int[Array, " S"]) -> Array:
    return jnp.take_along_axis(values, places[:, None], axis=-1)[:, 0]
