"""The engine's own copy of the weights, in the layout that decoding is fastest with; the trainer's own, lent, are `lease.py`.

Owns: layers unstacked into a tuple, a LoRA adapter merged into its matrices in float32, matrices in the dtype they are multiplied in.
Updates make a new `Layout` beside the old one, so whoever holds either has it whole. When updates happen is `engine.py`'s business.

On a mesh every leaf is cut by the rule that cuts the trainer's (`models.sharding`), and what comes in is moved block by block
(`sync.reshard`).

Leaves are named by dotted paths as in checkpoints: "embed", "final_norm", "head", "layers.q", "adapter.q.a", "adapter.q.b", "adapter.q.m".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float

from burnish.models.config import ModelConfig
from burnish.models.lora import merged_matrix, spec_of
from burnish.models.quant import Quantised, dense, moved
from burnish.models.sharding import shardings
from burnish.models.transformer import Adapter, Params, ParamSpec, Precision, spec
from burnish.sync.reshard import placed, reshard

Arrived = Callable[[str, Array], None]


def _unnoticed(name: str, array: Array) -> None:
    """Nobody wants to know."""


class Weights(NamedTuple):
    """What the compiled programs take. A tied head is the embedding itself at float32, a bfloat16 copy of it at bf16.

    layers: each on its own, or, where they are lent, one tree of stacked leaves.
    """

    embed: Float[Array, "V D"]
    layers: tuple[dict[str, Array], ...] | dict[str, Array]
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"]


@dataclass(frozen=True)
class Layout:
    """`weights`, and what it takes to rebuild a part of them.

    places: where each leaf goes, layers stacked. stacked: of the matrices that an adapter changes, the base; and the adapter's leaves. What
    is pushed is copied, so a trainer may donate
    its arrays; so are the first parameters, unless there is an adapter: whoever trains an adapter leaves the base alone.
    """

    config: ModelConfig
    precision: Precision
    places: Mapping[str, Sharding]
    scale: float
    stacked: Mapping[str, Array | Quantised]
    weights: Weights

    @classmethod
    def build(
        cls, config: ModelConfig, params: Params, adapter: Adapter | None, *, precision: Precision, mesh: Mesh | None = None
    ) -> Layout:
        """mesh: where; None is the first device."""
        pairs, scale = ({}, 0.0) if adapter is None else (adapter.pairs, adapter.scale)
        places = leaf_places(config, pairs, mesh)
        stacked = {f"layers.{name}": moved(params["layers"][name], places[f"layers.{name}"], placed) for name in pairs}
        halves = {f"adapter.{name}.{half}": pairs[name][half] for name in pairs for half in pairs[name]}
        stacked |= {name: _owned(value, places[name]) for name, value in halves.items()}
        nothing = jnp.zeros(0)
        empty = Weights(nothing, tuple({} for _ in range(config.num_layers)), nothing, nothing)
        layout = cls(config, precision, places, scale, stacked, empty)
        own = _owned if adapter is None else _shared
        leaves = {name: own(value, places[name]) for name, value in params.items() if name != "layers"}
        leaves["head"] = leaves["embed"] if config.tied_head else leaves["head"]
        leaves |= {f"layers.{name}": dense(value) for name, value in params["layers"].items() if f"layers.{name}" not in stacked}
        return layout._with(stacked, leaves, merged={name: stacked[f"layers.{name}"] for name in pairs})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every leaf that an update may name, with its shape."""
        return {**leaf_shapes(self.config)} | {name: value.shape for name, value in self.stacked.items()}

    def check(self, name: str, array: Any) -> None:
        """Refuse a leaf that isn't one of the model's, or has another shape."""
        refuse(self.shapes(), name, array)

    def updated(self, leaves: Mapping[str, Any], arrived: Arrived = _unnoticed) -> Layout:
        """A layout with these (checked) leaves in place of the old ones. arrived: is shown each as it came, where the engine computes."""
        whole = {name: _owned(value, self.places[name]) for name, value in leaves.items() if not self._is_unstacked(name)}
        for name, value in whole.items():
            arrived(name, value)
        leaves = {**leaves, **whole}
        stacked = {name: leaves.get(name, value) for name, value in self.stacked.items()}
        adapted = {name.split(".")[1] for name in stacked if name in leaves}
        plain = {name: value for name, value in leaves.items() if name not in stacked}
        if "embed" in plain and self.config.tied_head:
            plain["head"] = plain["embed"]
        return self._with(stacked, plain, merged={name: stacked[f"layers.{name}"] for name in adapted}, arrived=arrived)

    def _is_unstacked(self, name: str) -> bool:
        """Whether the leaf is taken apart, and so copied, when it comes."""
        return name.startswith("layers.") and name not in self.stacked

    def _with(
        self, stacked: Mapping[str, Any], leaves: Mapping[str, Any], *, merged: Mapping[str, Any], arrived: Arrived = _unnoticed
    ) -> Layout:
        """Replace `leaves` as they are and the `merged` matrices by base + adapter."""
        dtype = jnp.dtype(jnp.bfloat16 if self.precision == "bf16" else jnp.float32)
        old = self.weights
        top = {name: leaves[name] for name in ("embed", "final_norm") if name in leaves}
        if "head" in leaves:
            top["head"] = leaves["head"].astype(dtype)
        changed: dict[str, tuple[Array, ...]] = {}
        for name, value in leaves.items():
            if self._is_unstacked(name):
                here = _here(value, self.places[name])
                arrived(name, here)
                # A router's products are float32 always: a rounded one would choose other experts than the trainer's.
                width = dtype if here.ndim >= 3 and name != "layers.router" else jnp.dtype(jnp.float32)
                changed[name.removeprefix("layers.")] = _unstack(here, width, _of_layer(self.places[name]))
        for name, base in merged.items():
            pair = {part: stacked[leaf] for part in ("a", "b", "m") if (leaf := f"adapter.{name}.{part}") in stacked}
            changed[name] = _merge(base, pair, scale=self.scale, dtype=dtype, place=_of_layer(self.places[f"layers.{name}"]))
        assert isinstance(old.layers, tuple), "only lent layers are stacked"
        layers = tuple(layer | {name: parts[i] for name, parts in changed.items()} for i, layer in enumerate(old.layers))
        return replace(self, stacked=stacked, weights=old._replace(layers=layers, **top))


@cache
def leaf_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every leaf of a model, layers stacked."""
    tree = spec(config)
    layers = {f"layers.{name}": leaf.shape for name, leaf in tree["layers"].items()}
    return MappingProxyType({name: leaf.shape for name, leaf in tree.items() if name != "layers"} | layers)


def refuse(shapes: Mapping[str, tuple[int, ...]], name: str, array: Any) -> None:
    """Raise ValueError for a leaf that `shapes` hasn't, or has with another shape."""
    if name not in shapes:
        raise ValueError(f"weights were pushed for {name!r}, which this engine doesn't have; it has {', '.join(sorted(shapes))}")
    if tuple(array.shape) != shapes[name]:
        raise ValueError(f"weights for {name!r} have shape {tuple(array.shape)}, the engine's have {shapes[name]}")


def leaf_places(config: ModelConfig, pairs: Params, mesh: Mesh | None) -> dict[str, Sharding]:
    """Where every leaf of a model, and of an adapter, goes."""
    tree = spec(config)
    if pairs:
        tree["adapter"] = spec_of(config, pairs)
    alone = SingleDeviceSharding(jax.local_devices()[0])
    where = shardings(tree, mesh) if mesh is not None else jax.tree.map(lambda _: alone, tree, is_leaf=lambda x: isinstance(x, ParamSpec))
    return {jax.tree_util.keystr(path, simple=True, separator="."): place for path, place in jax.tree.leaves_with_path(where)}


def _of_layer(stacked: Sharding) -> NamedSharding | None:
    """Where a layer's part of a stacked leaf goes; None on one device."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:])) if isinstance(stacked, NamedSharding) else None


def _here(array: Any, place: Sharding) -> Array:
    """The caller's buffers themselves when they are where the engine computes."""
    return placed(jnp.asarray(array), place)


def _shared(array: Any, place: Sharding) -> Array:
    """float32 where the engine computes; the caller's own if it is just that."""
    return _here(array, place).astype(jnp.float32)


def _owned(array: Any, place: Sharding) -> Array:
    """A float32 copy, even of what is there already."""
    return reshard(array, place).astype(jnp.float32)


@partial(jax.jit, static_argnames=("dtype", "place"))
def _unstack(stacked: Float[Array, "L ..."], dtype: jnp.dtype, place: NamedSharding | None) -> tuple[Array, ...]:
    return _apart(stacked.astype(dtype), place)


@partial(jax.jit, static_argnames=("scale", "dtype", "place"))
def _merge(
    base: Float[Array, "L i o"] | Quantised, pair: Params, *, scale: float, dtype: jnp.dtype, place: NamedSharding | None
) -> tuple[Array, ...]:
    return _apart(merged_matrix(base, pair, scale).astype(dtype), place)


def _apart(stacked: Float[Array, "L ..."], place: NamedSharding | None) -> tuple[Array, ...]:
    return tuple(stacked) if place is None else tuple(jax.lax.with_sharding_constraint(layer, place) for layer in stacked)
