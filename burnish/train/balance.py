"""The load of experts, balanced over a whole mini-batch (Fedus et al., 2021, arXiv:2101.03961, equation 4).

Owns the loss; what routers did is `models.transformer.expert_load`. For training loops of your own: no trainer here adds it.

    load = sum of expert_load(...) over all micro-batches, without gradient
    gradient of sum of balance_loss(config, expert_load(...), fractions(load)) over the same micro-batches, divided once by its weight
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from burnish.models.config import MoeConfig
from burnish.models.moe import Load
from burnish.rl.losses import Mean


def fractions(moe: MoeConfig, load: Load) -> Float[Array, "L E"]:
    """Each expert's share of the choices in each layer; 1/E where the load is even."""
    return jax.lax.stop_gradient(load.counts / jnp.maximum(load.tokens * moe.per_token, 1.0)[:, None])


def balance_loss(moe: MoeConfig, load: Load, shares: Float[Array, "L E"]) -> Mean:
    """E · sum over experts of share · probability, a mean over tokens and layers: 1 where the load is even, up to E.

    load: of a part of the tokens; shares: `fractions` of all of them, constants. So parts add up, and how a mini-batch is cut changes
    neither the loss nor its gradient; a loss of each micro-batch's own shares would ask every one of them to be even.
    Differs from the paper: a token's several choices count alike, and layers are averaged.
    """
    return Mean(moe.num_experts * jnp.sum(shares * load.probs), jnp.sum(load.tokens))
