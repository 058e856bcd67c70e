"""The trainer's own weights, lent to the engine: no copy, layers stacked as the trainer has them.

Owns what may be lent and the bookkeeping; the other way to hold weights is `layout.py`. Whoever lends takes the arrays back before an
update donates them (`NativeEngine.recall`), and lends the new ones with the next version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from burnish.models.config import ModelConfig
from burnish.models.transformer import Params, Precision
from burnish.rollout.native.layout import Arrived, Weights, leaf_places, leaf_shapes, refuse


@dataclass(frozen=True)
class Lease:
    """weights: the lender's arrays themselves. places: where each leaf must lie."""

    config: ModelConfig
    places: Mapping[str, Sharding]
    weights: Weights
    precision: Precision = "f32"

    @classmethod
    def of(cls, config: ModelConfig, params: Params, *, mesh: Mesh | None = None) -> Lease:
        """Raises ValueError, naming the leaf, where one isn't float32 or doesn't lie where the engine computes: copy it then."""
        head = params["embed"] if config.tied_head else params["head"]
        lease = cls(config, leaf_places(config, {}, mesh), Weights(params["embed"], params["layers"], params["final_norm"], head))
        top = {name: value for name, value in params.items() if name != "layers"}
        for name, value in (top | {f"layers.{name}": value for name, value in params["layers"].items()}).items():
            lease.check(name, value)
        return lease

    def check(self, name: str, array: Any) -> None:
        """Refuse a leaf that isn't one of the model's, has another shape, or would have to be copied."""
        refuse(leaf_shapes(self.config), name, array)
        if not isinstance(array, jax.Array) or array.dtype != jnp.float32:
            raise ValueError(f"{name!r} can't be lent as {array.dtype}: the engine computes from float32 jax arrays")
        if not array.sharding.is_equivalent_to(self.places[name], array.ndim):
            raise ValueError(f"{name!r} can't be lent: it lies as {array.sharding}, the engine computes as {self.places[name]}")

    def updated(self, leaves: Mapping[str, Any], arrived: Arrived) -> Lease:
        """A lease of these (checked) leaves; those that aren't named stay lent. arrived: is shown each."""
        for name, value in leaves.items():
            arrived(name, value)
        top = {name: leaves[name] for name in ("embed", "final_norm", "head") if name in leaves}
        if "embed" in top and self.config.tied_head:
            top["head"] = top["embed"]
        changed = {name.removeprefix("layers."): value for name, value in leaves.items() if name.startswith("layers.")}
        return replace(self, weights=self.weights._replace(layers={**self.stacked, **changed}, **top))

    @property
    def stacked(self) -> Mapping[str, Any]:
        """The layers' leaves, by name."""
        layers = self.weights.layers
        return layers if isinstance(layers, dict) else {}
