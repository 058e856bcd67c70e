"""Rows of a batch on a mesh: which axes spread them, and that activations stay spread as they are.

Owns the one rule for rows; that for weights is `sharding.py`.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

ROW_AXES = ("data", "fsdp")
"""Mesh axes over which rows are spread."""


def keep_rows(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Inside a program of several devices, traced under `jax.set_mesh`: activations stay cut by rows, as the batch is.

    Left alone, a compiler cuts them along the width, as `fsdp` cuts the weights, and then every device has a part of all rows.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in ROW_AXES if sizes.get(axis, 1) > 1)
    if not axes or x.shape[0] % math.prod(sizes[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))
