"""Losses of the policy and of the critic, one value a scored token, from scores alone.

Owns the formulas and what they report. Pure and blind to layouts: a loss reads `Scores` and the `[R, M]` half of a `TokenBatch`, never a
model, and of its row's neighbours only those of its own episode. KL penalties are `rl.kl`, weights for stale samples `rl.off_policy`;
how values become one number is `rl.aggregate`; which loss an algorithm uses is `rl.algorithms`; the training step calls them under `grad`.

A loss is any `(scores, batch) -> (per_token, metrics)`; its options are bound beforehand. Everything is cleaned at padding before it is
exponentiated: masking a loss afterwards still gives NaN gradients. Low-precision scores are widened to float32.

Notation: r = exp(logps - old_logps), A the advantage, sg stops the gradient. Where old log-probs are absent r is exactly 1, and every loss
here has REINFORCE's gradient, -A · ∇logps (GSPO and GMPO: with A averaged over the episode).
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from burnish.pytree import pytree, static
from burnish.rl.batch import Array, Scores, TokenBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios of the policy to its anchor are clamped to ± this before exp: e^20 is past every clip, and no gradient passes there."""

PerToken = Float[Array, "R M"]


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


@pytree
class Extreme:
    """A largest or smallest value; of nothing it is -inf or +inf. The one metric whose parts don't add up: they `join`."""

    extreme: Float[jax.Array, ""]
    kind: Literal["max", "min"] = static()

    @classmethod
    def of(cls, values: PerToken, mask: Bool[Array, "R M"], /, *, kind: Literal["max", "min"]) -> Extreme:
        """Of the scored tokens."""
        reduce, nothing = (jnp.max, -jnp.inf) if kind == "max" else (jnp.min, jnp.inf)
        return cls(reduce(jnp.where(mask, jax.lax.stop_gradient(widen(values)), nothing), initial=nothing), kind)

    @classmethod
    def nothing(cls, kind: Literal["max", "min"]) -> Extreme:
        return cls(jnp.asarray(-jnp.inf if kind == "max" else jnp.inf, jnp.float32), kind)

    def join(self, other: Extreme) -> Extreme:
        """Of both; a NaN stays one."""
        return Extreme((jnp.maximum if self.kind == "max" else jnp.minimum)(self.extreme, other.extreme), self.kind)

    def value(self) -> Float[jax.Array, ""]:
        return self.extreme


@pytree
class EffectiveShare:
    """Effective sample size of weights over their number, (Σw)² / (n Σw²), in (0, 1]; its three sums add up over micro-batches."""

    total: Float[jax.Array, ""]
    squares: Float[jax.Array, ""]
    count: Float[jax.Array, ""]

    def value(self) -> Float[jax.Array, ""]:
        """1 where the weights are equal; 0 where there are none."""
        some = self.squares > 0
        return jnp.where(some, jnp.square(self.total) / jnp.where(some, self.count * self.squares, 1.0), 0.0)


Metrics = dict[str, Mean | Extreme | EffectiveShare]


@runtime_checkable
class Loss(Protocol):
    def __call__(self, scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]: ...


@runtime_checkable
class ValueLoss(Protocol):
    """(values now, values before the mini-batch's first update, batch) → the critic's loss a token."""

    def __call__(self, values: PerToken, old_values: PerToken, batch: TokenBatch, /) -> tuple[PerToken, Metrics]: ...


# ---------------------------------------------------------------------------------------------------------------------- losses


def clipped(
    scores: Scores, batch: TokenBatch, /, *, epsilon: float = 0.2, epsilon_high: float | None = None, dual_clip: float | None = None
) -> tuple[PerToken, Metrics]:
    """The probability ratio times the advantage, held where the update has gone far enough: PPO's, GRPO's and DAPO's loss.

    max(-r A, -clip(r, 1 - epsilon, 1 + epsilon_high) A); where A < 0, at most -dual_clip A. A token that is held has gradient 0.
    Sources: PPO arXiv:1707.06347; GRPO arXiv:2402.03300; epsilon_high DAPO arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    return _held(jnp.exp(log_ratio(scores, batch)), batch, epsilon=epsilon, epsilon_high=epsilon_high, dual_clip=dual_clip)


def gspo(
    scores: Scores,
    batch: TokenBatch,
    /,
    *,
    level: Literal["sequence", "token"] = "sequence",
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    dual_clip: float | None = None,
) -> tuple[PerToken, Metrics]:
    """`clipped`, with one ratio for the whole episode: the geometric mean of its tokens'.

    s = exp(mean over the episode of logps - old_logps). "sequence": r = s, and each token gets the episode's mean gradient. "token":
    r = sg(s) · exp(logps - sg(logps)): the same value, each token's own gradient, so that advantages may differ within an episode; where
    they don't, gradients under `sequence_mean` are the same. Source: GSPO and GSPO-token, arXiv:2507.18071.
    Differs from the paper: the paper averages episodes (`sequence_mean`, the configuration's default); here that is the aggregation's.
    """
    ratio = jnp.exp(episode_mean(log_ratio(scores, batch), batch))
    if level == "token":
        logps = clean(scores.logps, batch.mask)
        ratio = jax.lax.stop_gradient(ratio) * jnp.exp(logps - jax.lax.stop_gradient(logps))
    return _held(ratio, batch, epsilon=epsilon, epsilon_high=epsilon_high, dual_clip=dual_clip)


def cispo(scores: Scores, batch: TokenBatch, /, *, epsilon: float = 1.0, epsilon_high: float = 4.0) -> tuple[PerToken, Metrics]:
    """REINFORCE weighted by a clipped ratio: no token loses its gradient, however far the policy has moved.

    -sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A logps. Its value is no estimate of the objective; its gradient is.
    Source: CISPO in MiniMax-M1, arXiv:2506.13585, which sets no lower bound (epsilon 1) and tunes the upper.
    Differs from the paper: it states no value for the upper bound; 5 is ours.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(scores, batch)))
    low, high = 1 - epsilon, 1 + epsilon_high
    per_token = -jnp.clip(ratio, low, high) * clean(batch.advantages, batch.mask) * clean(scores.logps, batch.mask)
    return per_token, _ratio_metrics(ratio, batch) | _clip_metrics(ratio < low, ratio > high, batch)


def sapo(
    scores: Scores, batch: TokenBatch, /, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> tuple[PerToken, Metrics]:
    """A sigmoid of the ratio in place of the clip: tokens that moved far lose their gradient gradually.

    -(4 / τ) σ(τ (r - 1)) A, with τ the positive temperature where A > 0, else the negative one. The gradient's factor on r is
    4 σ (1 - σ): 1 at r = 1, falling on both sides; `policy/gate_mean` is its mean. Source: SAPO, arXiv:2511.20347.
    Differs from the paper: the paper averages sequence means; here that is the aggregation's.
    """
    advantages, ratio = clean(batch.advantages, batch.mask), jnp.exp(log_ratio(scores, batch))
    temperature = jnp.where(advantages > 0, temperature_positive, temperature_negative).astype(ratio.dtype)
    gate = jax.nn.sigmoid(temperature * (ratio - 1))
    metrics = _ratio_metrics(ratio, batch) | {"policy/gate_mean": over_tokens(4 * gate * (1 - gate), batch.mask)}
    return -4 / temperature * gate * advantages, metrics


def dppo(
    scores: Scores, batch: TokenBatch, /, *, divergence: Literal["tv", "kl"] = "tv", threshold: float = 0.15
) -> tuple[PerToken, Metrics]:
    """The ratio times the advantage, for tokens inside a trust region of probabilities, not of ratios; 0 for the others.

    -r A, and 0 where the sampled token's probability moved the way its advantage points by more than the threshold: with p now and q
    under the anchor, |p - q| (tv), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (kl), the token against all others. So a rare token
    may double, and a likely one may not fall by half. Source: DPPO, binary variants, arXiv:2602.04879 (0.15 for tv, 0.05 for kl).
    Differs from the paper: the anchor is the algorithm's; the paper's is the sampler, `old: sampler`.
    """
    advantages, logs = clean(batch.advantages, batch.mask), log_ratio(scores, batch)
    before = anchor(scores, batch)
    q, p = jnp.exp(before), jnp.exp(jax.lax.stop_gradient(clean(scores.logps, batch.mask)))
    distance = jnp.abs(p - q)
    if divergence == "kl":
        rest_q, rest_p = (jnp.log1p(-jnp.minimum(x, 1 - 1e-7)) for x in (q, p))  # a certain token has no others to compare with
        distance = -q * jax.lax.stop_gradient(logs) + (1 - q) * (rest_q - rest_p)
    far, ratio = distance > threshold, jnp.exp(logs)
    low, high = far & (advantages < 0) & (p < q), far & (advantages > 0) & (p > q)
    per_token = jnp.where(low | high, 0.0, -ratio * advantages)
    return per_token, _ratio_metrics(ratio, batch) | _clip_metrics(low, high, batch)


def gmpo(scores: Scores, batch: TokenBatch, /, *, log_clip: float = 0.4) -> tuple[PerToken, Metrics]:
    """The geometric mean of an episode's ratios times the advantage, each ratio clipped before: one outlier can't dominate.

    -A exp(mean over the episode of c), c = min(log r, log_clip) where A > 0, max(log r, -log_clip) where A < 0; a clipped token has no
    gradient, the others share the episode's. Source: GMPO, arXiv:2507.20673.
    Differs from the paper: the paper averages episodes (`sequence_mean`, the configuration's default), each with one advantage; here a
    token's own advantage decides its clip and its weight.
    """
    advantages, logs = clean(batch.advantages, batch.mask), log_ratio(scores, batch)
    low, high = (advantages < 0) & (logs < -log_clip), (advantages > 0) & (logs > log_clip)
    held = jnp.where(low, -log_clip, jnp.where(high, log_clip, logs))
    per_token = -advantages * jnp.exp(episode_mean(held, batch))
    return per_token, _ratio_metrics(jnp.exp(logs), batch) | _clip_metrics(low, high, batch)


def reinforce(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
    """-A logps: the plain policy gradient (Williams, 1992), right only for completions that the policy now would sample."""
    return -clean(batch.advantages, batch.mask) * clean(scores.logps, batch.mask), {}


def with_entropy_bonus(loss: Loss, *, coefficient: float) -> Loss:
    """The loss minus the coefficient times the policy's entropy before each token, in nats (A3C, arXiv:1602.01783).

    It needs an entropy with a gradient: the algorithm's `entropy_gradient`.
    """

    def rewarded(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
        if scores.entropy is None:
            raise ValueError(f"an entropy bonus (coefficient {coefficient}) needs the policy's entropy, which these scores don't have")
        per_token, metrics = loss(scores, batch)
        return per_token - coefficient * clean(scores.entropy, batch.mask), metrics

    return rewarded


def one_a_token(loss: Loss) -> Loss:
    """The loss, refused if it doesn't answer with one value a scored token: a mean of its own would be spread over them, unnoticed."""

    def checked(scores: Scores, batch: TokenBatch, /) -> tuple[PerToken, Metrics]:
        per_token, metrics = loss(scores, batch)
        if jnp.shape(per_token) != batch.mask.shape:
            raise ValueError(
                f"a loss must give one value a scored token, shape {batch.mask.shape}, and leave the mean to algorithm.aggregation; got "
                f"shape {jnp.shape(per_token)}"
            )
        return per_token, metrics

    return checked


def clipped_value(values: PerToken, old_values: PerToken, batch: TokenBatch, /, *, clip: float | None = 0.2) -> tuple[PerToken, Metrics]:
    """Half the squared error of the critic to the returns, held where a value has left the old one by more than `clip`.

    ½ max((v - R)², (v_old + clamp(v - v_old, ± clip) - R)²), R `batch.returns`; without a clip ½ (v - R)². A token that is held has
    gradient 0. Source: value clipping of PPO's implementations (Huang et al., 2022, "The 37 implementation details of PPO", 9); the paper
    has none.
    """
    now, returns = clean(values, batch.mask), clean(batch.returns, batch.mask)
    error = jnp.square(now - returns)
    metrics: Metrics = {"critic/value_mean": over_tokens(now, batch.mask), "critic/squared_error": over_tokens(error, batch.mask)}
    if clip is None:
        return 0.5 * error, metrics
    before = jax.lax.stop_gradient(clean(old_values, batch.mask))
    held = jnp.square(before + jnp.clip(now - before, -clip, clip) - returns)
    metrics["critic/clip_fraction"] = over_tokens((held > error).astype(error.dtype), batch.mask)
    return 0.5 * jnp.maximum(error, held), metrics


# ----------------------------------------------------------------------------------------------------------------------- parts


def _held(
    ratio: PerToken, batch: TokenBatch, *, epsilon: float, epsilon_high: float | None, dual_clip: float | None
) -> tuple[PerToken, Metrics]:
    """max(-ratio A, -clip(ratio) A), with the dual clip; see `clipped`."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}: below, it would hold ratios that haven't moved")
    advantages = clean(batch.advantages, batch.mask)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    held_low, held_high = (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
    per_token = -jnp.where(held_low, low, jnp.where(held_high, high, ratio)) * advantages
    metrics = _ratio_metrics(ratio, batch) | _clip_metrics(held_low, held_high, batch)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        per_token = jnp.where(dual, -dual_clip * advantages, per_token)
        metrics["policy/dual_clip_fraction"] = over_tokens(dual.astype(ratio.dtype), batch.mask)
    return per_token, metrics


def _ratio_metrics(ratio: PerToken, batch: TokenBatch) -> Metrics:
    return {
        "policy/ratio_mean": over_tokens(ratio, batch.mask),
        "policy/ratio_min": Extreme.of(ratio, batch.mask, kind="min"),
        "policy/ratio_max": Extreme.of(ratio, batch.mask, kind="max"),
    }


def _clip_metrics(low: Bool[Array, "R M"], high: Bool[Array, "R M"], batch: TokenBatch) -> Metrics:
    """Where a clip binds; in the dtype of the batch's numbers, so that a mean's total and weight have one."""
    dtype = widen(batch.advantages).dtype
    return {
        "policy/clip_low_fraction": over_tokens(low.astype(dtype), batch.mask),
        "policy/clip_high_fraction": over_tokens(high.astype(dtype), batch.mask),
    }


def anchor(scores: Scores, batch: TokenBatch, /) -> PerToken:
    """The old log-probs, or where there are none the policy's own now: a constant, 0 at padding."""
    return jax.lax.stop_gradient(clean(scores.logps if scores.old_logps is None else scores.old_logps, batch.mask))


def log_ratio(scores: Scores, batch: TokenBatch, /) -> PerToken:
    """logps - old_logps, clamped at ± MAX_LOG_RATIO; exactly 0 at padding, and everywhere without old log-probs."""
    return jnp.clip(clean(scores.logps, batch.mask) - anchor(scores, batch), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def episode_sum(values: PerToken, batch: TokenBatch, /) -> PerToken:
    """At each entry the sum over its episode, which lies in one row and so in one micro-batch, whole. Values are clean."""
    sums = jax.ops.segment_sum(jnp.ravel(values), jnp.ravel(batch.sequences), num_segments=batch.num_sequences)
    return jnp.take(sums, batch.sequences, axis=0)


def episode_mean(values: PerToken, batch: TokenBatch, /) -> PerToken:
    """At each entry the mean over its episode's scored tokens."""
    count = episode_sum(jnp.where(batch.mask, jnp.ones_like(values), 0.0), batch)
    return episode_sum(values, batch) / jnp.maximum(count, 1.0)


def over_tokens(values: PerToken, mask: Bool[Array, "R M"], /) -> Mean:
    """The mean over scored tokens, for a metric."""
    values = clean(jax.lax.stop_gradient(values), mask)
    return Mean(jnp.sum(values), jnp.sum(mask, dtype=values.dtype))


def clean(values: PerToken, mask: Bool[Array, "R M"], /) -> Float[jax.Array, "R M"]:
    """The values in at least float32, 0 at padding, whatever stands there."""
    return jnp.where(mask, widen(values), 0.0)


def widen(values: PerToken, /) -> PerToken:
    return values.astype(jnp.float32) if jnp.finfo(values.dtype).bits < 32 else values
