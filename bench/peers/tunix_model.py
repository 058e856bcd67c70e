"""SmolLM2-135M as Tunix has it: its Llama 3 model with SmolLM2's sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def smollm2(path: str, setting: str) -> tuple[Any, jax.sharding.Mesh]:
    """The model of a folder in a setting's dtype, and the mesh of one device that it is on."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = llama.ModelConfig(
        num_layers=30,
        vocab_size=49152,
        embed_dim=576,
        hidden_dim=1536,
        num_heads=9,
        head_dim=64,
        num_kv_heads=3,
        rope_theta=100_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    with mesh:
        return llama_params.create_model_from_safe_tensors(path, config, mesh, dtype=DTYPES[setting]), mesh
