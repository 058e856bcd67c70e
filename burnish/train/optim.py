"""From an `OptimizerConfig` to an optax transform and its learning-rate schedule.

Owns which optimizer, clipping, which leaves decay, and schedules counted in updates (never in micro-batches or steps). When an update is
skipped is `train.step`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from burnish.config.schema import OptimizerConfig

Schedule = Callable[[Any], Any]


class Optimizer(NamedTuple):
    """transform: gradients → updates, clipping and learning rate included. schedule: update count (from 0) → learning rate."""

    transform: optax.GradientTransformation
    schedule: Schedule


def make_optimizer(config: OptimizerConfig, *, total_updates: int) -> Optimizer:
    """total_updates: how many updates the run makes, where the config doesn't say."""
    schedule = make_schedule(config, total_updates=config.total_updates or total_updates)
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    return Optimizer(optax.chain(clip, _rule(config, schedule)), schedule)


def make_schedule(config: OptimizerConfig, *, total_updates: int) -> Schedule:
    """0 rising to the peak over `warmup_updates`, then constant, or falling to `min_ratio` of the peak at `total_updates`."""
    peak, warmup = config.learning_rate, config.warmup_updates
    if config.schedule != "constant" and total_updates <= warmup:
        raise ValueError(f"a {config.schedule} schedule of {total_updates} updates has no room after a warm-up of {warmup}: shorten the warm-up")
    falling = total_updates - warmup
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.min_ratio, falling)
    else:
        after = optax.cosine_decay_schedule(peak, falling, alpha=config.min_ratio)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def _rule(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    decay = config.weight_decay
    match config.name:
        case "adamw":
            return optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=decay, mask=decays)
        case "lion":
            return optax.lion(schedule, config.b1, config.b2, weight_decay=decay, mask=decays)
        case "adafactor":
            # Put together here because optax.adafactor's decay isn't multiplied by the learning rate.
            scaled = optax.chain(optax.scale_by_factored_rms(epsilon=config.eps**2), optax.clip_by_block_rms(1.0))
            return optax.chain(scaled, optax.add_decayed_weights(decay, decays), optax.scale_by_learning_rate(schedule))
        case "muon":
            return optax.contrib.muon(
                schedule,
                beta=config.b1,
                eps=config.eps,
                weight_decay=decay,
                weight_decay_mask=decays,
                adam_b1=config.b1,
                adam_b2=config.b2,
                adam_weight_decay=decay,
                muon_weight_dimension_numbers=_muon_dimensions,
                consistent_rms=0.2,  # updates as large as AdamW's, so that learning rates carry over (Liu et al., 2025, arXiv:2502.16982)
            )


def decays(params: Any) -> Any:
    """Which leaves weight decay shrinks: all but norms and biases, by name (stacked over layers, a vector has two axes too)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _name(path).endswith(("norm", "bias")), params)


def _muon_dimensions(params: Any) -> Any:
    """The last two axes of the layers' matrices; None (plain Adam) for embedding, head, norms and biases."""

    def dimensions(path: tuple[Any, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        is_matrix = leaf.ndim == 3 and not _name(path).endswith(("norm", "bias"))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2) if is_matrix else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)
