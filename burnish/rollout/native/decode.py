"""The two compiled programs of the engine: prefill pages of prompts, decode a chunk of tokens in all slots.

Owns what runs on the device between two looks at the queue. Stateless but for the donated cache: the host keeps every slot's state in a
`Slots` record of small arrays and hands it in at each call, so that there is one truth about a slot. Prefill samples nothing: a prompt's
last token enters with decoding, as every sampled one does, so a sequence that goes on from kept pages is no special case. Layers are
unrolled over per-layer weights: stacked ones, as a trainer lends them, cost a copy of each layer at every step.

Axes: S slots, E stop ids a slot, T tokens in a chunk; Z, N, r, Q, c, K, h as in `cache.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from burnish.models.config import ModelConfig
from burnish.models.rope import rope_angles
from burnish.models.transformer import Precision, block, embed, lm_logits, own_attention, traits_of
from burnish.rollout.native.cache import Cache, LayerCache, Page, Spread, Table, append, attend, attend_rows, kept, stored, write
from burnish.rollout.native.layout import Weights
from burnish.rollout.native.pool import PAGE
from burnish.rollout.native.sample import Rules, Sampled, sample, uniforms


class Slots(NamedTuple):
    """What the next token of each slot depends on, besides weights and cache.

    tokens: the last id, not yet in the cache; positions: where it goes; remaining: how many tokens may still be sampled; indices: how many
    were; stop_ids: padded with -1. Slots that aren't active compute, are ignored and write nothing.
    """

    tokens: Int[Array, " S"]
    positions: Int[Array, " S"]
    active: Bool[Array, " S"]
    remaining: Int[Array, " S"]
    indices: Int[Array, " S"]
    keys: UInt32[Array, "S 2"]
    stop_ids: Int[Array, "S E"]
    rules: Rules


class Rows(NamedTuple):
    """Pages to prefill, of any sequences and in any number up to the shape; a later page of a sequence may stand beside an earlier one.

    tokens: padded right; a page's last positions may hold nothing yet. starts: the first position. places: the page that is filled, N for
    a row that is empty. pages: the sequence's, from its first on, -1 padded. reach: of those, how many the longest needs.
    """

    tokens: Int[Array, "Z r c"]
    starts: Int[Array, "Z r"]
    places: Int[Array, "Z r"]
    pages: Int[Array, "Z r Q"]
    reach: Int[Array, ""]


@partial(jax.jit, static_argnames=("config", "precision", "spread"), donate_argnames="cache")
def prefill(
    weights: Weights, cache: Cache, rows: Rows, *, config: ModelConfig, precision: Precision, spread: Spread | None = None
) -> tuple[Cache, Page]:
    """Run each row once through the layers; its keys and values fill its page. Also returns these, as [Z, r, L, …].

    In each layer all rows are written before any is read, so the rows of one call may be one long prompt.
    """
    angles = rope_angles(config, rows.starts[..., None] + jnp.arange(PAGE)[None, None])
    x = embed(config, weights.embed, rows.tokens)
    filled: list[LayerCache] = []
    made: list[LayerCache] = []
    for index, held in enumerate(cache):
        traits = traits_of(config, index)
        own = own_attention(config, traits)

        def mix(q: Array, k: Array, v: Array, held: LayerCache = held, own: Any = own) -> tuple[Array, tuple[LayerCache, LayerCache]]:
            dtype = held.keys.dtype
            new = LayerCache(stored(k.transpose(0, 1, 3, 4, 2), dtype), stored(v.transpose(0, 1, 3, 2, 4), dtype))
            held = kept(write(held, *new, rows.places), spread)
            return attend_rows(q, held, rows.pages, rows.reach, rows.starts, **own), (held, new)

        x, (written, new) = block(config, _layer(weights, index, x), x, angles, mix, traits=traits, precision=precision)
        filled.append(written)
        made.append(new)
    keys, values = zip(*made, strict=True)
    return tuple(filled), Page(jnp.stack(keys, axis=2), jnp.stack(values, axis=2))


@partial(jax.jit, static_argnames=("config", "num_tokens", "max_kept", "precision", "spread"), donate_argnames="cache")
def decode(
    weights: Weights,
    cache: Cache,
    slots: Slots,
    table: Table,
    *,
    config: ModelConfig,
    num_tokens: int,
    max_kept: int,
    precision: Precision,
    spread: Spread | None = None,
) -> tuple[Cache, Sampled]:
    """Up to `num_tokens` more tokens of every active slot, fewer when all are done. Places [T, S] that weren't sampled hold id -1.

    The table must have the pages that these tokens go to.
    """
    size = slots.tokens.shape[0]
    width = min(max_kept, config.vocab_size)
    empty = Sampled(
        jnp.full((num_tokens, size), -1, jnp.int32), jnp.zeros((num_tokens, size)), jnp.full((num_tokens, size, width), -1, jnp.int32)
    )

    def unfinished(carry: tuple[Array, Cache, Slots, Sampled]) -> Array:
        return (carry[0] < num_tokens) & carry[2].active.any()

    def step(carry: tuple[Array, Cache, Slots, Sampled]) -> tuple[Array, Cache, Slots, Sampled]:
        index, cache, slots, out = carry
        cache, hidden = _advance(config, weights, cache, slots, table, precision, spread)
        logits = _whole(_logits(config, weights, hidden), spread)
        new = sample(logits, slots.rules, uniforms(slots.keys, slots.indices), max_kept=max_kept)
        ids = jnp.where(slots.active, new.ids, -1)
        out = Sampled(out.ids.at[index].set(ids), out.logps.at[index].set(new.logps), out.kept_ids.at[index].set(new.kept_ids))
        return index + 1, cache, _next(slots, new.ids), out

    _, cache, _, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), cache, slots, empty))
    return cache, out


def _advance(
    config: ModelConfig, weights: Weights, cache: Cache, slots: Slots, table: Table, precision: Precision, spread: Spread | None
) -> tuple[Cache, Float[Array, "S D"]]:
    """Put each slot's last token through the layers; its keys and values enter the cache."""
    angles = rope_angles(config, slots.positions)
    page = jnp.take_along_axis(table.pages, slots.positions[:, None] // PAGE, axis=1)[:, 0]
    places = jnp.where(slots.active & (page >= 0), page, table.owners.shape[1])
    x = embed(config, weights.embed, slots.tokens)
    grown: list[LayerCache] = []
    for index, held in enumerate(cache):
        traits = traits_of(config, index)
        own = own_attention(config, traits)

        def mix(q: Array, k: Array, v: Array, held: LayerCache = held, own: Any = own) -> tuple[Array, LayerCache]:
            held = kept(append(held, k, v, places, slots.positions % PAGE), spread)
            return attend(q, held, table, slots.positions, **own), held

        x, written = block(config, _layer(weights, index, x), x, angles, mix, traits=traits, precision=precision)
        grown.append(written)
    return tuple(grown), x


def _layer(weights: Weights, index: int, x: Array) -> dict[str, Array]:
    """One layer's weights. x: what enters it.

    Stacked ones are sliced at an index that depends on `x`, by nothing: a compiler that could would slice all layers at once, before the
    loop over tokens or at its start, and there would be a second copy of the model after all.
    """
    if isinstance(weights.layers, tuple):
        return weights.layers[index]
    nothing = jnp.minimum(jnp.abs(x.ravel()[0]), 0.0).astype(jnp.int32)
    return {name: jax.lax.dynamic_index_in_dim(leaf, nothing + index, keepdims=False) for name, leaf in weights.layers.items()}


def _logits(config: ModelConfig, weights: Weights, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
    return lm_logits(config, hidden, weights.final_norm, weights.head)


def _whole(logits: Float[Array, "S V"], spread: Spread | None) -> Float[Array, "S V"]:
    """Each slot's vocabulary on one device: drawing sums over it, in an order that the number of devices mustn't change."""
    return logits if spread is None else jax.lax.with_sharding_constraint(logits, spread.slots)


def _next(slots: Slots, ids: Int[Array, " S"]) -> Slots:
    """The state after one token: a slot goes on until a stop id or the end of its budget."""
    grow = slots.active.astype(jnp.int32)
    stopped = (slots.stop_ids == ids[:, None]).any(-1)
    return slots._replace(
        tokens=jnp.where(slots.active, ids, slots.tokens),
        positions=slots.positions + grow,
        remaining=slots.remaining - grow,
        indices=slots.indices + grow,
        active=slots.active & ~stopped & (slots.remaining > 1),
    )
