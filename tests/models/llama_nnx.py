"""The llama of `testing.tiny` as a user of Flax might write it, and the way of weights from one to the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from burnish.models.config import ModelConfig
from burnish.models.model import Model
from burnish.models.nnx import from_nnx
from burnish.models.rope import rope_angles, rotate
from burnish.models.transformer import Params

NORMS = ("attn_norm", "mlp_norm")


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, heads, kv_heads = config.width, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.config = config
        self.q, self.k, self.v, self.o = linear(width, heads), linear(width, kv_heads), linear(width, kv_heads), linear(heads, width)
        self.gate, self.up = linear(width, config.mlp_width), linear(width, config.mlp_width)
        self.down = linear(config.mlp_width, width)
        self.attn_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs)

    def __call__(self, x: Array, positions: Array, mask: Array) -> Array:
        config, inner, angles = self.config, self.attn_norm(x), rope_angles(self.config, positions)
        q = rotate(self.q(inner).reshape(*x.shape[:2], config.num_heads, config.head_dim), *angles)
        k = rotate(self.k(inner).reshape(*x.shape[:2], config.num_kv_heads, config.head_dim), *angles)
        v = self.v(inner).reshape(k.shape)
        k, v = (jnp.repeat(part, config.num_heads // config.num_kv_heads, axis=2) for part in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * config.head_dim**-0.5
        shares = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        x = x + self.o(jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*x.shape[:2], -1))
        inner = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(inner)) * self.up(inner))


class Llama(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs)

    def __call__(self, tokens: Array, positions: Array, mask: Array) -> Array:
        """The hidden states whose products with the embedding are the logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x)


def llama(config: ModelConfig, text: Path, *, max_positions: int = 512) -> Model:
    """With random weights, as the adapter has it."""
    module = Llama(config, nnx.Rngs(0))
    return from_nnx(module, text, hidden=Llama.__call__, head=lambda m: m.embed.embedding[...], max_positions=max_positions)


def as_nnx(params: Params) -> Params:
    """The leaves of a native llama by the module's names."""
    flat: dict[str, Any] = {"embed.embedding": params["embed"], "norm.scale": params["final_norm"]}
    for name, stacked in params["layers"].items():
        leaf = "scale" if name in NORMS else "kernel"
        flat |= {f"layers.{i}.{name}.{leaf}": layer for i, layer in enumerate(stacked)}
    return flat
