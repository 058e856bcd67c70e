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
from burnish.models.moe import Load
from burnish.models.transformer import Adapter, Params, Precision, Remat
from burnish.pytree import pytree
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import Scores, TokenBatch
from burnish.rl.losses import Extreme, Mean, Metrics, over_tokens
from burnish.rl.off_policy import mismatch
from burnish.train.balance import Balance, Whole
from burnish.train.optim import Optimizer
from burnish.train.score import HeadOptions, entropy, policy_scores_and_load
from burnish.train.state import TrainState, UpdateReport

M = TypeVar("M")
"""What one forward-backward pass sees."""
LossOf = Callable[[Params, Params | None, M], tuple[Mean, Metrics, Load | None]]
"""(trained leaves, frozen ones, micro-batch) → the loss, whose total is differentiated; the metrics; and what the routers did, where their
load is balanced."""


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

    base: the frozen weights under an adapter, None where every weight is trained. survey: what must be known of a mini-batch before its
    gradients; None where nothing must, and in a mini-batch of one part, which knows itself.
    """

    totals: Callable[..., Totals]
    """(trained leaves, base, micro-batch, `Whole` or None)"""
    zeros: Callable[[Params, Params | None, M], Totals]
    accumulate: Callable[..., Totals]
    """(totals, trained leaves, base, micro-batch, `Whole` or None)"""
    apply: Callable[[TrainState, Totals], tuple[TrainState, UpdateReport]]
    survey: Callable[[Params, Params | None, M], Whole] | None = None

    def mapped(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Steps[M]:
        """The same steps with every program changed."""
        programs = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: change(program) for name, program in programs.items() if program is not None})

    def update(self, state: TrainState, base: Params | None, micro_batches: Iterable[M], *, count: int) -> tuple[TrainState, UpdateReport]:
        """One update from a mini-batch in `count` micro-batches, each taken when the one before is on its way; with a survey, all of them
        before the first gradient."""
        parts, whole = itertools.islice(micro_batches, count), None
        if self.survey is not None and count > 1:
            parts = list(parts)
            for micro in parts:
                seen = self.survey(state.trainable, base, micro)
                whole = seen if whole is None else whole + seen
        totals: Totals | None = None
        for micro in parts:
            if count == 1:
                totals = self.totals(state.trainable, base, micro, whole)
            else:
                totals = self.zeros(state.trainable, base, micro) if totals is None else totals
                totals = self.accumulate(totals, state.trainable, base, micro, whole)
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
    balance: Balance | None = None,
) -> Steps[MicroBatch]:
    """lora_scale: alpha / rank of the adapter that is trained; None trains every weight, the head included. balance: of experts' load."""
    head = HeadOptions(
        chunk=head_chunk,
        precision=precision,
        train_head=lora_scale is None,
        head_fn=entropy,
        head_fn_gradient=algorithm.entropy_gradient,
    )

    def loss(trainable: Params, base: Params | None, micro: MicroBatch) -> tuple[Mean, Metrics, Load | None]:
        adapter = None if lora_scale is None else Adapter(trainable, lora_scale)
        params = trainable if lora_scale is None else base
        if params is None:
            raise ValueError("an adapter is trained beside frozen weights, which weren't given: pass them as `base`")
        batch = micro.batch
        logps, extras, load = policy_scores_and_load(
            config, params, batch, adapter=adapter, options=head, remat=remat, with_load=balance is not None
        )
        uncertainty = extras["entropy"] if algorithm.entropy_gradient else jax.lax.stop_gradient(extras["entropy"])
        scores = Scores(logps=logps, old_logps=micro.old_logps, ref_logps=micro.ref_logps, entropy=uncertainty)
        metrics = mismatch(scores, batch)
        if algorithm.reject is not None:
            batch, rejected = algorithm.reject(scores, batch)
            metrics |= rejected
        per_token, measured = algorithm.loss(scores, batch)
        mean = algorithm.aggregate(per_token, batch)
        metrics |= measured | {"policy/loss": mean, "policy/entropy": over_tokens(uncertainty, batch.mask)}
        return mean, metrics, load

    return compile_steps(loss, optimizer, balance)


def compile_steps(loss: LossOf[M], optimizer: Optimizer, balance: Balance | None = None) -> Steps[M]:
    """The programs of an update by a loss, which with `balance` says what the routers did."""

    def total(trainable: Params, base: Params | None, micro: M, whole: Whole | None) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
        mean, metrics, load = loss(trainable, base, micro)
        if balance is None or load is None:
            return mean.total, (mean, jax.lax.stop_gradient(metrics))
        added, uneven = balance.part(load, whole or Whole(load, mean.weight))
        return mean.total + added, (mean, jax.lax.stop_gradient(metrics | {"policy/balance_loss": uneven}))

    def survey(trainable: Params, base: Params | None, micro: M) -> Whole:
        mean, _, load = loss(trainable, base, micro)
        assert load is not None, "the loss counts the load that is balanced"
        return Whole(load, mean.weight)

    def totals_of(trainable: Params, base: Params | None, micro: M, whole: Whole | None = None) -> Totals:
        gradients, (mean, metrics) = jax.grad(total, has_aux=True)(trainable, base, micro, whole)
        return Totals(gradients=gradients, loss=mean, metrics=metrics)

    @jax.jit
    def no_totals(trainable: Params, base: Params | None, micro: M) -> Totals:
        shapes = dataclasses.replace(jax.eval_shape(totals_of, trainable, base, micro), gradients={})
        return _over_parts(lambda s: Extreme.nothing(s.kind) if isinstance(s, Extreme) else jnp.zeros(s.shape, s.dtype), shapes)

    def zeros(trainable: Params, base: Params | None, micro: M) -> Totals:
        # Made by a program that reads nothing, the gradients would lie whole on one device; these lie as their leaves do.
        return dataclasses.replace(no_totals(trainable, base, micro), gradients=jax.tree.map(jnp.zeros_like, trainable))

    def accumulate(totals: Totals, trainable: Params, base: Params | None, micro: M, whole: Whole | None = None) -> Totals:
        return _over_parts(lambda a, b: a.join(b) if isinstance(a, Extreme) else a + b, totals, totals_of(trainable, base, micro, whole))

    return Steps(
        totals=jax.jit(totals_of),
        zeros=zeros,
        accumulate=jax.jit(accumulate, donate_argnums=0),
        apply=make_apply(optimizer),
        survey=None if balance is None else jax.jit(survey),
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
