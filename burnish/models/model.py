"""A model as a user holds it: architecture, weights, tokenizer and chat template of one folder.

Owns the bundle and the choice of precision for the hardware at hand; each part is read by its own room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from burnish.config.schema import LoraConfig
from burnish.models import weights
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.lora import check_adaptable
from burnish.models.quant import quantised, quantised_spec
from burnish.models.sharding import shardings
from burnish.models.transformer import Params, Precision, spec
from burnish.text.codec import Codec

_FAST_BF16_CPU_FLAG = "amx_bf16"


@dataclass(frozen=True)
class Model:
    """A decoder and its text side. `folder` is where it came from: exports copy its tokenizer files."""

    config: ModelConfig
    params: Params
    codec: Codec
    folder: Path

    @classmethod
    def load(cls, path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None, mesh: Mesh | None = None) -> Model:
        """Read a Hugging Face folder, a fetched name or a hub id (`models.locate`): float32 masters, on `mesh` if one is given.

        The text side is read first, so that a broken folder fails before its weights are.
        """
        folder = locate(str(path))
        codec = Codec.load(folder, template_kwargs=template_kwargs)
        config, params = weights.load(folder, mesh=mesh)
        return cls(config, params, codec, folder)


def frozen_base(model: Model, lora: LoraConfig, mesh: Mesh | None) -> Params:
    """The model's parameters as they are kept beside an adapter: where they lie, in the bits that the options say."""
    check_adaptable(model.config)
    places = None if mesh is None else shardings(quantised_spec(spec(model.config), lora.quantize), mesh)
    return quantised(model.params, lora.quantize, places)


def resolve_precision(choice: Literal["auto", "f32", "bf16"]) -> Precision:
    """`auto`: bf16 products where the hardware has units for them, else float32, which is then both faster and exact.

    Measured without such units (Ice Lake, 2 cores): float32 126-152 GFLOP/s, bf16 operands 94-111.
    """
    if choice != "auto":
        return choice
    if jax.default_backend() != "cpu":
        return "bf16"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "f32"
    return "bf16" if _FAST_BF16_CPU_FLAG in flags.split() else "f32"
