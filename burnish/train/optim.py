"""From an `OptimizerConfig` to an optax transform and its learning-rate schedule.

Owns which optimizer, which leaves decay, and schedules counted in updates (never in micro-batches or steps). When an update is
skipped is `train.step`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig

Schedule = Callable[[Any], Float[Array, ""]]


class Optimizer(NamedTuple):
    """transform: clipped gradients → updates, learning rate included. schedule: update count (from 0) → learning rate.

    max_grad_norm: what the gradients' global norm is clipped to beforehand (`train.step` knows that norm), or None.
    """

    transform: optax.GradientTransformation
    schedule: Schedule
    max_grad_norm: float | None


def make_optimizer(config: OptimizerConfig, *, total_updates: int, key: str = "training.optimizer") -> Optimizer:
    """total_updates: how many updates the run makes, where the config doesn't say. key: where the config stands, for its errors."""
    schedule = make_schedule(config, total_updates=config.total_updates or total_updates, key=key)
    transform = _rule(config, schedule)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax raises floats to integer counts, which strict promotion (on in the tests) refuses.
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params)

    return Optimizer(optax.GradientTransformation(transform.init, update), schedule, config.max_grad_norm)


def make_schedule(config: OptimizerConfig, *, total_updates: int, key: str = "training.optimizer") -> Schedule:
    """0 rising to the peak over `warmup_updates`, then constant, or falling to `min_ratio` of the peak at `total_updates`."""
    peak, warmup = config.learning_rate, config.warmup_updates
    if config.schedule != "constant" and total_updates <= warmup:
        raise UserError(
            f"{key}: a {config.schedule} schedule of {total_updates} updates has no room after a warm-up of {warmup}: shorten the warm-up"
        )
    falling = total_updates - warmup
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.min_ratio, falling)
    else:
        after = optax.cosine_decay_schedule(peak, falling, alpha=config.min_ratio)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    return lambda count: jnp.asarray(schedule(jnp.asarray(count, jnp.float32)), jnp.float32)


def _rule(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    rate = optax.chain(optax.add_decayed_weights(config.weight_decay, decays), optax.scale_by_learning_rate(schedule))
    match config.name:
        case "adamw":
            return optax.chain(optax.scale_by_adam(config.b1, config.b2, config.eps), rate)
        case "lion":
            return optax.chain(optax.scale_by_lion(config.b1, config.b2), rate)
        case "adafactor":
            return optax.chain(optax.scale_by_factored_rms(epsilon=config.eps**2), optax.clip_by_block_rms(1.0), rate)
        case "muon":
            muon = optax.contrib.scale_by_muon(beta=config.b1, eps=config.eps, weight_dimension_numbers=_last_two_axes)
            rules: dict[Hashable, optax.GradientTransformation] = {
                "muon": optax.chain(muon, optax.stateless(_as_large_as_adam)),
                "adam": optax.scale_by_adam(config.b1, config.b2, config.eps),
            }
            return optax.chain(optax.partition(rules, _muon_or_adam), rate)


def decays(params: Any) -> Any:
    """Which leaves weight decay shrinks: all but norms (`scale` is flax's name) and biases, by name: stacked over layers, a vector has two
    axes too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _name(path).endswith(("norm", "bias", "scale")), params)


def _muon_or_adam(params: Any) -> Any:
    """Muon for the layers' matrices; Adam for embedding, head, norms and biases."""
    return jax.tree.map(lambda decayed, leaf: "muon" if decayed and leaf.ndim == 3 else "adam", decays(params), params)


def _last_two_axes(matrices: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), matrices)


def _as_large_as_adam(updates: Any, _: Any) -> Any:
    """Orthogonal matrices scaled to the usual size of Adam's updates, so that learning rates carry over (arXiv:2502.16982)."""
    return jax.tree.map(lambda u: u * (0.2 * max(u.shape[-2:]) ** 0.5), updates)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)
