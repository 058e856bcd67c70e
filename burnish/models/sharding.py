"""Where the parameters live on a mesh: one table from logical axes to mesh axes.

Owns the rule and its check. Every leaf's logical axes come from its declaration (`transformer.spec`, `lora.adapter_spec`); `weights.py`
loads by it, the trainer and the engine place by it. A mesh may lack any of the axes.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burnish.config.errors import UserError
from burnish.models.config import ModelConfig
from burnish.models.rows import ROW_AXES
from burnish.models.transformer import ParamSpec

MESH_AXES = ("data", "fsdp", "tp")
RULES: dict[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "experts": "tp",
    "expert_mlp": None,
    "choices": None,
    "head_dim": None,
    "rank": None,
    "block": None,
    "labels": None,
    "whole": None,
}
"""Logical axis of a parameter → mesh axis. `data` holds whole copies, `fsdp` pieces of every copy, `tp` pieces of every product."""


def partition(axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
    """The partition of one leaf."""
    return PartitionSpec(*(rule if (rule := RULES[axis]) in mesh.shape else None for axis in axes))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of `NamedSharding` like a tree of `ParamSpec`; `UserError` lists every leaf that the mesh doesn't divide."""
    problems: list[str] = []

    def leaf(path: tuple[Any, ...], s: ParamSpec) -> NamedSharding:
        parts = partition(s.axes, mesh)
        for axis, size, part in zip(s.axes, s.shape, parts, strict=True):
            if part is not None and size % mesh.shape[part]:
                problems.append(f"{jax.tree_util.keystr(path, simple=True, separator='.')}: {axis} {size} by {part}={mesh.shape[part]}")
        return NamedSharding(mesh, parts)

    tree = jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    if problems:
        raise UserError(f"the mesh {dict(mesh.shape)} doesn't divide:" + "".join(f"\n  - {problem}" for problem in problems))
    return tree


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh with unknown axes, or whose `tp` would cut through a head."""
    unknown = [name for name in mesh.shape if name not in MESH_AXES]
    if unknown:
        raise UserError(f"unknown mesh axes {unknown}; a model's mesh has {', '.join(MESH_AXES)}")
    cuts = [name for name in ("fsdp", "tp") if mesh.shape.get(name, 1) > 1]
    if config.decoder is not None and cuts:
        raise UserError(f"{config.family}'s weights lie whole on every device, so {' and '.join(cuts)} can't cut them: use data alone")
    tp = mesh.shape.get("tp", 1)
    for name, count in (("num_heads", config.num_heads), ("num_kv_heads", config.num_kv_heads)):
        if count % tp:
            raise UserError(f"tp={tp} doesn't divide {name}={count}: choose a tp that divides both, or put the devices on fsdp or data")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch: spread over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(tuple(axis for axis in ROW_AXES if axis in mesh.shape)))
