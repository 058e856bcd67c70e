"""What the critic says and how it learns: values of scored ids, and updates towards their returns.

Owns the values pass and the critic's compiled programs. Every weight of the critic is trained, in float32, by `train.step`'s machinery: the
same totals, divided once, applied or skipped as a whole. Doesn't own the model (`models.scalar_head`), the loss and the returns (the
algorithm brings them), or when values are asked for (the learner, through the cluster).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import Params, Precision, Remat
from burnish.observe.metrics import Metric
from burnish.rl.aggregate import Aggregate
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics, ValueLoss, clean, over_tokens
from burnish.train.optim import Optimizer
from burnish.train.state import UpdateReport, read_metrics
from burnish.train.step import Steps, compile_steps

Values = Float[Array, "R M"]
_MOMENTS = ("returns", "squared returns", "errors", "squared errors")
"""What the explained variance is made of, once every micro-batch was seen: means that the device sums up."""
_SMALLEST_SHARE = 1e-6
"""Of the mean square: a variance below it is rounding, in float32."""


class ValueMicroBatch(NamedTuple):
    """What one forward-backward pass of the critic sees: a batch with its `returns`, and the values that its mini-batch began with."""

    batch: TokenBatch
    old_values: Values


def batch_values(
    config: ModelConfig, params: Params, batch: TokenBatch, *, precision: Precision = "f32", remat: Remat = False
) -> tuple[Values, Values]:
    """The values before and after each scored id, float32, 0 at padding. Differentiable.

    Before: of all that the id's column sees without the id, where its log-prob is read too. After: with the id; where the episode was cut
    at that id, this is what its return is bootstrapped from.
    """
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    rule = Visibility(jnp.asarray(batch.segments), jnp.asarray(batch.parents))
    scalars = token_scalars(config, params, tokens, positions, rule, precision=precision, remat=remat)
    before, after = (jnp.take_along_axis(scalars, jnp.asarray(columns), axis=1) for columns in (batch.columns, batch.own_columns))
    mask = jnp.asarray(batch.mask)
    return clean(before, mask), clean(after, mask)


def make_values(config: ModelConfig, *, precision: Precision = "f32") -> Callable[[Params, TokenBatch], tuple[Values, Values]]:
    """`batch_values`, compiled, without a gradient."""

    @jax.jit
    def values(params: Params, batch: TokenBatch) -> tuple[Values, Values]:
        return batch_values(config, params, batch, precision=precision)

    return values


def make_value_steps(
    config: ModelConfig,
    value_loss: ValueLoss,
    aggregate: Aggregate,
    optimizer: Optimizer,
    *,
    precision: Precision = "f32",
    remat: Remat = True,
) -> Steps[ValueMicroBatch]:
    """The programs of a critic's update; `base` is None for them. `read_value_metrics` reads their reports."""

    def loss(trainable: Params, base: Params | None, micro: ValueMicroBatch) -> tuple[Mean, Metrics, None]:
        batch = micro.batch
        values, _ = batch_values(config, trainable, batch, precision=precision, remat=remat)
        per_token, metrics = value_loss(values, micro.old_values, batch)
        mean = aggregate(per_token, batch)
        returns = clean(batch.returns, batch.mask)
        error = returns - values
        moments = (returns, jnp.square(returns), error, jnp.square(error))
        metrics |= {name: over_tokens(x, batch.mask) for name, x in zip(_MOMENTS, moments, strict=True)}
        metrics |= {"critic/loss": mean, "critic/return_mean": over_tokens(returns, batch.mask)}
        return mean, metrics, None

    return compile_steps(loss, optimizer)


def read_value_metrics(report: UpdateReport) -> dict[str, Metric]:
    """A critic's report on the host, all names under `critic/`; waits for the update.

    `critic/explained_variance` is 1 - Var(R - v) / Var(R) over the update's tokens, v the values before it: 1 where the critic knows the
    returns, 0 where a constant would do as well, below 0 where it is worse. Absent where the returns don't vary.
    """
    read = read_metrics(report)
    returns, squares, errors, squared_errors = (read.pop(name).result() for name in _MOMENTS)
    named = {name.replace("optim/", "critic/"): metric for name, metric in read.items()}
    variance = squares - returns**2
    if variance > _SMALLEST_SHARE * squares:
        named["critic/explained_variance"] = Metric("mean", 1.0 - (squared_errors - errors**2) / variance)
    return named
