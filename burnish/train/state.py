"""What training changes from update to update, and what one update reports: device records, host readers.

Owns `TrainState` and `UpdateReport`. Which functions make new ones is `train.step`; saving is `checkpoint.py`, of whole states.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32

from burnish.config.errors import BurnishError
from burnish.models.transformer import Params
from burnish.observe.metrics import Metric
from burnish.pytree import pytree
from burnish.rl.losses import EffectiveShare, Extreme, Mean, Metrics
from burnish.train.optim import Optimizer

LAST = frozenset({"optim/learning_rate"})
SUMS = frozenset({"optim/skipped_updates"})


class NonFiniteError(BurnishError):
    """Too many updates in a row had a NaN or an infinity; none of them was applied."""


@pytree
class TrainState:
    """trainable: float32 masters, all weights or an adapter's pairs. updates: applied ones, what schedules count.

    skipped: updates that were not applied, for lack of a signal or of finite numbers. nonfinite: the latter, in a row up to now.
    """

    trainable: Params
    opt_state: Any
    updates: Int32[Array, ""]
    skipped: Int32[Array, ""]
    nonfinite: Int32[Array, ""]


@pytree
class UpdateReport:
    """One update's metrics, unread on the device, and which leaves (in the order of `leaf_names`) were not finite."""

    metrics: Metrics
    nonfinite_leaves: Bool[Array, " leaves"]


def init_state(trainable: Params, optimizer: Optimizer) -> TrainState:
    """A fresh state with copies of the leaves: steps donate a state, and the caller's arrays must survive (a reference, an engine).

    Raises ValueError for a leaf that isn't float32: small updates vanish in anything less.
    """
    low = [f"{name} {x.dtype}" for name, x in zip(leaf_names(trainable), jax.tree.leaves(trainable), strict=True) if x.dtype != jnp.float32]
    if low:
        raise ValueError(f"trained leaves must be float32 masters, got {', '.join(low)}: load the weights with dtype float32")
    copied = jax.tree.map(lambda x: jnp.array(x, copy=True), trainable)
    counters = {name: jnp.zeros((), jnp.int32) for name in ("updates", "skipped", "nonfinite")}
    return TrainState(trainable=copied, opt_state=optimizer.transform.init(copied), **counters)


def shape_to_read(mesh: Mesh | None, x: Array) -> jax.ShapeDtypeStruct:
    """What is read in place of `x`, of a role on `mesh`. What was made by no program is on one device, uncommitted, but what is read is
    committed to where it is put: on all of them."""
    everywhere = None if mesh is None or isinstance(x.sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere or x.sharding)


def leaf_names(tree: Any) -> list[str]:
    """Dotted paths, in jax's order of leaves: `layers.q`, `q.a`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def read_metrics(report: UpdateReport) -> dict[str, Metric]:
    """The report's numbers on the host, ready for a `MetricCollector`; waits for the update. Extremes of nothing are left out.

    An effective share is exact over the update; over the updates of a step the collector takes its mean, weighted by tokens.
    """
    read = {name: _read(name, value) for name, value in jax.device_get(report.metrics).items()}
    return {name: metric for name, metric in read.items() if metric is not None}


def _read(name: str, value: Mean | Extreme | EffectiveShare) -> Metric | None:
    match value:
        case Mean():
            reduction = "last" if name in LAST else "sum" if name in SUMS else "mean"
            return Metric(reduction, float(value.total), float(value.weight), int(math.isnan(value.total)))
        case EffectiveShare():
            share, count = float(value.value()), float(value.count)
            return Metric("mean", share * count, count, int(math.isnan(share)))
        case Extreme():
            number = float(value.extreme)
            nothing = number == (-math.inf if value.kind == "max" else math.inf)
            return None if nothing else Metric(value.kind, number, num_nan=int(math.isnan(number)))


def stop_if_nonfinite(state: TrainState, report: UpdateReport, *, limit: int, step: int, optimizer: str = "training.optimizer") -> None:
    """Raise NonFiniteError when `limit` updates in a row were skipped for NaN or infinity; names step, leaves and the config's key."""
    in_a_row = int(state.nonfinite)
    if in_a_row < limit:
        return
    bad = [name for name, flag in zip(leaf_names(state.trainable), report.nonfinite_leaves.tolist(), strict=True) if flag]
    where = f"in {', '.join(bad)}" if bad else "in the loss"
    raise NonFiniteError(
        f"{in_a_row} non-finite updates in a row, the last at step {step}, {where}; none was applied and the parameters are finite. "
        f"Lower {optimizer}.learning_rate, or look at the step's transcripts and rewards"
    )
