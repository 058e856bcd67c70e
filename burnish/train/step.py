"""One update: gradients of micro-batches, summed as totals and divided once, clipped, applied or skipped.

Owns the compiled programs of an update, and which loss the policy's follow (`make_steps`; the critic's are in `train.value`). A loss is
differentiated as `Mean.total`; gradients and weights of micro-batches are summed in float32 and divided by the global weight when they are
applied, so how a mini-batch was cut can't change the update. An update is applied as a whole or, where a number isn't finite or nothing
carries a gradient, not at all: then parameters, moments, schedule and count stay bitwise as they were.
Doesn't own losses (`rl.losses`), log-probs (`train.score`), or when to stop (`train.state.stop_if_nonfinite`, asked by the learner).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

from burnish.models.config import ModelConfig
from burnish.models.transformer import Adapter, Params, Precision, Remat
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

    totals: Callable[[Params, Params | None, M], Totals]
    zeros: Callable[[Params, Params | None, M], Totals]
    accumulate: Callable[[Totals, Params, Params | None, M], Totals]
    apply: Callable[[TrainState, Totals], tuple[TrainState, UpdateReport]]

    def mapped(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Steps[M]:
        """The same steps with every program changed."""
        return dataclasses.replace(self, **{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def update(self, state: TrainState, base: Params | None, micro_batches: Iterable[M], *, count: int) -> tuple[TrainState, UpdateReport]:
        """One update from a mini-batch in `count` micro-batches, each taken when the one before is on its way."""
        totals: Totals | None = None
        for micro in itertools.islice(micro_batches, count):
            if count == 1:
                totals = self.totals(state.trainable, base, micro)
            else:
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
    remat: Remat = False,
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

    @jax.jit
    def no_totals(trainable: Params, base: Params | None, micro: M) -> Totals:
        shapes = dataclasses.replace(jax.eval_shape(totals_of, trainable, base, micro), gradients={})
        return _over_parts(lambda s: Extreme.nothing(s.kind) if isinstance(s, Extreme) else jnp.zeros(s.shape, s.dtype), shapes)

    def zeros(trainable: Params, base: Params | None, micro: M) -> Totals:
        # Made by a program that reads nothing, the gradients would lie whole on one device; these lie as their leaves do.
        return dataclasses.replace(no_totals(trainable, base, micro), gradients=jax.tree.map(jnp.zeros_like, trainable))

    def accumulate(totals: Totals, trainable: Params, base: Params | None, micro: M) -> Totals:
        return _over_parts(lambda a, b: a.join(b) if isinstance(a, Extreme) else a + b, totals, totals_of(trainable, base, micro))

    return Steps(
        totals=jax.jit(totals_of),
        zeros=zeros,
        accumulate=jax.jit(accumulate, donate_argnums=0),
        apply=make_apply(optimizer),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """Divides by the global weight and applies the optimizer's update, if every number is finite and there is a gradient.

    Two programs: the parameters first, then the moments. In one, the new moments, which the parameters need too, would stand beside the
    old ones; in two, each new leaf takes the place of the old one. (SmolLM2 with AdamW: 1.7 GB less.) The state is donated.
    """

    move: Callable[[Params, Any, Int32[Array, ""], Totals], tuple[Params, Verdict, UpdateReport]]
    remember: Callable[[Any, Params, Params, Verdict], Any]

    def __call__(self, state: TrainState, totals: Totals) -> tuple[TrainState, UpdateReport]:
        trainable, verdict, report = self.move(state.trainable, state.opt_state, state.updates, totals)
        opt_state = self.remember(state.opt_state, trainable, totals.gradients, verdict)
        counters = _count(state.updates, state.skipped, state.nonfinite, verdict)
        return TrainState(trainable, opt_state, *counters), report


def make_apply(optimizer: Optimizer) -> Apply:
    """The two programs of an optimizer."""
    return Apply(
        move=jax.jit(functools.partial(_move, optimizer), donate_argnums=0),
        remember=jax.jit(functools.partial(_remember, optimizer), donate_argnums=0),
    )


class Verdict(NamedTuple):
    """Whether all numbers were finite, whether the update is applied, and what the summed gradients are multiplied with for it."""

    finite: Bool[Array, ""]
    applied: Bool[Array, ""]
    factor: Float[Array, ""]


def _move(
    optimizer: Optimizer, trainable: Params, opt_state: Any, updates: Int32[Array, ""], totals: Totals
) -> tuple[Params, Verdict, UpdateReport]:
    some = totals.loss.weight > 0
    share = 1.0 / jnp.where(some, totals.loss.weight, 1.0)
    squares = jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(totals.gradients)])
    norm = jnp.sqrt(jnp.sum(squares)) * share
    # A finite norm means finite squares of all gradients, and of those no optimizer here makes anything else: there is no need to look at
    # its updates, which would have to be kept until the last of them was looked at.
    finite = jnp.isfinite(totals.loss.total) & jnp.isfinite(norm)
    # Without a signal the optimizer would still decay weights and move by its momentum.
    applied = finite & some & (norm > 0)
    limit = optimizer.max_grad_norm
    # One factor for mean and clip: a product is fused into whoever reads it, a quotient would be kept as one more tree.
    verdict = Verdict(finite, applied, share if limit is None else share * jnp.where(norm > limit, limit / norm, 1.0))
    change, _ = optimizer.transform.update(_scaled(totals.gradients, verdict), opt_state, trainable)
    one = jnp.ones((), jnp.float32)
    measured = {
        "optim/grad_norm": Mean(norm, one),
        "optim/learning_rate": Mean(optimizer.schedule(updates), one),
        "optim/skipped_updates": Mean(1.0 - applied.astype(jnp.float32), one),
    }
    report = UpdateReport(metrics=totals.metrics | measured, nonfinite_leaves=jnp.logical_not(jnp.isfinite(squares)))
    return _choose(verdict, optax.apply_updates(trainable, change), trainable), verdict, report


def _remember(optimizer: Optimizer, opt_state: Any, trainable: Params, gradients: Params, verdict: Verdict) -> Any:
    """The moments after the update. No optimizer's moments depend on the parameters, which have moved already."""
    return _choose(verdict, optimizer.transform.update(_scaled(gradients, verdict), opt_state, trainable)[1], opt_state)


@jax.jit
def _count(
    updates: Int32[Array, ""], skipped: Int32[Array, ""], nonfinite: Int32[Array, ""], verdict: Verdict
) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
    done = verdict.applied.astype(jnp.int32)
    return updates + done, skipped + 1 - done, jnp.where(verdict.finite, 0, nonfinite + 1)


def _scaled(gradients: Params, verdict: Verdict) -> Params:
    return jax.tree.map(lambda g: g * verdict.factor, gradients)


def _choose(verdict: Verdict, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(verdict.applied, a, b), new, old)


def _over_parts(f: Callable[..., Any], *totals: Totals) -> Totals:
    """Map over what adds up, leaf by leaf, and over the extremes, which don't, as wholes."""
    return jax.tree.map(f, *totals, is_leaf=lambda x: isinstance(x, Extreme))
