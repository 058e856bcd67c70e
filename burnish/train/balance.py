"""The load of experts, balanced over a whole mini-batch (Fedus et al., 2021, arXiv:2101.03961, equation 4).

Owns the loss, its factor, and how it joins another loss whose sums are divided by a weight of their own. What routers do with a part of a
mini-batch comes from the pass that scores it (`models.transformer.forward_with_load`); who adds the loss is `train.step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from burnish.config.errors import UserError
from burnish.models.config import ModelConfig, MoeConfig
from burnish.models.moe import Load
from burnish.pytree import pytree
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


@pytree
class Whole:
    """Of a whole mini-batch, before its gradients: what its routers do, and what the other loss will be divided by. Parts add up."""

    load: Load
    weight: Float[Array, ""]

    def __add__(self, other: Whole) -> Whole:
        return jax.tree.map(jnp.add, self, other)


@dataclass(frozen=True, slots=True)
class Balance:
    """coefficient: factor on the loss as transformers counts it, for which an even load is `per_token`, not 1."""

    moe: MoeConfig
    coefficient: float

    def part(self, load: Load, whole: Whole) -> tuple[Float[Array, ""], Mean]:
        """What a part of the mini-batch adds to a total that will be divided by `whole.weight`; and its part of the loss itself."""
        mean = balance_loss(self.moe, load, fractions(self.moe, whole.load))
        factor = self.coefficient * self.moe.per_token * whole.weight / jnp.maximum(jnp.sum(whole.load.tokens), 1.0)
        return jax.lax.stop_gradient(factor) * mean.total, mean


def balance_of(config: ModelConfig, coefficient: float | None, *, trains_routers: bool) -> Balance | None:
    """The loss of a run. coefficient: `training.balance`, None for the model's own. None where it is 0, or where routers aren't trained.

    Raises UserError where a coefficient is asked for and no router learns.
    """
    if config.moe is None or not trains_routers:
        if coefficient:
            why = f"a {config.family} model has no experts" if config.moe is None else "routers are frozen beside an adapter"
            raise UserError(f"training.balance is {coefficient}, and {why}: leave it out")
        return None
    coefficient = config.moe.balance if coefficient is None else coefficient
    return Balance(config.moe, coefficient) if coefficient else None
