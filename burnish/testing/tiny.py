"""Models of a few kB for tests: a configuration of each family, and a whole model folder with a tokenizer.

Owns sizes and seeds only; the tokenizers are `byte_tokenizer.py`. Used by the tests of every room that needs a model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
from tokenizers import Tokenizer

from burnish.models import families, transformer, weights
from burnish.models.config import ModelConfig, RopeConfig
from burnish.testing.byte_tokenizer import make_byte_tokenizer, make_tiny_tokenizer


def tiny_config(family: str = "llama", *, vocab_size: int = 97, width: int = 32, num_layers: int = 2) -> ModelConfig:
    """A small model with everything that its family has: grouped heads, biases, q/k-norm, heads wider than their share of the width."""
    shape = families.FAMILIES[family]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=width // 2 if family == "qwen3" else width // 4,
        mlp_width=2 * width,
        rope=RopeConfig(10_000.0),
        qkv_bias=shape.qkv_bias,
        qk_norm=shape.qk_norm,
        tied_head=family != "qwen3",
        max_positions=512,
    )


def write_tiny_model(
    folder: str | Path, *, config: ModelConfig | None = None, seed: int = 0, scale: float = 1.0, alphabet: str | None = None
) -> ModelConfig:
    """Write a model folder with random weights and a tokenizer; returns its configuration.

    config: `tiny_config()` unless given; its vocabulary becomes the tokenizer's. scale: factor on the random matrices; with 1 the model is
    nearly indifferent to its input, with 5 it has opinions. alphabet: one id a character of it, instead of one a byte.
    """
    make_byte_tokenizer(folder) if alphabet is None else make_tiny_tokenizer(folder, alphabet)
    vocab_size = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).get_vocab_size()
    config = replace(config or tiny_config(), vocab_size=vocab_size)
    params = jax.tree.map(
        lambda s, x: x * scale if s.init == "normal" else x,
        transformer.spec(config),
        transformer.init(config, jax.random.key(seed)),
        is_leaf=lambda x: isinstance(x, transformer.ParamSpec),
    )
    weights.save(folder, config, params, like=folder)
    return config
