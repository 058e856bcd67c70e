"""One update: gradients of micro-batches, summed as totals and divided once, clipped, applied or skipped.

Owns the compiled programs of an update, and which loss the policy's follow (`make_steps`; the critic's are in `train.value`). A loss is
differentiated as `Mean.total`; gradients and weights of micro-batches are summed in float32 and divided by the global weight when they are
applied, so how a mini-batch was cut can't change the update. An update is applied as a whole or, where a number isn't finite or nothing
carries a gradient, not at all: then parameters, moments, schedule and count stay bitwise as they were.
Doesn't own losses (`rl.losses`), log-probs (`train.score`), or when to stop (`train.state.stop_if_nonfinite`, asked by the learner).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from burnish.models.config import ModelConfig
from burnish.models.transformer import Adapter, Params, Precision
from burnish.pytree import pytree
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import Scores, TokenBatch
from burnish.rl.losses import Extreme, Mean, Metrics, over_tokens
from burnish.rl.off_policy import mismatch
from burnish.train.optim import Optimizer
from burnish.train.score import HeadOptions, entropy, policy_scores
from burnish.train.state import TrainState, UpdateReport

M = TypeVar("M")
"""What one forward-backward pass sees."""
LossOf = Callable[[Params, Params | None, M], tuple[Float[Array, ""], tuple[Mean, Metrics]]]
"""(trained leaves, frozen ones, micro-batch) → the loss's total, which is differentiated, and beside it the whole mean and the metrics."""


class MicroBatch(NamedTuple):
    """What one forward-backward pass sees. old_logps None: the policy now, as it is with one update a step and no staleness."""

    batch: TokenBatch
    old_logps: Float[Array, "R M"] | None = None
    ref_logps: Float[Array, "R M"] | None = None


@pytree
class Totals:
    """Over micro-batches: sums of gradients of `loss.total` and of the loss's total and weight; metrics, summed or, if extremes, joined."""

    gradients: Params
    loss: Mean
    metrics: Metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Steps(Generic[M]):
    """Compiled functions of one model, loss and optimizer; the state, and the totals given to `accumulate`, are donated.

    base: the frozen weights under an adapter, None where every weight is trained.
    """

    zeros: Callable[[Params, Params | None, M], Totals]
    accumulate: Callable[[Totals, Params, Params | None, M], Totals]
    apply: Callable[[TrainState, Totals], tuple[TrainState, UpdateReport]]
    fused: Callable[[TrainState, Params | None, M], tuple[TrainState, UpdateReport]]

    def mapped(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Steps[M]:
        """The same steps with every program changed."""
        return dataclasses.replace(self, **{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def update(self, state: TrainState, base: Params | None, micro_batches: Iterable[M], *, count: int) -> tuple[TrainState, UpdateReport]:
        """One update from a mini-batch in `count` micro-batches, each taken when the one before is on its way."""
        totals: Totals | None = None
        for micro in itertools.islice(micro_batches, count):
            if count == 1:
                return self.fused(state, base, micro)
            totals = self.zeros(state.trainable, base, micro) if totals is None else totals
            totals = self.accumulate(totals, state.trainable, base, micro)
        if totals is None:
            raise ValueError(f"an update of {count} micro-batches got none: there is nothing to learn from")
        return self.apply(state, totals)


def make_steps(
    config: ModelConfig,
    algorithm: Algorithm,
    optimizer: Optimizer,
    *,
    lora_scale: float | None,
    precision: Precision = "f32",
    remat: bool = False,
    head_chunk: int = 512,
) -> Steps[MicroBatch]:
    """lora_scale: alpha / rank of the adapter that is trained; None trains every weight, the head included."""
    head = HeadOptions(
        chunk=head_chunk,
        precision=precision,
        train_head=lora_scale is None,
        head_fn=entropy,
        head_fn_gradient=algorithm.entropy_gradient,
    )

    def loss(trainable: Params, base: Params | None, micro: MicroBatch) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
        adapter = None if lora_scale is None else Adapter(trainable, lora_scale)
        params = trainable if lora_scale is None else base
        if params is None:
            raise ValueError("an adapter is trained beside frozen weights, which weren't given: pass them as `base`")
        batch = micro.batch
        logps, extras = policy_scores(config, params, batch, adapter=adapter, options=head, remat=remat)
        uncertainty = extras["entropy"] if algorithm.entropy_gradient else jax.lax.stop_gradient(extras["entropy"])
        scores = Scores(logps=logps, old_logps=micro.old_logps, ref_logps=micro.ref_logps, entropy=uncertainty)
        metrics = mismatch(scores, batch)
        if algorithm.reject is not None:
            batch, rejected = algorithm.reject(scores, batch)
            metrics |= rejected
        per_token, measured = algorithm.loss(scores, batch)
        mean = algorithm.aggregate(per_token, batch)
        metrics |= measured | {"policy/loss": mean, "policy/entropy": over_tokens(uncertainty, batch.mask)}
        return mean.total, (mean, jax.lax.stop_gradient(metrics))

    return compile_steps(loss, optimizer)


def compile_steps(loss: LossOf[M], optimizer: Optimizer) -> Steps[M]:
    """The programs of an update by a loss."""

    def totals_of(trainable: Params, base: Params | None, micro: M) -> Totals:
        gradients, (mean, metrics) = jax.grad(loss, has_aux=True)(trainable, base, micro)
        return Totals(gradients=gradients, loss=mean, metrics=metrics)

    def zeros(trainable: Params, base: Params | None, micro: M) -> Totals:
        shapes = jax.eval_shape(totals_of, trainable, base, micro)
        return _over_parts(lambda s: Extreme.nothing(s.kind) if isinstance(s, Extreme) else jnp.zeros(s.shape, s.dtype), shapes)

    def accumulate(totals: Totals, trainable: Params, base: Params | None, micro: M) -> Totals:
        return _over_parts(lambda a, b: a.join(b) if isinstance(a, Extreme) else a + b, totals, totals_of(trainable, base, micro))

    def apply(state: TrainState, totals: Totals) -> tuple[TrainState, UpdateReport]:
        return apply_totals(optimizer, state, totals)

    def fused(state: TrainState, base: Params | None, micro: M) -> tuple[TrainState, UpdateReport]:
        return apply(state, totals_of(state.trainable, base, micro))

    return Steps(
        zeros=jax.jit(zeros),
        accumulate=jax.jit(accumulate, donate_argnums=0),
        apply=jax.jit(apply, donate_argnums=0),
        fused=jax.jit(fused, donate_argnums=0),
    )


def apply_totals(optimizer: Optimizer, state: TrainState, totals: Totals) -> tuple[TrainState, UpdateReport]:
    """Divide by the global weight, and apply the optimizer's update if every number is finite and there is a gradient at all."""
    weight = totals.loss.weight
    gradients = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1.0), totals.gradients)
    norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.transform.update(gradients, state.opt_state, state.trainable)
    bad_gradients, bad_updates = _nonfinite_leaves(gradients), _nonfinite_leaves(updates)
    finite = jnp.isfinite(totals.loss.total) & jnp.isfinite(norm) & jnp.logical_not(jnp.any(bad_updates))
    # Without a signal the optimizer would still decay weights and move by its momentum.
    applied = finite & (weight > 0) & (norm > 0)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)

    one = jnp.ones((), jnp.float32)
    report = UpdateReport(
        metrics=totals.metrics
        | {
            "optim/grad_norm": Mean(norm, one),
            "optim/learning_rate": Mean(optimizer.schedule(state.updates), one),
            "optim/skipped_updates": Mean(1.0 - applied.astype(jnp.float32), one),
        },
        # One NaN reaches every update through the norm: the gradients tell where it came from.
        nonfinite_leaves=jnp.where(jnp.any(bad_gradients), bad_gradients, bad_updates),
    )
    new = TrainState(
        trainable=keep(optax.apply_updates(state.trainable, updates), state.trainable),
        opt_state=keep(opt_state, state.opt_state),
        updates=state.updates + applied.astype(jnp.int32),
        skipped=state.skipped + 1 - applied.astype(jnp.int32),
        nonfinite=jnp.where(finite, 0, state.nonfinite + 1),
    )
    return new, report


def _over_parts(f: Callable[..., Any], *totals: Totals) -> Totals:
    """Map over what adds up, leaf by leaf, and over the extremes, which don't, as wholes."""
    return jax.tree.map(f, *totals, is_leaf=lambda x: isinstance(x, Extreme))


def _nonfinite_leaves(tree: Any) -> Bool[Array, " leaves"]:
    return jnp.stack([jnp.logical_not(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree)])
