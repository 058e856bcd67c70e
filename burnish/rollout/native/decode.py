"""The two compiled programs of the engine: prefill prompts into slots, decode a chunk of tokens in all slots.

Owns what runs on the device between two looks at the queue. Stateless but for the donated cache: the host keeps every slot's state in a
`Slots` record of small arrays and hands it in at each call, so that there is one truth about a slot. Layers are unrolled over per-layer
weights: stacked ones, as a trainer lends them, cost a copy of each layer at every step.

Axes: S slots, R prefilled rows, P padded prompt length, E stop ids a slot, N tokens in a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from burnish.models.attention import Visibility, attention
from burnish.models.config import ModelConfig
from burnish.models.rope import rope_angles
from burnish.models.transformer import Precision, block, embed, lm_logits, own_attention, traits_of
from burnish.rollout.native.cache import Cache, LayerCache, Spread, append, attend, insert, kept
from burnish.rollout.native.layout import Weights
from burnish.rollout.native.sample import Rules, Sampled, sample, uniforms


class Slots(NamedTuple):
    """What the next token of each slot depends on, besides weights and cache.

    tokens: the last id, not yet in the cache; positions: where it goes; remaining: how many tokens may still be sampled; indices: how many
    were; stop_ids: padded with -1. Slots that aren't active compute and are ignored.
    """

    tokens: Int[Array, " S"]
    positions: Int[Array, " S"]
    active: Bool[Array, " S"]
    remaining: Int[Array, " S"]
    indices: Int[Array, " S"]
    keys: UInt32[Array, "S 2"]
    stop_ids: Int[Array, "S E"]
    rules: Rules


@partial(jax.jit, static_argnames=("config", "max_kept", "precision", "spread"), donate_argnames="cache")
def prefill(
    weights: Weights,
    cache: Cache,
    prompts: Int[Array, "R P"],
    lengths: Int[Array, " R"],
    source: Int[Array, " S"],
    slots: Slots,
    *,
    config: ModelConfig,
    max_kept: int,
    precision: Precision,
    spread: Spread | None = None,
) -> tuple[Cache, Sampled]:
    """Run prompts once each, give every slot the row that `source` names (-1: none) and sample its first token."""
    columns = jnp.broadcast_to(jnp.arange(prompts.shape[1])[None], prompts.shape)
    real = (columns < lengths[:, None]).astype(jnp.int32)
    angles, visibility = rope_angles(config, columns), Visibility(real, jnp.zeros_like(real))
    x = embed(config, weights.embed, prompts)
    filled: list[LayerCache] = []
    for index, held in enumerate(cache):
        traits = traits_of(config, index)
        own = own_attention(config, traits)

        def mix(q: Array, k: Array, v: Array, held: LayerCache = held, own: Any = own) -> tuple[Array, LayerCache]:
            mixed = attention(q, k, v, visibility, precision=precision, positions=columns, **own)
            return mixed, kept(insert(held, k, v, source), spread)

        x, written = block(config, _layer(weights, index, x), x, angles, mix, traits=traits, precision=precision)
        filled.append(written)
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.take(_logits(config, weights, last), jnp.maximum(source, 0), axis=0)
    return tuple(filled), sample(_whole(logits, spread), slots.rules, uniforms(slots.keys, slots.indices), max_kept=max_kept)


@partial(jax.jit, static_argnames=("config", "num_tokens", "max_kept", "precision", "spread"), donate_argnames="cache")
def decode(
    weights: Weights,
    cache: Cache,
    slots: Slots,
    *,
    config: ModelConfig,
    num_tokens: int,
    max_kept: int,
    precision: Precision,
    spread: Spread | None = None,
) -> tuple[Cache, Sampled]:
    """Up to `num_tokens` more tokens of every active slot, fewer when all are done. Places [N, S] that weren't sampled hold id -1."""
    size = slots.tokens.shape[0]
    width = min(max_kept, config.vocab_size)
    empty = Sampled(
        jnp.full((num_tokens, size), -1, jnp.int32), jnp.zeros((num_tokens, size)), jnp.full((num_tokens, size, width), -1, jnp.int32)
    )

    def unfinished(carry: tuple[Array, Cache, Slots, Sampled]) -> Array:
        return (carry[0] < num_tokens) & carry[2].active.any()

    def step(carry: tuple[Array, Cache, Slots, Sampled]) -> tuple[Array, Cache, Slots, Sampled]:
        index, cache, slots, out = carry
        cache, hidden = _advance(config, weights, cache, slots, precision, spread)
        logits = _whole(_logits(config, weights, hidden), spread)
        new = sample(logits, slots.rules, uniforms(slots.keys, slots.indices), max_kept=max_kept)
        ids = jnp.where(slots.active, new.ids, -1)
        out = Sampled(out.ids.at[index].set(ids), out.logps.at[index].set(new.logps), out.kept_ids.at[index].set(new.kept_ids))
        return index + 1, cache, _next(slots, new.ids), out

    _, cache, _, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), cache, slots, empty))
    return cache, out


def _advance(
    config: ModelConfig, weights: Weights, cache: Cache, slots: Slots, precision: Precision, spread: Spread | None
) -> tuple[Cache, Float[Array, "S D"]]:
    """Put each slot's last token through the layers; its keys and values enter the cache."""
    angles = rope_angles(config, slots.positions)
    x = embed(config, weights.embed, slots.tokens)
    grown: list[LayerCache] = []
    for index, held in enumerate(cache):
        traits = traits_of(config, index)
        own = own_attention(config, traits)

        def mix(q: Array, k: Array, v: Array, held: LayerCache = held, own: Any = own) -> tuple[Array, LayerCache]:
            held = kept(append(held, k, v, slots.positions), spread)
            return attend(q, held, slots.positions, **own), held

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
