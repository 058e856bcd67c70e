"""Models of a few kB for tests: a configuration of each family, whole model folders, weights that other libraries can rebuild.

Owns sizes and seeds only; the tokenizers are `byte_tokenizer.py`. Used by the tests of every room that needs a model.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from burnish.models import families, scalar_head, tensors, transformer, weights
from burnish.models.config import LayerKind, ModelConfig, MoeConfig, RopeConfig
from burnish.testing.byte_tokenizer import make_byte_tokenizer, make_tiny_tokenizer


def tiny_config(family: str = "llama", *, vocab_size: int = 96, width: int = 32, num_layers: int = 2) -> ModelConfig:
    """A small model with everything that its family has: grouped heads, biases, norms, caps, experts, heads wider than their share of the
    width, a window of 5 positions in all layers or all but the last, a last layer that isn't rotated."""
    shape = families.FAMILIES[family]
    wide_heads = family in ("qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe")
    plain = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=width // 2 if wide_heads else width // 4,
        mlp_width=2 * width,
        rope=RopeConfig(10_000.0),
        qkv_bias=shape.qkv_bias,
        qk_norm=shape.qk_norm,
        tied_head=shape.absent.get("tie_word_embeddings", family in ("llama", "qwen2")),
        max_positions=512,
        layer_kinds=_tiny_kinds(family, num_layers),
        activation="gelu_tanh" if shape.gemma else "silu",
        norms=shape.norms,
        unit_offset=shape.gemma,
        scaled_embedding=shape.gemma,
    )
    special: dict[str, Any] = {
        "gemma2": {"attention_scale": 24.0**-0.5, "attention_cap": 5.0, "logit_cap": 8.0},
        "gemma3_text": {"attention_scale": 24.0**-0.5, "second_rope": RopeConfig(100.0)},
        "qwen3_moe": {"moe": MoeConfig(num_experts=4, per_token=2, normalised=True), "mlp_width": width},
        "mixtral": {"moe": MoeConfig(num_experts=4, per_token=2, normalised=True), "mlp_width": width},
    }
    return replace(plain, **special.get(family, {}))


def _tiny_kinds(family: str, num_layers: int) -> tuple[LayerKind, ...]:
    full = LayerKind()
    before_last, last = {
        "mistral": (LayerKind(window=5), LayerKind(window=5)),
        "phi3": (LayerKind(window=5), LayerKind(window=5)),
        "smollm3": (full, LayerKind(second_rope=True)),
        "gemma2": (LayerKind(window=5), full),
        "gemma3_text": (LayerKind(window=5, second_rope=True), full),
    }.get(family, (full, full))
    kinds = (before_last,) * (num_layers - 1) + (last,)
    return () if set(kinds) == {full} else kinds


def recipe_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor that is a function of its name and shape, in numpy's frozen legacy stream: two libraries build the same model from it."""
    noise = 0.2 * np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    return noise + 1 if name.endswith("norm.weight") else noise


def write_recipe_model(folder: str | Path, raw_config: Mapping[str, Any]) -> None:
    """Write the model of a `config.json` with `recipe_tensor` weights, by the names that Hugging Face gives them."""
    folder, classifier = Path(folder), families.is_classifier(raw_config)
    config = families.read_config(raw_config, classifier=classifier)
    specs, names = (scalar_head.spec, families.classifier_tensor_names) if classifier else (transformer.spec, families.tensor_names)
    tree = tensors.leaves(specs(config), names(config))
    values = {name: recipe_tensor(name, shape) for name, shape in tensors.file_shapes(tree).items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw_config), encoding="utf-8")


def write_tiny_model(
    folder: str | Path,
    *,
    config: ModelConfig | None = None,
    seed: int = 0,
    scale: float = 1.0,
    alphabet: str | None = None,
    classifier: bool = False,
) -> ModelConfig:
    """Write a model folder with random weights and a tokenizer; returns its configuration.

    config: `tiny_config()` unless given; its vocabulary becomes the tokenizer's. scale: factor on the random matrices; with 1 the model is
    nearly indifferent to its input, with 5 it has opinions. alphabet: one id a character of it, instead of one a byte.
    classifier: a sequence classifier with one label, whose scores vary by about 1, in place of a language model.
    """
    make_byte_tokenizer(folder) if alphabet is None else make_tiny_tokenizer(folder, alphabet)
    vocab_size = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).get_vocab_size()
    config = replace(config or tiny_config(), vocab_size=vocab_size)
    specs = scalar_head.spec(config) if classifier else transformer.spec(config)
    params = jax.tree.map(
        lambda s, x: x * scale if s.init == "normal" else x,
        specs,
        transformer.draw(specs, jax.random.key(seed)),
        is_leaf=lambda x: isinstance(x, transformer.ParamSpec),
    )
    if classifier:
        score = jax.random.normal(jax.random.key(seed + 1), params["score"].shape) / math.sqrt(config.width)
        weights.save_scalar(folder, config, params | {"score": score}, like=folder)
    else:
        weights.save(folder, config, params, like=folder)
    return config
