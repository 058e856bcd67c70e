"""Weights that were pushed, as a folder that other programs read: a model in Hugging Face's layout and names, or an adapter in PEFT's.

Owns the way from an engine's leaves to such a folder (`rollout.remote.editions.WeightWriter`), and that it holds what was sent. The names
of tensors are `models.families`, the folders `models.weights`. An engine that fuses matrices does so when it reads: there is no table for
any engine here. Called by engines whose weights live in another process.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models import lora, weights
from burnish.models.config import ModelConfig
from burnish.models.transformer import Adapter, Params, ParamSpec, spec
from burnish.sync.checksum import checksum as checksum_of
from burnish.sync.reshard import on_host

_PREFIX = "adapter."
_ALONE = contextlib.nullcontext()


class _Folders:
    """What both kinds of folders have in common."""

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing is held open."""


class ModelFolders(_Folders):
    """Whole models, each as the pushed leaves say; what isn't pushed is as in the folder before.

    like: the folder whose tokenizer files are copied, and the first of which leaves are kept. dtype: of the stored numbers.
    """

    kind: Literal["adapter", "model"] = "model"

    def __init__(self, config: ModelConfig, *, like: Path, dtype: Any) -> None:
        self._config, self._like, self._dtype = config, like, dtype
        self._specs = _named(spec(config))

    def check(self, name: str, array: Any) -> None:
        _refuse(self._specs, name, array)

    def write(self, folder: Path, leaves: Mapping[str, Any], *, last: Path | None, checksum: int | None) -> None:
        came = {name: on_host(leaf) for name, leaf in leaves.items()}
        _compare(came, checksum, "came")
        if self._specs.keys() - came.keys():
            _, before = weights.load(last or self._like)
            came = {name: on_host(leaf) for name, leaf in _named(before).items()} | came
        weights.save(folder, self._config, _filled(spec(self._config), came), like=self._like, dtype=self._dtype)


class AdapterFolders(_Folders):
    """Adapters beside a base that the servers have; or, `merged` into it, whole models.

    adapter: the first, for leaves that aren't pushed. base: the folder of the base. merged: the base's weights, which nobody changes, and
    the dtype in which sums are stored; None writes adapters. dispatch: held while programs run on the base's devices.
    """

    def __init__(
        self,
        config: ModelConfig,
        adapter: Adapter,
        *,
        base: Path,
        merged: tuple[Params, Any] | None = None,
        dispatch: contextlib.AbstractContextManager[Any] = _ALONE,
    ) -> None:
        self._config, self._scale, self._base, self._merged, self._dispatch = config, adapter.scale, base, merged, dispatch
        self._pairs: dict[Path | None, dict[str, np.ndarray]] = {None: _host(adapter.pairs)}
        self._tree = lora.spec_of(config, adapter.pairs)
        self._specs = {_PREFIX + name: leaf for name, leaf in _named(self._tree).items()}

    @property
    def kind(self) -> Literal["adapter", "model"]:
        return "adapter" if self._merged is None else "model"

    def check(self, name: str, array: Any) -> None:
        _refuse(self._specs, name, array)

    def write(self, folder: Path, leaves: Mapping[str, Any], *, last: Path | None, checksum: int | None) -> None:
        came = {name: on_host(leaf) for name, leaf in leaves.items()}
        _compare(came, checksum, "came")
        before = self._pairs.get(last, self._pairs[None])
        pairs = before | {name.removeprefix(_PREFIX): leaf for name, leaf in came.items()}
        self._pairs = {None: self._pairs[None], last: before, folder: pairs}
        adapter = Adapter(_filled(self._tree, pairs), self._scale)
        if self._merged is None:
            weights.save_adapter(folder, self._config, adapter, base=str(self._base.absolute()))
            read = _host(weights.load_adapter(folder, self._config).pairs)
            _compare(read, _checksum(pairs), f"stands in {folder}")
            return
        base, dtype = self._merged
        with self._dispatch:
            params = jax.block_until_ready(lora.merge(base, adapter))
        weights.save(folder, self._config, jax.tree.map(on_host, params), like=self._base, dtype=dtype)


def _compare(leaves: Mapping[str, Any], checksum: int | None, what: str) -> None:
    if checksum is not None and (found := _checksum(leaves)) != checksum:
        raise RuntimeError(f"what {what} has the checksum {found} and was sent with {checksum}: the old weights stay")


def _checksum(leaves: Mapping[str, Any]) -> int:
    return checksum_of({name: jnp.asarray(leaf) for name, leaf in leaves.items()})


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their dotted paths, as engines are pushed them."""
    found = jax.tree.leaves_with_path(tree, is_leaf=_is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def _host(tree: Any) -> dict[str, np.ndarray]:
    return {name: on_host(leaf) for name, leaf in _named(tree).items()}


def _filled(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with the leaves of these names."""
    names = list(_named(tree))
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_spec), [leaves[name] for name in names])


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def _refuse(specs: Mapping[str, Any], name: str, array: Any) -> None:
    if name not in specs:
        raise ValueError(f"weights were pushed for {name!r}, which this model doesn't have; it has {', '.join(sorted(specs))}")
    if tuple(array.shape) != tuple(specs[name].shape):
        raise ValueError(f"weights for {name!r} have shape {tuple(array.shape)}, the model's have {tuple(specs[name].shape)}")


__all__ = ["AdapterFolders", "ModelFolders"]
