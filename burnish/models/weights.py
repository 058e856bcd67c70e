"""Model folders of Hugging Face (language models, sequence classifiers) and adapter folders of PEFT: reading and writing.

Owns what such a folder holds and the order in which it is written; the meaning of `config.json` and the names of tensors are `families.py`,
the tensors themselves `tensors.py`. Called by the cluster, by commands, and by the trainer when a run ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from burnish.config.errors import MissingFile, UserError
from burnish.config.schema import LoraConfig
from burnish.models import families, lora, scalar_head, tensors
from burnish.models.config import ModelConfig
from burnish.models.families import UnsupportedModel
from burnish.models.sharding import check_mesh
from burnish.models.transformer import Adapter, Params, spec

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TEXT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(folder: str | Path) -> ModelConfig:
    """The architecture of a model folder. Opens no weights, so that a mistake shows at once."""
    path = Path(folder) / "config.json"
    return families.read_config(_read_json(path), where=str(path))


def load(folder: str | Path, *, dtype: Any | None = jnp.float32, mesh: Mesh | None = None) -> tuple[ModelConfig, Params]:
    """Architecture and parameters of a model folder.

    Leaves arrive one after another, converted to `dtype` (None: the one that the folder declares), on the default device or in pieces on
    `mesh`. Raises `MissingFile` for absent files, `UnsupportedModel` for a config and `BadWeights` for tensors that don't fit.
    """
    folder = Path(folder)
    config = load_config(folder)
    if mesh is not None:
        check_mesh(config, mesh)
    target = families.stored_dtype(_read_json(folder / "config.json")) if dtype is None else dtype
    tree = tensors.leaves(spec(config), families.tensor_names(config))
    with ExitStack() as stack:
        files = tensors.TensorFiles(_weight_files(folder), stack)
        files.check(tree, folder, ignored=lambda name: families.is_derived(name) or _repeats_embedding(config, name, files))
        return config, tensors.place(tree, files, target, mesh)


def save(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    like: str | Path | None = None,
    dtype: Any | None = None,
    shard_bytes: int = 2 << 30,
) -> None:
    """Write a model folder that transformers, and `load`, can read.

    like: a model folder whose tokenizer, chat template and generation settings are copied. dtype: of the stored weights, None keeps theirs.
    `config.json` is written last: a folder without it isn't a model.
    """
    if config.decoder is not None:
        raise UserError(f"{config.family} has no form of Hugging Face's: take what was trained from the state (docs/models.md)")
    stored = jnp.dtype(dtype if dtype is not None else params["embed"].dtype)
    tree = tensors.leaves(spec(config), families.tensor_names(config))
    _write_model(Path(folder), tree, params, families.write_config(config, dtype=stored.name), like=like, shard_bytes=shard_bytes)


def load_scalar(
    folder: str | Path, *, dtype: Any | None = jnp.float32, mesh: Mesh | None = None, zero_head: bool = False
) -> tuple[ModelConfig, Params]:
    """Architecture and parameters (`scalar_head.spec`) of a sequence classifier with one label.

    zero_head: a language model's folder is taken too; its own head stays unread and the score starts at zero. Raises as `load` does, and
    `UnsupportedModel` for another number of labels and, without `zero_head`, for a language model.
    """
    folder = Path(folder)
    with ExitStack() as stack:
        config, tree, files = _open_scalar(folder, stack, zero_head=zero_head)
        if mesh is not None:
            check_mesh(config, mesh)
        target = families.stored_dtype(_read_json(folder / "config.json")) if dtype is None else dtype
        params = tensors.place(tree, files, target, mesh)
    return config, params if "score" in params else scalar_head.with_zero_score(config, params["decoder"], mesh=mesh)


def load_scalar_config(folder: str | Path, *, zero_head: bool = False) -> ModelConfig:
    """The architecture, with every mistake that `load_scalar` would find in the folder's names and shapes; reads no numbers."""
    with ExitStack() as stack:
        return _open_scalar(Path(folder), stack, zero_head=zero_head)[0]


def save_scalar(
    folder: str | Path, config: ModelConfig, params: Params, *, like: str | Path | None = None, dtype: Any | None = None
) -> None:
    """Write a decoder with a scalar head as a sequence classifier that transformers, and `load_scalar`, can read; options as for `save`."""
    stored = jnp.dtype(dtype if dtype is not None else params["score"].dtype)
    tree = tensors.leaves(scalar_head.spec(config), families.classifier_tensor_names(config))
    _write_model(Path(folder), tree, params, families.write_config(config, dtype=stored.name, classifier=True), like=like)


def load_adapter(folder: str | Path, config: ModelConfig, *, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Adapter:
    """A PEFT adapter folder, as an adapter of `config`'s layers. Its `scale` is alpha / rank (alpha / sqrt(rank) with `use_rslora`)."""
    folder = Path(folder)
    described = lora.read_adapter_config(_read_json(folder / "adapter_config.json"), where=str(folder / "adapter_config.json"))
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise MissingFile(f"{path} doesn't exist; an adapter folder holds it beside adapter_config.json")
    specs = lora.adapter_spec(config, rank=described.rank, targets=described.targets, dora=described.dora)
    tree = tensors.leaves(specs, lora.adapter_tensor_name)
    with ExitStack() as stack:
        files = tensors.TensorFiles([path], stack)
        files.check(tree, folder, ignored=lambda _: False)
        return Adapter(tensors.place(tree, files, dtype, mesh), described.scale)


def first_adapter(config: ModelConfig, options: LoraConfig, key: Array, params: Params) -> Adapter:
    """What an adapter's training starts from: the folder at `options.path`, else a fresh one. params: of the base. Raises UserError where
    the folder's isn't what `options` says."""
    if options.path is None:
        return lora.init_adapter(config, options, key, params)
    adapter = load_adapter(options.path, config)
    first = next(iter(adapter.pairs.values()))
    compared = {
        "rank": (first["a"].shape[-1], options.rank),
        "targets": (sorted(adapter.pairs), sorted(options.targets)),
        "dora": ("m" in first, options.dora),
        f"alpha / {'√rank' if options.rslora else 'rank'}": (adapter.scale, options.scale),
    }
    differences = [f"{name} is {there} there, {here} here" for name, (there, here) in compared.items() if there != here]
    if differences:
        raise UserError(f"model.lora.path: the adapter in {options.path} isn't the one that model.lora says: {'; '.join(differences)}")
    return adapter


def save_adapter(folder: str | Path, config: ModelConfig, adapter: Adapter, *, base: str = "", options: LoraConfig | None = None) -> None:
    """Write an adapter folder that PEFT, and `load_adapter`, can read. base: the path or name of the model it belongs to. options: what
    it was made by, for what the numbers alone don't say."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tree = tensors.leaves(lora.spec_of(config, adapter.pairs), lora.adapter_tensor_name)
    (folder / "adapter_config.json").unlink(missing_ok=True)
    tensors.write(folder, "adapter_model", tree, adapter.pairs, dtype=None, shard_bytes=1 << 62)
    told = {} if options is None else {"rslora": options.rslora, "dropout": options.dropout}
    _write_json(folder / "adapter_config.json", lora.write_adapter_config(adapter, base=base, **told))


def copy_adapter(source: str | Path, target: str | Path, config: ModelConfig, *, base: str) -> None:
    """The same adapter in another folder, under another name of its base. Raises as `load_adapter` does where it doesn't fit `config`."""
    source, target = Path(source), Path(target)
    load_adapter(source, config)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "adapter_model.safetensors", target / "adapter_model.safetensors")
    _write_json(target / "adapter_config.json", _read_json(source / "adapter_config.json") | {"base_model_name_or_path": base})


def _open_scalar(folder: Path, stack: ExitStack, *, zero_head: bool) -> tuple[ModelConfig, Any, tensors.TensorFiles]:
    """The architecture, the leaves that the folder fills (without the score, where it has none to give) and its files, checked."""
    path = folder / "config.json"
    raw = _read_json(path)
    scored = families.is_classifier(raw) or not zero_head
    config = families.read_config(raw, where=str(path), classifier=scored)
    files = tensors.TensorFiles(_weight_files(folder), stack)
    if scored and families.SCORE in files.names and len(shape := files.shape(families.SCORE)) == 2 and shape[0] != 1:
        raise UnsupportedModel(
            f"{folder} tells {shape[0]} labels apart ({families.SCORE} {list(shape)}); a critic or a reward model gives one number: "
            "train it with num_labels=1"
        )
    specs = scalar_head.spec(config) if scored else {"decoder": scalar_head.spec(config)["decoder"]}
    tree = tensors.leaves(specs, families.classifier_tensor_names(config))
    unread = set() if scored else {families.TOP["head"]}
    files.check(tree, folder, ignored=lambda name: families.is_derived(name) or name in unread)
    return config, tree, files


def _write_model(
    folder: Path, tree: Any, params: Params, raw: dict[str, Any], *, like: str | Path | None, shard_bytes: int = 2 << 30
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "config.json", folder / tensors.INDEX_FILE, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    tensors.write(folder, "model", tree, params, dtype=raw["dtype"], shard_bytes=shard_bytes)
    if like is not None:
        raw |= _copy_text_files(Path(like), folder)
    _write_json(folder / "config.json", raw)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; an index that names an absent file is an error here, before anything is computed."""
    index, single = folder / tensors.INDEX_FILE, folder / "model.safetensors"
    if index.is_file():
        named = _read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) and Path(name).name == name for name in named.values()):
            raise UserError(f"{index} must have a weight_map from tensors to files of its own folder")
        files = [folder / name for name in sorted(set(named.values()))]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise MissingFile(f"{index} names files that aren't there: {', '.join(absent)}; fetch the folder again")
        return files
    if not single.is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; it holds {', '.join(others)}: convert them to safetensors" if others else ""
        raise MissingFile(f"{folder} holds neither {single.name} nor {index.name}{hint}")
    return [single]


def _repeats_embedding(config: ModelConfig, name: str, files: tensors.TensorFiles) -> bool:
    """Whether a tensor is the head of a tied model, stored once more. One with other numbers isn't, and is reported as unknown."""
    head, embed = families.TOP["head"], families.TOP["embed"]
    return config.tied_head and name == head and embed in files.names and np.array_equal(files.tensor(head), files.tensor(embed))


def _copy_text_files(source: Path, target: Path) -> dict[str, Any]:
    """Copy what belongs to the tokenizer, and the licence; returns the keys of special tokens that stand in the source's `config.json`."""
    for name in (*_TEXT_FILES, *(path.name for path in source.glob("LICENSE*"))):
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    config = source / "config.json"
    raw = _read_json(config) if config.is_file() else {}
    return {key: raw[key] for key in _TEXT_KEYS if key in raw}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFile(f"{path} doesn't exist; give a folder that holds {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} isn't valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
