"""What a decoder is, as values. Owns the architecture record; reading it from a Hugging Face `config.json` is `families.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["f32", "bf16"]
"""Products in float32, or of bfloat16 operands with float32 results."""
RopeKind = Literal["none", "linear", "llama3", "yarn"]
"""How rotary frequencies are stretched beyond the trained length."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base period and how it is stretched (`none`, `linear`, `llama3`, `yarn`).

    The fields mean what the keys of a Hugging Face `rope_scaling` of that type mean. `attention_factor` scales cos and sin (yarn; None
    lets the formula of the YaRN paper decide).
    """

    theta: float
    kind: RopeKind = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama line. Widths in elements, `max_positions` in tokens."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @property
    def pairs_per_token(self) -> float:
        """Pairs of query and key whose attention costs as much as a token's products with the matrices of a layer: where work is spread."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (2 * self.width * (heads + kv_heads) + 3 * self.width * self.mlp_width) / (2 * heads)
