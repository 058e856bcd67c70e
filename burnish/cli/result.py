"""A trained model from where people look for it: a run's folder, a model folder, a fetched name.

Owns only this lookup; `eval`, `chat` and `export` call it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from burnish.config import documents
from burnish.config.errors import UserError
from burnish.models.config import ModelConfig
from burnish.models.lora import merge
from burnish.models.model import Model
from burnish.models.quant import Code, opened, quantised
from burnish.models.transformer import Params
from burnish.models.weights import load_adapter


def load_result(path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None, mesh: Mesh | None = None) -> Model:
    """The model that `path` means; of a run's folder what the run made: `model/`, or `adapter/` merged into its base."""
    model, adapter = find_result(path)
    base = Model.load(model, template_kwargs=template_kwargs, mesh=mesh)
    if adapter is None:
        return base
    return dataclasses.replace(base, params=with_adapter(base.params, base.config, adapter, mesh=mesh))


def with_adapter(params: Params, config: ModelConfig, adapter: Path, *, mesh: Mesh | None = None) -> Params:
    """A run's base with the run's adapter merged into what it was trained beside: the base, or what few bits make of it."""
    return merge(opened(quantised(params, _code_of(adapter.parent))), load_adapter(adapter, config, mesh=mesh))


def find_result(path: str | Path) -> tuple[str | Path, Path | None]:
    """Where a model is, as `locate` takes it, and the folder of the adapter that belongs into it, if one does. Raises UserError for a run
    that has made neither."""
    folder = Path(path)
    if (folder / "model").is_dir():
        return folder / "model", None
    if (folder / "adapter").is_dir():
        described = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        return described["base_model_name_or_path"], folder / "adapter"
    if is_run(folder):
        raise UserError(f"the run in {folder} has no adapter/ or model/ yet: it hasn't finished; its status.json says how it stands")
    return path, None


def _code_of(run: Path) -> Code | None:
    """What the run's base was kept in."""
    kept = documents.read(run / "config.yaml").values if (run / "config.yaml").is_file() else {}
    return ((kept.get("model") or {}).get("lora") or {}).get("quantize")


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder rather than a model's."""
    return (folder / "status.json").is_file()
