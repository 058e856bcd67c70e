"""Losses of the policy, one value a scored token, from scores alone.

Owns the formulas and what they report. Pure and blind to layouts: a loss reads `Scores` and the `[R, M]` half of a `TokenBatch`, never a
model, never a row's neighbours. How values become one number is `rl.aggregate`; which loss an algorithm uses is `rl.algorithms`; the
training step calls both under `grad`.

A loss is any `(scores, batch) -> (per_token, metrics)`; its options are bound beforehand. Everything is cleaned at padding before it is
exponentiated: masking a loss afterwards still gives NaN gradients. Low-precision scores are widened to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from burnish.pytree import pytree
from burnish.rl.batch import Array, Scores, TokenBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios of the policy to its anchor are clamped to ± this before exp: e^20 is past every clip, and no gradient passes there."""
MAX_KL_RATIO = 1e4
"""The ratio inside k3 is clamped to this, on its logarithm: a token that the reference likes e^9.2 times better gets no gradient."""


@pytree
class Mean:
    """A sum and what it is to be divided by. Sums of micro-batches, rows or hosts add up; only the total is divided, once."""

    total: Float[jax.Array, ""]
    weight: Float[jax.Array, ""]

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> Float[jax.Array, ""]:
        """total / weight; 0 where nothing has weight."""
        some = self.weight > 0
        return jnp.where(some, self.total / jnp.where(some, self.weight, 1.0), 0.0)


PerToken = Float[Array, "R M"]
Metrics = dict[str, Mean]


@runtime_checkable
class Loss(Protocol):
    def __call__(self, scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]: ...


def clipped(
    scores: Scores, batch: TokenBatch, /, *, epsilon: float = 0.2, epsilon_high: float | None = None, dual_clip: float | None = None
) -> tuple[PerToken, Metrics]:
    """The probability ratio times the advantage, held where the update has gone far enough.

    max(-r A, -clip(r, 1 - epsilon, 1 + epsilon_high) A) with r = exp(logps - old_logps); where A < 0, at most -dual_clip A. Without
    old log-probs the anchor is the policy now: r is exactly 1 and the gradient is REINFORCE's. A token that is held has gradient 0.
    Sources: PPO arXiv:1707.06347; GRPO arXiv:2402.03300; epsilon_high DAPO arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}: below, it would hold ratios that haven't moved")
    advantages, ratio = clean(batch.advantages, batch.mask), policy_ratio(scores, batch)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    held_low, held_high = (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
    per_token = -jnp.where(held_low, low, jnp.where(held_high, high, ratio)) * advantages
    if dual_clip is not None:
        per_token = jnp.where(advantages < 0, jnp.minimum(per_token, -dual_clip * advantages), per_token)
    metrics = {
        "policy/ratio_mean": over_tokens(ratio, batch.mask),
        "policy/clip_low_fraction": over_tokens(held_low.astype(ratio.dtype), batch.mask),
        "policy/clip_high_fraction": over_tokens(held_high.astype(ratio.dtype), batch.mask),
    }
    return per_token, metrics


def reinforce(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
    """-A logps: the plain policy gradient (Williams, 1992), right only for completions that the policy now would sample."""
    return -clean(batch.advantages, batch.mask) * clean(scores.logps, batch.mask), {}


def with_kl(loss: Loss, *, beta: float, estimator: Callable[[PerToken, PerToken], PerToken]) -> Loss:
    """The loss plus beta times the KL of the policy to the reference, per token, by `k1`, `k2` or `k3`."""

    def penalised(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
        if scores.ref_logps is None:
            raise ValueError(
                f"a KL penalty (beta {beta}) needs the reference's log-probs; name 'reference' in the algorithm's scores_needed"
            )
        per_token, metrics = loss(scores, batch)
        kl = estimator(clean(scores.logps, batch.mask), clean(scores.ref_logps, batch.mask))
        return per_token + beta * kl, metrics | {"policy/kl": over_tokens(kl, batch.mask)}

    return penalised


def k1(logps: PerToken, ref_logps: PerToken, /) -> PerToken:
    """d = logps - ref_logps: unbiased as a number, useless as a loss.

    Gradient 1 · ∇logps whatever the reference is; over the policy's own samples its expectation is 0. (Schulman, 2020, "Approximating KL
    divergence", for all three.)
    """
    return widen(logps) - widen(ref_logps)


def k2(logps: PerToken, ref_logps: PerToken, /) -> PerToken:
    """d² / 2: biased as a number; its gradient d · ∇logps is, over the policy's own samples, that of KL(policy ‖ reference)."""
    return 0.5 * jnp.square(k1(logps, ref_logps))


def k3(logps: PerToken, ref_logps: PerToken, /) -> PerToken:
    """e^-d - 1 + d: unbiased, never negative, 0 only where the two agree.

    Gradient (1 - e^-d) · ∇logps: over the policy's own samples, that of KL(reference ‖ policy). Differs from the source: -d is clamped at
    log(MAX_KL_RATIO) before exp, where clamping the result would give 0 · inf in the backward pass.
    """
    log_ratio = jnp.minimum(-k1(logps, ref_logps), math.log(MAX_KL_RATIO))
    return jnp.expm1(log_ratio) - log_ratio


def mismatch(scores: Scores, batch: TokenBatch, /) -> Metrics:
    """How far the trainer's log-probs are from the sampler's for the same ids: an alarm for stale weights, wrong masks or temperatures."""
    difference = clean(scores.logps, batch.mask) - clean(batch.sampler_logps, batch.mask)
    return {
        "mismatch/mean": over_tokens(jnp.abs(difference), batch.mask),
        "mismatch/kl": over_tokens(k3(-difference, jnp.zeros_like(difference)), batch.mask),
    }


def policy_ratio(scores: Scores, batch: TokenBatch, /) -> PerToken:
    """exp(logps - old_logps), 1 at padding."""
    logps = clean(scores.logps, batch.mask)
    anchor = jax.lax.stop_gradient(logps) if scores.old_logps is None else clean(scores.old_logps, batch.mask)
    return jnp.exp(jnp.clip(logps - anchor, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def over_tokens(values: PerToken, mask: Bool[Array, "R M"], /) -> Mean:
    """The mean over scored tokens, for a metric."""
    return Mean(jnp.sum(clean(jax.lax.stop_gradient(values), mask)), jnp.sum(mask, dtype=jnp.float32))


def clean(values: PerToken, mask: Bool[Array, "R M"], /) -> Float[jax.Array, "R M"]:
    """The values in at least float32, 0 at padding, whatever stands there."""
    return jnp.where(mask, widen(values), 0.0)


def widen(values: PerToken, /) -> PerToken:
    return values.astype(jnp.float32) if jnp.finfo(values.dtype).bits < 32 else values
