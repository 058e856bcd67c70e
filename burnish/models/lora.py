"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): a second, separate tree beside a frozen base.

Owns an adapter's declaration, its start, its merging into the base and its description in PEFT's terms. Applying it is
`transformer.project`; PEFT folders are read and written by `weights.py`. Because the tree is separate, the optimizer, the checkpoint and a
weight push see the adapter alone, and the base without it is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from burnish.config.schema import LoraConfig
from burnish.models import families
from burnish.models.config import ModelConfig
from burnish.models.transformer import Adapter, Params, ParamSpec, draw, spec


def adapter_spec(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> Params:
    """Shape, axes and initialiser of every leaf: `a` [L, in, r] starts random, `b` [L, r, out] at zero: a fresh adapter changes nothing."""
    matrices = spec(config)["layers"]

    def pair(base: ParamSpec) -> Params:
        layers, rows, columns = base.shape
        _, row_axis, column_axis = base.axes
        return {
            "a": ParamSpec((layers, rows, rank), ("layers", row_axis, "rank"), scale=1.0 / math.sqrt(3 * rows)),
            "b": ParamSpec((layers, rank, columns), ("layers", "rank", column_axis), "zeros"),
        }

    return {name: pair(matrices[name]) for name in targets}


def init_adapter(config: ModelConfig, lora: LoraConfig, key: Array) -> Adapter:
    """A fresh adapter in float32."""
    return Adapter(draw(adapter_spec(config, rank=lora.rank, targets=lora.targets), key), lora.alpha / lora.rank)


def merge(params: Params, adapter: Adapter) -> Params:
    """The base with the adapter added into its matrices (in float32, then in the base's dtype); the base's arrays stay as they are."""

    def merged(name: str, base: Array) -> Array:
        pair = adapter.pairs[name]
        update = jnp.einsum("lir,lro->lio", pair["a"].astype(jnp.float32), pair["b"].astype(jnp.float32))
        return (base.astype(jnp.float32) + update * adapter.scale).astype(base.dtype)

    layers = params["layers"]
    return params | {"layers": layers | {name: merged(name, layers[name]) for name in adapter.pairs}}


# ----------------------------------------------------------------------------------------------------------------- PEFT adapters

_PEFT_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Options that change what an adapter computes, and the value with which it is the plain one."""


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What an `adapter_config.json` says: rank, the factor on the update, and which matrices have an adapter."""

    rank: int
    scale: float
    targets: tuple[str, ...]


def read_adapter_config(raw: Mapping[str, Any], *, where: str) -> AdapterDescription:
    """The adapter that a parsed `adapter_config.json` describes; `families.UnsupportedModel` names all that can't be honoured."""
    problems = [f"the key {key!r} is missing" for key in ("r", "lora_alpha", "target_modules") if not raw.get(key)]
    given = {key: raw.get(key) or plain for key, plain in _PEFT_PLAIN.items()}
    problems += [f"{key} is {given[key]!r}; only {plain!r} is supported" for key, plain in _PEFT_PLAIN.items() if given[key] != plain]
    ours = {module.rsplit(".", 1)[-1]: name for name, module in families.MODULES.items()}
    modules = raw.get("target_modules") or ()
    if isinstance(modules, str):
        problems.append(f"target_modules is the pattern {modules!r}; list the modules instead")
        modules = ()
    unknown = sorted(module for module in modules if module.rsplit(".", 1)[-1] not in ours)
    if unknown:
        problems.append(f"target_modules has {', '.join(unknown)}; supported: {', '.join(ours)}")
    if problems:
        raise families.UnsupportedModel(f"{where} can't be used:" + "".join(f"\n  - {problem}" for problem in problems))
    targets = {ours[module.rsplit(".", 1)[-1]] for module in modules}
    divisor = math.sqrt(raw["r"]) if raw.get("use_rslora") else raw["r"]
    return AdapterDescription(raw["r"], raw["lora_alpha"] / divisor, tuple(name for name in families.MODULES if name in targets))


def write_adapter_config(rank: int, scale: float, targets: tuple[str, ...], *, base: str) -> dict[str, Any]:
    """The `adapter_config.json` of a plain LoRA adapter."""
    return _PEFT_PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": [families.MODULES[name].rsplit(".", 1)[-1] for name in targets],
        "inference_mode": True,
    }


def adapter_tensor_name(path: tuple[str, ...], layer: int) -> str:
    """The tensor of one layer's slice of `("q", "a")` or `("q", "b")`."""
    name, part = path
    return f"base_model.model.model.layers.{layer}.{families.MODULES[name]}.lora_{part.upper()}.weight"
