"""What to do about a sampler that isn't the policy: weigh its samples, reject some, and always say how far the two are apart.

Owns importance weights (sampler → anchor), rejection by the same ratios, and the mismatch metrics. A policy loss corrects from the anchor
to the policy now by its own ratio; this corrects what came before, from a sampler with older weights or other kernels. Options are bound
by `rl.algorithms`; the training step calls `mismatch` always and an algorithm's `reject` before its loss and its aggregation.

Levels, with δ = old_logps - sampler_logps of a token, clamped at ± MAX_LOG_RATIO and 0 at padding: "token" e^δ; "sequence" e^Σδ over the
episode (clamped likewise), the unbiased and the most variable one; "geometric" e^(mean of δ), which no length makes extreme.
Sources: truncation Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"; masks, sequence and
geometric levels Liu et al., 2025, "When speed kills stability".
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from burnish.rl.batch import Scores, TokenBatch
from burnish.rl.losses import (
    MAX_LOG_RATIO,
    EffectiveShare,
    Extreme,
    Loss,
    Mean,
    Metrics,
    PerToken,
    anchor,
    clean,
    episode_mean,
    episode_sum,
    over_tokens,
)

Level = Literal["token", "sequence", "geometric"]


@runtime_checkable
class Reject(Protocol):
    """(scores, batch) → the batch with fewer scored tokens, metrics."""

    def __call__(self, scores: Scores, batch: TokenBatch, /) -> tuple[TokenBatch, Metrics]: ...


def ratios(scores: Scores, batch: TokenBatch, /, *, level: Level) -> PerToken:
    """The anchor's probability of each token, sequence or mean token over the sampler's; constants, 1 at the padding of "token"."""
    delta = jnp.clip(anchor(scores, batch) - clean(batch.sampler_logps, batch.mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "token":
        return jnp.exp(delta)
    if level == "geometric":
        return jnp.exp(episode_mean(delta, batch))
    return jnp.exp(jnp.clip(episode_sum(delta, batch), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weights(
    scores: Scores, batch: TokenBatch, /, *, level: Level = "token", mode: Literal["truncate", "mask"] = "truncate", cap: float = 2.0
) -> PerToken:
    """The ratios, bounded: above `cap` a weight becomes `cap` ("truncate") or 0 ("mask", the token stays in the denominator)."""
    weights = ratios(scores, batch, level=level)
    return jnp.minimum(weights, cap) if mode == "truncate" else jnp.where(weights > cap, 0.0, weights)


def weighted(loss: Loss, *, level: Level = "token", mode: Literal["truncate", "mask"] = "truncate", cap: float = 2.0) -> Loss:
    """The loss times constant importance weights of its tokens. Penalties and bonuses are wrapped around this, not inside."""

    def corrected(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
        per_token, metrics = loss(scores, batch)
        weights = importance_weights(scores, batch, level=level, mode=mode, cap=cap)
        over = ratios(scores, batch, level=level) > cap
        return weights * per_token, metrics | {
            "mismatch/weight_mean": over_tokens(weights, batch.mask),
            "mismatch/capped_fraction": over_tokens(over.astype(weights.dtype), batch.mask),
        }

    return corrected


def rejecting(
    scores: Scores, batch: TokenBatch, /, *, level: Level = "geometric", low: float = 0.5, high: float = 2.0
) -> tuple[TokenBatch, Metrics]:
    """The batch without the tokens whose ratio lies outside [low, high]: they leave the numerator and the denominator of every mean.

    `sequence_tokens` is counted again. `prompt_tokens` isn't, as a group may lie in several micro-batches: under `prompt_mean` a group
    weighs by the share of its tokens that is left. What is taken over an episode afterwards (GSPO's ratio, weights of level "sequence") is
    taken over the tokens that are left. A NaN is no reason to reject: it must reach the loss, and be counted there.
    """
    ratio = ratios(scores, batch, level=level)
    out = (ratio < low) | (ratio > high)
    mask = jnp.logical_and(batch.mask, jnp.logical_not(out))
    left = episode_sum(clean(jnp.ones_like(ratio), mask), batch).astype(jnp.int32)
    kept = dataclasses.replace(batch, mask=mask, sequence_tokens=jnp.where(mask, jnp.maximum(left, 1), 1))
    return kept, {"mismatch/rejected_fraction": over_tokens(out.astype(ratio.dtype), batch.mask)}


def mismatch(scores: Scores, batch: TokenBatch, /) -> Metrics:
    """How far the policy now is from the sampler, on the sampled ids: an alarm for stale weights, wrong masks or temperatures.

    With Δ = logps - sampler_logps and w = e^Δ, over tokens that the sampler drew: mean and largest |Δ|; KL(sampler ‖ policy) by the mean
    of -Δ (unbiased, may be negative) and by that of w - 1 - Δ (k3, never negative); χ² by the mean of w² - 1; the effective sample size
    of the weights as a share of the tokens. In later updates of a step the policy has moved on purpose, which these include.
    """
    difference = jax.lax.stop_gradient(clean(scores.logps, batch.mask) - clean(batch.sampler_logps, batch.mask))
    bounded = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = clean(jnp.exp(bounded), batch.mask)
    tokens = jnp.sum(batch.mask, dtype=weights.dtype)
    return {
        "mismatch/mean": over_tokens(jnp.abs(difference), batch.mask),
        "mismatch/max": Extreme.of(jnp.abs(difference), batch.mask, kind="max"),
        "mismatch/kl": over_tokens(-difference, batch.mask),
        "mismatch/k3": over_tokens(jnp.expm1(bounded) - bounded, batch.mask),
        "mismatch/chi2": Mean(jnp.sum(jnp.expm1(2 * bounded)), tokens),
        "mismatch/ess": EffectiveShare(jnp.sum(weights), jnp.sum(jnp.square(weights)), tokens),
    }
