"""KL of the policy to a reference, a token: three estimators, each with its own gradient, and the penalty on a loss.

Owns k1, k2, k3 and `with_kl`. As a number any of them will do; as a loss the gradient is what counts, and it is not that of the number:
read each docstring before choosing. A KL in the reward uses the numbers only (`rl.credit`). `rl.algorithms` binds the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from burnish.rl.batch import Scores, TokenBatch
from burnish.rl.losses import Loss, Metrics, PerToken, clean, over_tokens, widen

MAX_KL_RATIO = 1e4
"""The ratio inside k3 is clamped to this, on its logarithm: a token that the reference likes e^9.2 times better gets no gradient."""


KLEstimator = Callable[[PerToken, PerToken], PerToken]
"""(log-probs of the policy, of the reference) → an estimate of the KL a token."""


def with_kl(loss: Loss, *, beta: float, estimator: KLEstimator) -> Loss:
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
