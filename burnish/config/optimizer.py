"""The options of an optimizer and its schedule. What they build is `train.optim`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from burnish.config.section import Fraction, Positive, Section


class OptimizerConfig(Section):
    """The optimizer and its schedule; schedules count updates."""

    name: Literal["adamw", "adafactor", "muon", "lion"] = "adamw"
    """Which optax optimizer."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises from 0."""
    total_updates: Positive | None = None
    """Length of the whole schedule; null derives it from `training.max_steps`."""
    min_ratio: Fraction = 0.0
    """Last rate of a decaying schedule, as a share of the peak."""
    b1: Fraction = 0.9
    """First moment decay."""
    b2: Fraction = 0.999
    """Second moment decay."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; norms and biases are left out."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global norm of the gradient to this; null doesn't clip."""
