"""Frozen matrices in 8 or 4 bits: how a base is kept small beside an adapter that is trained (QLoRA, Dettmers et al., 2023,
arXiv:2305.14314).

Owns the three codes, their packing, and the quantised form of a model's parameters and of their declaration. Numbers of one column that lie
in one block of rows share a scale, about the largest size among them; 4-bit codes lie two in a byte (jax's own int4 takes a byte a number
on CPUs). `transformer.project` asks for `dense` inside the scan over layers, so one layer's matrices exist in full at a time. Who quantises
is the trainer's policy and the cluster, once the weights are where they are trained.

Differs from the paper: scales are bfloat16, one for 16 numbers of 4 bits, where the paper has one float32 for 64 and quantises these once
more; a scale may cut off a block's largest number; blocks run along a matrix's rows, not along the flat array.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, UInt8

from burnish.models import families
from burnish.pytree import pytree, static

Code = Literal["int8", "int4", "nf4"]
BLOCKS: dict[Code, int] = {"int8": 64, "int4": 16, "nf4": 16}
"""Rows that share a scale, where so many divide the matrix's rows; else the largest divisor below: a quarter of a bit a number for 8 bits,
one bit for 4. What larger blocks lose: dev/LOG.md."""
SCALE = "bfloat16"
CLIPS = (0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68)
"""Of a block's largest number, tried as its scale at 4 bits: the rest is cut off where the block as a whole is nearer then."""
REST = "bfloat16"
"""What the frozen leaves that aren't quantised are kept in: the embedding, norms, biases."""


@pytree
class Quantised:
    """A matrix [..., in, out]. codes: int8[..., blocks, block, out], or uint8[..., blocks, block / 2, out], where the low four bits are
    the block's first half; scales: bfloat16[..., blocks, out]. In a declared tree both are `ParamSpec`s, in one of places shardings."""

    codes: Any
    scales: Any
    code: Code = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        *batch, blocks, block, columns = self.codes.shape
        return (*batch, blocks * block * (1 if self.code == "int8" else 2), columns)


def nf4_table() -> np.ndarray:
    """float32[16], ascending in [-1, 1]: quantiles of the normal distribution, with 0 among them (the paper's appendix E)."""
    edge = 1 - (1 / 32 + 1 / 30) / 2
    inverse = NormalDist().inv_cdf
    above = [inverse(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    return (np.array(sorted([*above, 0.0, *below])) / inverse(edge)).astype(np.float32)


_TABLES = {"nf4": nf4_table(), "int4": (np.arange(-7, 9) / 7).astype(np.float32)}
"""What a 4-bit code stands for, before its scale; int4's last, 8/7, is for numbers that a smaller scale would cut off."""


@partial(jax.jit, static_argnames="code")
def quantise(matrix: Float[Array, "*batch i o"], code: Code) -> Quantised:
    """The nearest codes. Raises ValueError for 4 bits of an odd number of rows, which don't pair."""
    *batch, rows, columns = matrix.shape
    block = _block(rows, code)
    blocks = matrix.astype(jnp.float32).reshape(*batch, rows // block, block, columns)
    largest = jnp.max(jnp.abs(blocks), axis=-2)
    if code == "int8":  # a scale that was rounded down would ask for 128
        scales = largest.astype(SCALE)
        return Quantised(jnp.clip(jnp.round(_shares(blocks, scales) * 127), -127, 127).astype(jnp.int8), scales, code)
    if block % 2:
        raise ValueError(f"4-bit codes lie in pairs along a matrix's rows, of which {rows} are cut into blocks of {block}: use int8")
    first = _rounded(blocks, largest, code)
    _, scales, codes = jax.lax.fori_loop(0, len(CLIPS), partial(_closer, blocks, largest, code), first)
    low, high = jnp.split(codes, 2, axis=-2)
    return Quantised(low | high << 4, scales, code)


def _shares(blocks: Array, scales: Array) -> Array:
    return blocks / jnp.where(scales > 0, scales, 1).astype(jnp.float32)[..., None, :]


def _rounded(blocks: Array, sizes: Array, code: Code) -> tuple[Array, Array, Array]:
    """Each block's squared error, its scale, and its 4-bit codes."""
    scales = sizes.astype(SCALE)
    codes = _nearest(_shares(blocks, scales), _TABLES[code])
    found = jnp.take(jnp.asarray(_TABLES[code]), codes.astype(jnp.int32)) * scales.astype(jnp.float32)[..., None, :]
    return jnp.sum(jnp.square(found - blocks), axis=-2), scales, codes


def dense(matrix: Array | Quantised) -> Array:
    """The matrix in float32, or as it is where it isn't quantised."""
    if not isinstance(matrix, Quantised):
        return matrix
    codes = matrix.codes
    if matrix.code == "int8":
        numbers = codes.astype(jnp.float32) * (1 / 127)
    else:
        numbers = jnp.take(jnp.asarray(_TABLES[matrix.code]), jnp.concatenate([codes & 15, codes >> 4], axis=-2).astype(jnp.int32))
    return (numbers * matrix.scales.astype(jnp.float32)[..., None, :]).reshape(matrix.shape)


def _block(rows: int, code: Code) -> int:
    return max(d for d in range(1, BLOCKS[code] + 1) if rows % d == 0)


def _closer(blocks: Array, largest: Array, code: Code, i: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Per block the better of what is known and of the i-th smaller scale."""
    errors, scales, codes = _rounded(blocks, largest * jnp.asarray(CLIPS)[i], code)
    closer = errors < best[0]
    chosen = jnp.where(closer, errors, best[0]), jnp.where(closer, scales, best[1])
    return (*chosen, jnp.where(closer[..., None, :], codes, best[2]))


def _nearest(numbers: Float[Array, "*n"], table: np.ndarray) -> UInt8[Array, "*n"]:
    """The index of the nearest entry of an ascending table: how many of the midpoints lie below."""
    found = jnp.zeros(numbers.shape, jnp.uint8)
    for middle in ((table[1:] + table[:-1]) / 2).tolist():
        found += (numbers > middle).astype(jnp.uint8)
    return found


# ------------------------------------------------------------------------------------------------------------------- whole models


def quantised(params: dict[str, Any], code: Code | None, places: Any = None) -> dict[str, Any]:
    """A frozen base: the layers' projections in codes, all else in bfloat16; as it is where `code` is None.

    places: of the quantised leaves on a mesh, `shardings(quantised_spec(...))`; the arrays lie as `quantise` leaves them without.
    """
    if code is None:
        return params

    def leaf(name: str, x: Array) -> Any:
        return quantise(x, code) if name in families.MODULES else x.astype(REST)

    tree = {name: x if name == "layers" else x.astype(REST) for name, x in params.items()}
    tree["layers"] = {name: leaf(name, x) for name, x in params["layers"].items()}
    return tree if places is None else jax.device_put(tree, places)


def opened(params: dict[str, Any]) -> dict[str, Any]:
    """The same numbers without codes, all of them in float32."""
    tree = {name: x if name == "layers" else x.astype(jnp.float32) for name, x in params.items()}
    return tree | {"layers": {name: dense(x).astype(jnp.float32) for name, x in params["layers"].items()}}


def quantised_spec(specs: dict[str, Any], code: Code | None) -> dict[str, Any]:
    """The declaration of `quantised`, from the model's."""
    if code is None:
        return specs

    def leaf(name: str, s: Any) -> Any:
        if name not in families.MODULES:
            return dataclasses.replace(s, dtype=REST)
        *batch, rows, columns = s.shape
        *outer, row_axis, column_axis = s.axes
        block = _block(rows, code)
        stored, dtype = (block, "int8") if code == "int8" else (block // 2, "uint8")
        shape, axes = (*batch, rows // block, stored, columns), (*outer, row_axis, "block", column_axis)
        codes = dataclasses.replace(s, shape=shape, axes=axes, dtype=dtype)
        scales = dataclasses.replace(s, shape=(*batch, rows // block, columns), dtype=SCALE)
        return Quantised(codes, scales, code)

    tree = {name: s if name == "layers" else dataclasses.replace(s, dtype=REST) for name, s in specs.items()}
    return tree | {"layers": {name: leaf(name, s) for name, s in specs["layers"].items()}}


def code_of(params: dict[str, Any]) -> Code | None:
    """What a model's projections are kept in; None where they aren't quantised."""
    return next((x.code for x in params["layers"].values() if isinstance(x, Quantised)), None)


def moved(matrix: Any, place: Sharding, move: Any) -> Any:
    """`move(array, sharding)` of a matrix whose place is `place`; of codes and scales to the same rows and columns."""
    if not isinstance(matrix, Quantised):
        return move(matrix, place)
    if not isinstance(place, NamedSharding):
        return jax.tree.map(lambda x: move(x, place), matrix)
    *batch, rows, columns = (*place.spec, *[None] * (len(matrix.shape) - len(place.spec)))
    codes = NamedSharding(place.mesh, PartitionSpec(*batch, rows, None, columns))
    return Quantised(move(matrix.codes, codes), move(matrix.scales, place), matrix.code)


def stored_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, as they are kept."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
