"""A trained model from where people look for it: a run's folder, a model folder, a fetched name.

Owns only this lookup; `eval` and `chat` call it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from burnish.config.errors import UserError
from burnish.models.lora import merge
from burnish.models.model import Model
from burnish.models.weights import load_adapter


def load_result(path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None, mesh: Mesh | None = None) -> Model:
    """The model that `path` means; of a run's folder what the run made: `model/`, or `adapter/` merged into its base."""
    folder = Path(path)
    if (folder / "model").is_dir():
        return Model.load(folder / "model", template_kwargs=template_kwargs, mesh=mesh)
    if (folder / "adapter").is_dir():
        described = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        base = Model.load(described["base_model_name_or_path"], template_kwargs=template_kwargs, mesh=mesh)
        return dataclasses.replace(base, params=merge(base.params, load_adapter(folder / "adapter", base.config, mesh=mesh)))
    if is_run(folder):
        raise UserError(f"the run in {folder} has no adapter/ or model/ yet: it hasn't finished; its status.json says how it stands")
    return Model.load(path, template_kwargs=template_kwargs, mesh=mesh)


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder rather than a model's."""
    return (folder / "status.json").is_file()
