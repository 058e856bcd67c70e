"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): a second, separate tree beside a frozen base.

Owns an adapter's declaration, its start, its merging into the base and its description in PEFT's terms; rank-stabilised scales (rsLoRA) and
learned sizes of columns (DoRA) with it. Applying it is `transformer.project`, a base in few bits `quant.py`; PEFT folders are read and
written by `weights.py`. Because the tree is separate, the optimizer, the checkpoint and a weight push see the adapter alone, and the base
without it is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from burnish.config.errors import UserError
from burnish.config.schema import LoraConfig
from burnish.models import families
from burnish.models.config import ModelConfig
from burnish.models.quant import Quantised, dense
from burnish.models.transformer import Adapter, Params, ParamSpec, column_gain, draw, spec


def adapter_spec(config: ModelConfig, *, rank: int, targets: Sequence[str], dora: bool = False) -> Params:
    """Shape, axes and initialiser of every leaf: `a` [L, in, r] starts random, `b` [L, r, out] at zero: a fresh adapter changes nothing.

    dora: with the columns' sizes, `m` [L, out], which start as the base's.
    """
    check_adaptable(config)
    matrices = spec(config)["layers"]
    of_experts = [name for name in targets if matrices[name].axes[1] == "experts"]
    if of_experts:
        left = [name for name in families.MODULES if name not in of_experts]
        raise UserError(
            f"model.lora.targets has {', '.join(of_experts)}, which are experts in {config.family}; choose from {', '.join(left)}"
        )

    def pair(base: ParamSpec) -> Params:
        layers, rows, columns = base.shape
        _, row_axis, column_axis = base.axes
        leaves = {
            "a": ParamSpec((layers, rows, rank), ("layers", row_axis, "rank"), scale=1.0 / math.sqrt(3 * rows)),
            "b": ParamSpec((layers, rank, columns), ("layers", "rank", column_axis), "zeros"),
        }
        return leaves | ({"m": ParamSpec((layers, columns), ("layers", column_axis), "ones")} if dora else {})

    return {name: pair(matrices[name]) for name in targets}


def check_adaptable(config: ModelConfig) -> None:
    """Raises UserError for a decoder whose matrices aren't known here."""
    if config.decoder is not None:
        raise UserError(f"model.lora is set, but adapters are for the decoders of this package, not for {config.family}: leave it out")


def spec_of(config: ModelConfig, pairs: Params) -> Params:
    """The declaration of an adapter that is there."""
    first = next(iter(pairs.values()))
    return adapter_spec(config, rank=first["a"].shape[-1], targets=tuple(pairs), dora="m" in first)


def spec_from(config: ModelConfig, lora: LoraConfig) -> Params:
    """The declaration of the adapter that options describe."""
    return adapter_spec(config, rank=lora.rank, targets=lora.targets, dora=lora.dora)


def init_adapter(config: ModelConfig, lora: LoraConfig, key: Array, params: Params | None = None) -> Adapter:
    """A fresh adapter in float32. params: the base, whose columns' sizes DoRA starts from. Raises ValueError where that needs them."""
    pairs = draw(spec_from(config, lora), key)
    if lora.dora:
        if params is None:
            raise ValueError("DoRA starts from the sizes of the base's columns: give the base's params")
        pairs = {name: pair | {"m": _column_sizes(params["layers"][name])} for name, pair in pairs.items()}
    return Adapter(pairs, lora.scale)


@jax.jit
def _column_sizes(base: Array | Quantised) -> Array:
    return jnp.linalg.norm(dense(base).astype(jnp.float32), axis=-2)


def merge(params: Params, adapter: Adapter) -> Params:
    """The base with the adapter in its matrices, in the base's dtype (float32 where it is quantised); its own arrays stay as they are."""
    layers = params["layers"]
    merged = {name: merged_matrix(layers[name], pair, adapter.scale) for name, pair in adapter.pairs.items()}
    return params | {"layers": layers | merged}


def merged_matrix(base: Array | Quantised, pair: Params, scale: float) -> Array:
    """`base + scale * a @ b`, its columns of the sizes `m` where DoRA learned them; computed in float32."""
    pair = jax.tree.map(lambda x: x.astype(jnp.float32), pair)
    matrix = dense(base)
    full = matrix.astype(jnp.float32) + scale * jnp.matmul(pair["a"], pair["b"], preferred_element_type=jnp.float32)
    if "m" in pair:
        full = full * column_gain(matrix, pair, scale)[..., None, :]
    return full.astype(matrix.dtype)


# ----------------------------------------------------------------------------------------------------------------- PEFT adapters

_PEFT_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
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
    """What an `adapter_config.json` says: rank, the factor on the update, which matrices have an adapter, and whether it is DoRA's."""

    rank: int
    scale: float
    targets: tuple[str, ...]
    dora: bool


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
    ordered = tuple(name for name in families.MODULES if name in targets)
    return AdapterDescription(raw["r"], raw["lora_alpha"] / divisor, ordered, bool(raw.get("use_dora")))


def write_adapter_config(
    adapter: Adapter, *, base: str, rslora: bool = False, dropout: float = 0.0, task: str = "CAUSAL_LM"
) -> dict[str, Any]:
    """An adapter's `adapter_config.json`. rslora: its scale is alpha / √rank. task: PEFT's name for what the base is."""
    first, targets = next(iter(adapter.pairs.values())), tuple(adapter.pairs)
    rank = first["a"].shape[-1]
    return _PEFT_PLAIN | {
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapter.scale * (math.sqrt(rank) if rslora else rank),
        "use_rslora": rslora,
        "use_dora": "m" in first,
        "lora_dropout": dropout,
        "target_modules": [families.MODULES[name].rsplit(".", 1)[-1] for name in targets],
        "inference_mode": True,
    }


def adapter_tensor_name(path: tuple[str, ...], layer: int) -> str:
    """The tensor of one layer's slice of `("q", "a")`, `("q", "b")` or `("q", "m")`."""
    name, part = path
    suffix = "lora_magnitude_vector" if part == "m" else f"lora_{part.upper()}.weight"
    return f"base_model.model.model.layers.{layer}.{families.MODULES[name]}.{suffix}"
