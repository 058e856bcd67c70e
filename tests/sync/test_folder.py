"""Folders of weights say what was pushed, whole, in the names that other programs read."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.schema import LoraConfig
from burnish.models import lora, weights
from burnish.models.model import Model
from burnish.sync.checksum import checksum
from burnish.sync.folder import AdapterFolders, ModelFolders
from burnish.testing.tiny import write_tiny_model
from burnish.train.state import leaf_names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return Model.load(folder)


def named(tree: Any, prefix: str = "") -> dict[str, jax.Array]:
    return {prefix + name: leaf for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def test_a_model(model: Model, tmp_path: Path) -> None:
    folders = ModelFolders(model.config, like=model.folder, dtype="float32")
    new = jax.tree.map(lambda leaf: leaf + 1, model.params)
    leaves = named(new)
    for name, leaf in leaves.items():
        folders.check(name, leaf)
    folders.write(tmp_path / "a", leaves, last=None, checksum=checksum(leaves))
    assert same(weights.load(tmp_path / "a")[1], new)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (model.folder / "tokenizer.json").read_bytes()

    folders.write(tmp_path / "b", {"final_norm": leaves["final_norm"] * 2}, last=tmp_path / "a", checksum=None)
    assert same(weights.load(tmp_path / "b")[1], new | {"final_norm": leaves["final_norm"] * 2})
    folders.write(tmp_path / "c", {"final_norm": leaves["final_norm"]}, last=None, checksum=None)
    assert same(weights.load(tmp_path / "c")[1], model.params | {"final_norm": leaves["final_norm"]})


@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter(model: Model, tmp_path: Path, merged: bool) -> None:
    first = lora.init_adapter(model.config, LoraConfig(rank=2, targets=("q", "down")), jax.random.key(0))
    folders = AdapterFolders(model.config, first, base=model.folder, merged=(model.params, "float32") if merged else None)
    assert folders.kind == ("model" if merged else "adapter")
    new = first._replace(pairs=jax.tree.map(lambda leaf: leaf + 0.5, first.pairs))
    leaves = named(new.pairs, "adapter.")
    folders.write(tmp_path / "a", leaves, last=None, checksum=checksum(leaves))
    half = {"adapter.q.b": leaves["adapter.q.b"] * 3}
    folders.write(tmp_path / "b", half, last=tmp_path / "a", checksum=checksum(half))
    tripled = new._replace(pairs=new.pairs | {"q": new.pairs["q"] | {"b": new.pairs["q"]["b"] * 3}})
    for folder, expected in (("a", new), ("b", tripled)):
        if merged:
            assert same(weights.load(tmp_path / folder)[1], lora.merge(model.params, expected))
        else:
            read = weights.load_adapter(tmp_path / folder, model.config)
            assert same(read.pairs, expected.pairs) and read.scale == expected.scale


def test_what_is_wrong_is_refused(model: Model, tmp_path: Path) -> None:
    folders = ModelFolders(model.config, like=model.folder, dtype="float32")
    with pytest.raises(ValueError, match="weights were pushed for 'layers.nose', which this model doesn't have; it has embed, final_norm"):
        folders.check("layers.nose", np.zeros(3))
    with pytest.raises(ValueError, match=r"weights for 'final_norm' have shape \(3,\), the model's have \(\d+,\)"):
        folders.check("final_norm", np.zeros(3))
    leaves = named(model.params)
    with pytest.raises(RuntimeError, match="what came has the checksum .* and was sent with 5: the old weights stay"):
        folders.write(tmp_path / "a", leaves, last=None, checksum=5)


def test_an_adapter_that_was_written_wrong_is_noticed(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk or a bad one would: what stands in the folder is read back."""
    adapter = lora.init_adapter(model.config, LoraConfig(rank=2), jax.random.key(0))
    folders = AdapterFolders(model.config, adapter, base=model.folder)
    write = weights.save_adapter

    def spoiled(folder: Path, config: Any, found: Any, *, base: str) -> None:
        write(folder, config, found._replace(pairs=jax.tree.map(lambda leaf: leaf + 1, found.pairs)), base=base)

    monkeypatch.setattr(weights, "save_adapter", spoiled)
    leaves = named(jax.tree.map(jnp.ones_like, adapter.pairs), "adapter.")
    with pytest.raises(RuntimeError, match="what stands in .* has the checksum"):
        folders.write(tmp_path / "a", leaves, last=None, checksum=checksum(leaves))
