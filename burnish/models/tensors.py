"""Safetensors files and the leaves of a parameter tree: which tensors fill which leaf, read in pieces, written in shards.

Owns the layout rule (a stacked matrix [L, in, out] is one tensor [out, in] a layer, [L, E, in, out] one an expert; a leaf may be some rows
of a tensor that it shares with others; everything else is stored as it is), the check of names, shapes and dtypes, and laziness: no more
than one leaf, or one shard, is in host memory at a time. Called by `weights.py` alone.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from burnish.config.errors import UserError
from burnish.models.families import Part, TensorName
from burnish.models.sharding import shardings
from burnish.models.transformer import Params, ParamSpec

INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

STACKS = ("layers", "experts")
"""Axes of a leaf that files don't have: there is a tensor for each of their indices."""


class BadWeights(UserError):
    """Tensors don't fit the model. The message lists every one."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the tree and the tensors that make it: one for each index of its stacked axes, the last moving fastest, or else one.

    rows: where it is a part of each of them, its first row and their number of rows.
    """

    path: tuple[str, ...]
    spec: ParamSpec
    tensors: tuple[str, ...]
    rows: tuple[int, int] | None = None

    @property
    def stacks(self) -> int:
        """How many of its axes are stacked ones."""
        return sum(axis in STACKS for axis in self.spec.axes)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the leaf's own rows in each tensor."""
        shape = self.spec.shape[self.stacks :]
        return shape[::-1] if self.stacks else shape


def leaves(specs: Params, name: TensorName) -> Any:
    """A tree like `specs` of `Leaf`."""

    def leaf(path: tuple[Any, ...], s: ParamSpec) -> Leaf:
        keys = tuple(key.key for key in path)
        sizes = [size for axis, size in zip(s.axes, s.shape, strict=True) if axis in STACKS]
        found = [name(keys, *index) for index in itertools.product(*map(range, sizes or [1]))]
        tensors = tuple(part.tensor if isinstance(part, Part) else part for part in found)
        return Leaf(keys, s, tensors, found[0][1:] if isinstance(found[0], Part) else None)

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=_is_spec)


def file_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tree's files, with its shape."""
    whole = {leaf.path: leaf.tensor_shape if leaf.rows is None else (leaf.rows[1], *leaf.tensor_shape[1:]) for leaf in flat(tree)}
    return {name: whole[leaf.path] for leaf in flat(tree) for name in leaf.tensors}


def flat(tree: Any) -> list[Leaf]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Leaf))


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


class TensorFiles:
    """Open safetensors files, read by tensor name and region."""

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self._handles = {}
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise BadWeights(f"{path} can't be read as safetensors: {error}; it may be cut off, get it again") from error
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def check(self, tree: Any, where: Path, *, ignored: Callable[[str], bool]) -> None:
        """Raise `BadWeights` with everything that is unknown, missing, or of another shape or dtype than the tree wants."""
        expected = file_shapes(tree)
        problems = [f"unknown tensor {name}" for name in self._handles if name not in expected and not ignored(name)]
        problems += [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in self._handles]
        for name in expected.keys() & self._handles.keys():
            view = self._handles[name].get_slice(name)
            if self.shape(name) != expected[name]:
                problems.append(f"tensor {name} has shape {view.get_shape()}, the config asks for {list(expected[name])}")
            if view.get_dtype() not in _DTYPES:
                problems.append(f"tensor {name} has dtype {view.get_dtype()}; supported: {', '.join(_DTYPES)}")
        if problems:
            raise BadWeights(f"the weights in {where} don't fit:" + "".join(f"\n  - {problem}" for problem in sorted(problems)))

    @property
    def names(self) -> Set[str]:
        return self._handles.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> np.ndarray:
        return self._handles[name].get_tensor(name)

    def region(self, leaf: Leaf, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """A region of a leaf, assembled tensor by tensor."""
        if not leaf.stacks:
            return self._handles[leaf.tensors[0]].get_slice(leaf.tensors[0])[index].astype(dtype, copy=False)
        picked = [range(*part.indices(size)) for part, size in zip(index, leaf.spec.shape, strict=True)]
        lead, inner = picked[: leaf.stacks], [slice(r.start, r.stop) for r in picked[leaf.stacks :]]
        if leaf.rows is not None:  # the last axis here is the first of a tensor
            inner[-1] = slice(inner[-1].start + leaf.rows[0], inner[-1].stop + leaf.rows[0])
        out = np.zeros([len(r) for r in picked], dtype)
        for place in itertools.product(*(range(len(r)) for r in lead)):
            name = leaf.tensors[np.ravel_multi_index([r[i] for r, i in zip(lead, place, strict=True)], leaf.spec.shape[: leaf.stacks])]
            out[place] = self._handles[name].get_slice(name)[tuple(inner[::-1])].T
        return out


def place(tree: Any, files: TensorFiles, dtype: Any, mesh: Mesh | None) -> Params:
    """The tree's arrays: whole on the default device, or each device's piece of `mesh` straight from the files."""
    dtype = jnp.dtype(dtype)
    if mesh is None:
        return jax.tree.map(lambda leaf: jnp.asarray(files.region(leaf, (slice(None),) * len(leaf.spec.shape), dtype)), tree)
    where = shardings(jax.tree.map(lambda leaf: leaf.spec, tree), mesh)

    def pieces(leaf: Leaf, sharding: NamedSharding) -> Array:
        return jax.make_array_from_callback(leaf.spec.shape, sharding, lambda index: files.region(leaf, index or (), dtype))

    return jax.tree.map(pieces, tree, where)


def write(folder: Path, stem: str, tree: Any, arrays: Params, *, dtype: Any | None, shard_bytes: int) -> None:
    """Write a tree as `STEM.safetensors`, or as numbered shards with an index where it is larger than `shard_bytes`."""
    _check_arrays(tree, arrays)
    shards = list(_shards(tree, arrays, jnp.dtype(dtype) if dtype is not None else None, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, pieces in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: get() for name, get in pieces}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(array.nbytes for array in tensors.values())
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _shards(tree: Any, arrays: Params, dtype: Any, limit: int) -> Iterator[list[tuple[str, Callable[[], np.ndarray]]]]:
    """Tensors in groups of at most `limit` bytes, each as its name and a function that makes it."""
    parts: dict[str, list[tuple[int, Callable[[], np.ndarray]]]] = {}
    sizes: dict[str, int] = {}
    for leaf, array in zip(flat(tree), jax.tree.leaves(arrays), strict=True):
        nbytes = math.prod(leaf.tensor_shape) * (dtype or array.dtype).itemsize
        for number, name in enumerate(leaf.tensors):
            make = partial(_tensor, leaf, array, number, dtype)
            parts.setdefault(name, []).append((leaf.rows[0] if leaf.rows else 0, make))
            sizes[name] = sizes.get(name, 0) + nbytes
    group: list[tuple[str, Callable[[], np.ndarray]]] = []
    size = 0
    for name, makers in parts.items():
        if group and size + sizes[name] > limit:
            yield group
            group, size = [], 0
        group.append((name, partial(_joined, [make for _, make in sorted(makers, key=lambda part: part[0])])))
        size += sizes[name]
    yield group


def _joined(makers: list[Callable[[], np.ndarray]]) -> np.ndarray:
    return makers[0]() if len(makers) == 1 else np.concatenate([make() for make in makers])


def _tensor(leaf: Leaf, array: Array | np.ndarray, number: int, dtype: Any) -> np.ndarray:
    values = np.asarray(array[np.unravel_index(number, leaf.spec.shape[: leaf.stacks])] if leaf.stacks else array)
    # safetensors writes the wrong numbers, silently, for an array that isn't contiguous.
    return np.ascontiguousarray((values.T if leaf.stacks else values).astype(dtype or array.dtype))


def _check_arrays(tree: Any, arrays: Params) -> None:
    wanted = {".".join(leaf.path): leaf.spec.shape for leaf in flat(tree)}
    given = {jax.tree_util.keystr(path, simple=True, separator="."): a.shape for path, a in jax.tree_util.tree_leaves_with_path(arrays)}
    if wanted != given:
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        lines = "".join(f"\n  - {name}: {given.get(name, 'absent')}, the config asks for {wanted.get(name, 'nothing')}" for name in wrong)
        raise BadWeights(f"these parameters aren't the config's:{lines}")
