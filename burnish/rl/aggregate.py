"""From per-token losses to one number: four means, named by what they compute.

Owns the denominators. Each function returns `Mean(total, weight)`: gradients of `total` are summed over micro-batches and divided once by
the summed `weight`, so a mini-batch may be cut anywhere. For that, weights come from `sequence_tokens` and `prompt_tokens`, which count a
whole episode or group wherever its tokens lie. An episode without a scored token is in no denominator; with no token at all the mean is 0.
Padding is dropped before the sum, low precision is summed in float32. The training step calls one of them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Int32

from burnish.rl.batch import Array, TokenBatch
from burnish.rl.losses import Mean, PerToken, clean


@runtime_checkable
class Aggregate(Protocol):
    def __call__(self, per_token: PerToken, batch: TokenBatch, /) -> Mean: ...


def token_mean(per_token: PerToken, batch: TokenBatch, /) -> Mean:
    """sum of losses / number of tokens: every token weighs the same, long episodes more (DAPO, arXiv:2503.14476)."""
    return _weighted(per_token, batch, jnp.ones_like(batch.sequence_tokens))


def sequence_mean(per_token: PerToken, batch: TokenBatch, /) -> Mean:
    """Mean over episodes of their token means: every episode weighs the same, its tokens less if it is long (GRPO, arXiv:2402.03300)."""
    return _weighted(per_token, batch, batch.sequence_tokens)


def prompt_mean(per_token: PerToken, batch: TokenBatch, /) -> Mean:
    """Mean over groups of their token means: every prompt weighs the same (ScaleRL, arXiv:2510.13786)."""
    return _weighted(per_token, batch, batch.prompt_tokens)


def fixed_length_mean(per_token: PerToken, batch: TokenBatch, /, *, length: int) -> Mean:
    """Mean over episodes of their loss sums / length, a constant: no episode's weight depends on a length (Dr.GRPO, arXiv:2503.20783)."""
    total = token_mean(per_token, batch).total / length
    return Mean(total, sequence_mean(per_token, batch).weight)


def _weighted(per_token: PerToken, batch: TokenBatch, shares: Int32[Array, "R M"]) -> Mean:
    """Each token weighs one over `shares`: how many tokens share a weight of 1."""
    values = clean(per_token, batch.mask)
    weights = clean(1.0 / shares.astype(values.dtype), batch.mask)
    return Mean(jnp.sum(values * weights), jnp.sum(weights))
