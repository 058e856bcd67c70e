"""What a decoder is, as values. Owns the architecture record; reading it from a Hugging Face `config.json` is `families.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Precision = Literal["f32", "bf16"]
"""Products in float32, or of bfloat16 operands with float32 results."""
RopeKind = Literal["none", "linear", "llama3", "yarn"]
"""How rotary frequencies are stretched beyond the trained length."""
Activation = Literal["silu", "gelu_tanh"]
"""What the MLP's gate goes through; `gelu_tanh` is GELU by its tanh formula."""
QkNorm = Literal["head", "whole"]
"""Queries and keys are normalised: each head on its own, or the whole projection before it is cut into heads."""
Norms = Literal["before", "around", "after"]
"""Where a layer's norms stand: before attention and MLP, before and after them, or after them only (on what they add)."""


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
class LayerKind:
    """How a layer differs from its neighbours.

    window: a query sees keys less than so many positions back, its own included; None: all before it. second_rope: it rotates by the
    model's `second_rope` in place of `rope`.
    """

    window: int | None = None
    second_rope: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts in place of a layer's MLP. per_token: how many a token goes through. normalised: their weights are made to sum to 1.
    balance: factor on the loss that balances their load (`train.balance`), where a recipe names none."""

    num_experts: int
    per_token: int
    normalised: bool
    balance: float = 0.001


class OtherDecoder(Protocol):
    """A decoder that isn't `transformer`'s, by what training and scoring ask of one. Equal only to itself.

    spec: declarations of its parameters (`transformer.ParamSpec`), a tree like theirs. hidden: normalised states, float32[B, T, D], of
    packed rows: tokens and positions int32[B, T], `attention.Visibility`. head: [V, D], whose products with them are the logits.
    """

    @property
    def spec(self) -> dict[str, Any]: ...

    def hidden(self, params: dict[str, Any], tokens: Any, positions: Any, visibility: Any) -> Any: ...

    def head(self, params: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama line. Widths in elements, `max_positions` in tokens.

    layer_kinds: one a layer, or () where all are plain. second_rope: of the layers that say so; None: those aren't rotated at all.
    unit_offset: norms multiply by 1 + w. scaled_embedding: embeddings are multiplied by sqrt(width). attention_scale: factor on q·k, None
    is 1 / sqrt(head_dim). attention_cap, logit_cap: scores, or logits, become cap · tanh(x / cap). moe: then `mlp_width` is an expert's.
    decoder: what computes in place of the decoder that all the rest describes, whose sizes then only say how work is spread.
    """

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
    qk_norm: QkNorm | None = None
    tied_head: bool = False
    max_positions: int = 2048
    layer_kinds: tuple[LayerKind, ...] = ()
    second_rope: RopeConfig | None = None
    activation: Activation = "silu"
    norms: Norms = "before"
    unit_offset: bool = False
    scaled_embedding: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    moe: MoeConfig | None = None
    decoder: OtherDecoder | None = None

    def __post_init__(self) -> None:
        if self.layer_kinds and len(self.layer_kinds) != self.num_layers:
            raise ValueError(f"layer_kinds has {len(self.layer_kinds)} entries for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.moe and not 0 < self.moe.per_token <= self.moe.num_experts:
            raise ValueError(f"a token can't go through {self.moe.per_token} of {self.moe.num_experts} experts")

    @property
    def windowed(self) -> bool:
        """Whether some layer doesn't see all that stands before a token."""
        return any(kind.window is not None for kind in self.layer_kinds)

    @property
    def two_ropes(self) -> bool:
        """Whether layers don't all rotate alike."""
        return any(kind.second_rope for kind in self.layer_kinds)

    @property
    def pairs_per_token(self) -> float:
        """Pairs of query and key whose attention costs as much as a token's products with the matrices of a layer: where work is spread."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = 3 * self.width * self.mlp_width * (self.moe.per_token if self.moe else 1)
        return (2 * self.width * (heads + kv_heads) + mlp) / (2 * heads)
