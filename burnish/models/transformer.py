"""One decoder for the Llama line, described by a `ModelConfig`: pure functions over a plain pytree of stacked arrays.

Owns the parameters' declaration (`spec`), their initialisation and the forward pass. Layers are stacked on axis 0 and scanned, so compile
time doesn't grow with depth. Attention is handed in: training passes segment-aware attention (`attention.py`), the native engine its cache.
Doesn't own: log-probs (`train.score` streams the head over chunks), files (`weights.py`), adapters' life (`lora.py`).

Axes: B rows, T tokens, D width, H/K query/key heads, h head_dim, F mlp width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.dtypes import float0
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from burnish.config.errors import UserError
from burnish.models.attention import KEPT, Visibility, attention
from burnish.models.config import ModelConfig, Precision
from burnish.models.moe import Load, Routing, expert_mlp, load_of
from burnish.models.quant import dense
from burnish.models.rope import Angles, rope_angles, rotate
from burnish.models.rows import keep_rows

Params = dict[str, Any]
Remat = bool | Literal["nested"]
"""How much a backward pass computes again: see `forward`."""

MLP_TOKENS = 1024
"""Tokens of a part of the MLP, where it goes in parts: its hidden arrays are several times as wide as the residual stream."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One leaf: its shape, the logical axis of each dimension, how it starts (`normal` has standard deviation `scale`).

    dtype: what it is kept in, whatever the other leaves are; None for theirs.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    scale: float = 0.02
    dtype: str | None = None


class Dropout(NamedTuple):
    """What an adapter doesn't read while training. tokens: a number for each token, the same wherever it lies: which positions go with
    it; key: of the step, in a layer of that too."""

    rate: float
    key: UInt32[Array, " words"]
    tokens: tuple[Int[Array, "*n"], Int[Array, "*n"]]


class Adapter(NamedTuple):
    """A low-rank update of some matrices of the layers: `x @ w + scale * (x @ a) @ b`.

    pairs: {"q": {"a": [L, in, r], "b": [L, r, out]}, …}; with "m" [L, out] the columns of `w + scale * a @ b` have these sizes in place
    of their own (DoRA). scale: a compile-time constant.
    """

    pairs: Params
    scale: float
    dropout: Dropout | None = None


def spec(config: ModelConfig) -> Params:
    """Shape, axes and initialiser of every leaf, as a tree like the parameters'."""
    if config.decoder is not None:
        return config.decoder.spec
    num_layers, width = config.num_layers, config.width
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out_scale = 0.02 / math.sqrt(2 * num_layers)

    def matrix(rows: int, columns: int, axes: tuple[str, str], scale: float = 0.02) -> ParamSpec:
        return ParamSpec((num_layers, rows, columns), ("layers", *axes), scale=scale)

    def vector(size: int, axis: str, init: Literal["ones", "zeros"]) -> ParamSpec:
        return ParamSpec((num_layers, size), ("layers", axis), init)

    def norm(size: int, axis: str) -> ParamSpec:
        return vector(size, axis, "zeros" if config.unit_offset else "ones")

    layers: Params = {
        "q": matrix(width, heads, ("embed", "heads")),
        "k": matrix(width, kv_heads, ("embed", "kv_heads")),
        "v": matrix(width, kv_heads, ("embed", "kv_heads")),
        "o": matrix(heads, width, ("heads", "embed"), out_scale),
    }
    if config.moe is None:
        layers |= {
            "gate": matrix(width, config.mlp_width, ("embed", "mlp")),
            "up": matrix(width, config.mlp_width, ("embed", "mlp")),
            "down": matrix(config.mlp_width, width, ("mlp", "embed"), out_scale),
        }
    else:
        layers |= _expert_specs(config, out_scale)
    if config.norms != "after":
        layers |= {"attn_norm": norm(width, "embed"), "mlp_norm": norm(width, "embed")}
    if config.norms != "before":
        layers |= {"attn_out_norm": norm(width, "embed"), "mlp_out_norm": norm(width, "embed")}
    if config.qkv_bias:
        layers |= {
            "q_bias": vector(heads, "heads", "zeros"),
            "k_bias": vector(kv_heads, "kv_heads", "zeros"),
            "v_bias": vector(kv_heads, "kv_heads", "zeros"),
        }
    if config.o_bias:
        layers["o_bias"] = vector(width, "embed", "zeros")
    if config.mlp_bias:
        layers |= {
            "gate_bias": vector(config.mlp_width, "mlp", "zeros"),
            "up_bias": vector(config.mlp_width, "mlp", "zeros"),
            "down_bias": vector(width, "embed", "zeros"),
        }
    if config.qk_norm == "head":
        layers |= {"q_norm": norm(config.head_dim, "head_dim"), "k_norm": norm(config.head_dim, "head_dim")}
    if config.qk_norm == "whole":
        layers |= {"q_norm": norm(heads, "heads"), "k_norm": norm(kv_heads, "kv_heads")}
    tree: Params = {
        "embed": ParamSpec((config.vocab_size, width), ("vocab", "embed")),
        "layers": layers,
        "final_norm": ParamSpec((width,), ("embed",), "zeros" if config.unit_offset else "ones"),
    }
    if not config.tied_head:
        tree["head"] = ParamSpec((config.vocab_size, width), ("vocab", "embed"))
    return tree


def _expert_specs(config: ModelConfig, out_scale: float) -> Params:
    """The router and the experts' matrices. Experts are spread over the mesh, each whole but for its width's cut."""
    assert config.moe is not None
    num_layers, count, width, inner = config.num_layers, config.moe.num_experts, config.width, config.mlp_width

    def matrices(rows: int, columns: int, axes: tuple[str, str], scale: float = 0.02) -> ParamSpec:
        return ParamSpec((num_layers, count, rows, columns), ("layers", "experts", *axes), scale=scale)

    return {
        "router": ParamSpec((num_layers, width, count), ("layers", "embed", "choices")),
        "gate": matrices(width, inner, ("embed", "expert_mlp")),
        "up": matrices(width, inner, ("embed", "expert_mlp")),
        "down": matrices(inner, width, ("expert_mlp", "embed"), out_scale),
    }


def init(config: ModelConfig, key: Array, *, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters."""
    return draw(spec(config), key, dtype=dtype)


def draw(specs: Params, key: Array, *, dtype: DTypeLike = jnp.float32) -> Params:
    """The starting values of a declared tree. Each leaf's noise depends on its place in the tree only."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, ParamSpec))

    def leaf(index: int, s: ParamSpec) -> Array:
        if s.init == "normal":
            return (jax.random.normal(jax.random.fold_in(key, index), s.shape) * s.scale).astype(dtype)
        return jnp.full(s.shape, 1.0 if s.init == "ones" else 0.0, dtype)

    return jax.tree.unflatten(treedef, [leaf(i, s) for i, s in enumerate(leaves)])


def head_matrix(config: ModelConfig, params: Params) -> Float[Array, "V D"]:
    """The matrix whose product with a hidden state is the logits: the embedding where tied."""
    if config.decoder is not None:
        return config.decoder.head(params)
    return params["embed"] if config.tied_head else params["head"]


# ---------------------------------------------------------------------------------------------------------------- arithmetic


def dot(x: Float[Array, "*n i"], w: Float[Array, "i o"], precision: Precision) -> Float[Array, "*n o"]:
    """`x @ w` with a float32 result. At `bf16` both operands, and in the backward pass the cotangent, are rounded to bfloat16."""
    # Two dimensions: contracting over rows and tokens apart makes XLA transpose whole activations in the backward pass (20x slower on CPU).
    flat = x.reshape(-1, x.shape[-1])
    product = _dot_bf16(flat, w) if precision == "bf16" else _contract(flat, w.astype(jnp.float32), 1, 0)
    return product.reshape(*x.shape[:-1], w.shape[-1])


def _contract(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axis_a: int, axis_b: int) -> Float[Array, "_ _"]:
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _dot_bf16(x: Float[Array, "n i"], w: Float[Array, "i o"]) -> Float[Array, "n o"]:
    return _contract(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 1, 0)


def _dot_bf16_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot_bf16(x, w), (x, w)


def _dot_bf16_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Left to itself, autodiff multiplies a float32 cotangent by a bfloat16 weight, which leaves the fast units of most hardware idle.
    x, w = residuals
    x16, w16, g16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    return _contract(g16, w16, 1, 1).astype(x.dtype), _contract(x16, g16, 0, 0).astype(w.dtype)


_dot_bf16.defvjp(_dot_bf16_forward, _dot_bf16_backward)


def vocab_logits(hidden: Float[Array, "n D"], head: Float[Array, "V D"]) -> Float[Array, "n V"]:
    """`hidden @ head.T` with a float32 result, in the dtype that the head comes in.

    Where that is bfloat16, a hidden state goes in as the sum of two bfloat16 numbers, 16 bits of it: rounded to 8, it makes more of the
    difference between two passes' log-probs than any other product (docs/results.md). The pairs' halves stand in one matrix, so that the
    head is read once.
    """
    if head.dtype != jnp.bfloat16:
        return _contract(hidden, head, 1, 1)
    high = jax.lax.reduce_precision(hidden, exponent_bits=8, mantissa_bits=7)  # unlike a cast there and back, never simplified away
    halves = jnp.concatenate([high, hidden - high]).astype(jnp.bfloat16)
    of_high, of_low = jnp.split(_contract(halves, head, 1, 1), 2)
    return of_high + of_low


def rms_norm(x: Float[Array, "*n d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*n d"]:
    """x / rms(x) * weight over the last axis (Zhang & Sennrich, 2019, arXiv:1910.07467), in float32."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * _broadcast(weight, x.ndim)


def normed(config: ModelConfig, x: Float[Array, "*n d"], weight: Float[Array, " d"]) -> Float[Array, "*n d"]:
    """`rms_norm` as the model has it: by the weight, or by 1 + weight."""
    return rms_norm(x, weight.astype(jnp.float32) + 1.0 if config.unit_offset else weight, config.norm_eps)


def capped(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap), or x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def lm_logits(
    config: ModelConfig, x: Float[Array, "n D"], final_norm: Float[Array, " D"], head: Float[Array, "V D"]
) -> Float[Array, "n V"]:
    """From the residual stream after the last layer to logits."""
    return capped(vocab_logits(normed(config, x, final_norm), head), config.logit_cap)


def _broadcast(vector: Array, ndim: int) -> Array:
    return vector.reshape((1,) * (ndim - 1) + (-1,)).astype(jnp.float32)


# -------------------------------------------------------------------------------------------------------------------- layers


class LayerTraits(NamedTuple):
    """How a layer differs from its neighbours, as numbers, so that layers of all kinds are one program.

    window: a query sees keys less than so many positions back; `EVERYTHING` where all. second_rope: which angles rotate.
    """

    window: Array | np.ndarray
    second_rope: Array | np.ndarray


EVERYTHING = np.int32(2**30)


def layer_traits(config: ModelConfig) -> LayerTraits | None:
    """Of all layers, stacked; None where all are plain."""
    kinds = config.layer_kinds
    if not kinds:
        return None
    windows = [EVERYTHING if kind.window is None else kind.window for kind in kinds]
    return LayerTraits(np.asarray(windows, np.int32), np.asarray([kind.second_rope for kind in kinds]))


def traits_of(config: ModelConfig, index: int) -> LayerTraits | None:
    """Of one layer."""
    traits = layer_traits(config)
    return None if traits is None else LayerTraits(*(jnp.asarray(trait[index]) for trait in traits))


def own_attention(config: ModelConfig, traits: LayerTraits | None) -> dict[str, Any]:
    """What a layer's attention needs to know beyond q, k, v and who sees whom: keyword arguments of `attention` and of a cache's."""
    window = traits.window if traits is not None and config.windowed else None
    return {"window": window, "cap": config.attention_cap}


Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q [..., H, h], k [..., K, h], v [..., K, h]) → (mixed [..., H, h], whatever the caller keeps: its cache, or None)."""


def project(name: str, layer: Params, x: Float[Array, "*n i"], adapter: Adapter | None, precision: Precision) -> Float[Array, "*n o"]:
    """One named matrix of a layer with its bias and its adapter, where it has them."""
    matrix = dense(layer[name])
    y = dot(x, matrix, precision)
    if adapter is not None and name in adapter.pairs:
        pair = adapter.pairs[name]
        read = x if adapter.dropout is None else _dropped(x, adapter.dropout, sorted(adapter.pairs).index(name))
        y = y + dot(checkpoint_name(dot(read, pair["a"], precision), KEPT) * adapter.scale, pair["b"], precision)
        if "m" in pair:
            y = y * _broadcast(column_gain(matrix, pair, adapter.scale), y.ndim)
    return y + _broadcast(layer[f"{name}_bias"], y.ndim) if f"{name}_bias" in layer else y


def column_gain(matrix: Float[Array, "*batch i o"], pair: Params, scale: float | Float[Array, ""]) -> Float[Array, "*batch o"]:
    """What DoRA multiplies the columns of `matrix + scale * a @ b` with, so that their sizes are `m`. The sizes that they have count as
    constants, as in the paper (section 4.3)."""
    update = jnp.matmul(pair["a"], pair["b"], preferred_element_type=jnp.float32)
    sizes = jnp.linalg.norm(matrix.astype(jnp.float32) + scale * update, axis=-2)
    return pair["m"] / jax.lax.stop_gradient(sizes)


def _dropped(x: Float[Array, "*n i"], dropout: Dropout, matrix: int) -> Float[Array, "*n i"]:
    """x with a share of its numbers at 0 and the others larger by as much. Which ones is a function of the key, the matrix and the token,
    so not of how a batch is laid out."""
    key = jax.random.fold_in(jax.random.wrap_key_data(dropout.key), matrix)

    def kept(number: Array, position: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, number), position), 1 - dropout.rate, x.shape[-1:])

    number, position = (tokens.reshape(-1) for tokens in dropout.tokens)
    mask = jax.vmap(kept)(number, position).reshape(x.shape)
    return jnp.where(mask, x / (1 - dropout.rate), 0.0)


def block(
    config: ModelConfig,
    layer: Params,
    x: Float[Array, "*n D"],
    angles: Angles,
    attend: Attend,
    *,
    traits: LayerTraits | None = None,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    mlp_parts: int = 1,
    routed: Callable[[Routing], None] | None = None,
) -> tuple[Float[Array, "*n D"], Any]:
    """One layer on the float32 residual stream; returns it and what `attend` kept. `layer`, `traits` and `adapter.pairs` are one layer's
    slice.

    mlp_parts: over how many parts of the tokens the MLP goes, one after another, keeping nothing inside for a backward pass. routed: is
    shown where the tokens go, in a layer with experts.
    """
    linear = partial(project, layer=layer, adapter=adapter, precision=precision)

    def norm(name: str, x: Array) -> Array:
        return normed(config, x, layer[name]) if name in layer else x

    inner = norm("attn_norm", x)
    q, k = linear("q", x=inner), linear("k", x=inner)
    if config.qk_norm == "whole":
        q, k = norm("q_norm", q), norm("k_norm", k)
    q = q.reshape(*x.shape[:-1], config.num_heads, config.head_dim)
    k = k.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
    v = linear("v", x=inner).reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
    if config.qk_norm == "head":
        q, k = norm("q_norm", q), norm("k_norm", k)
    if config.attention_scale is not None:  # attention itself divides by sqrt(head_dim)
        q = q * (config.attention_scale * math.sqrt(config.head_dim))
    if config.two_ropes and traits is not None:
        angles = jnp.where(traits.second_rope, angles[0][1], angles[0][0]), jnp.where(traits.second_rope, angles[1][1], angles[1][0])
    mixed, kept = attend(rotate(q, *angles), rotate(k, *angles), v)
    x = checkpoint_name(x + norm("attn_out_norm", linear("o", x=mixed.reshape(*x.shape[:-1], -1))), KEPT)

    def mlp(part: tuple[Array, Dropout | None]) -> tuple[Array, Routing | None]:
        x, dropout = part
        own = None if adapter is None else adapter._replace(dropout=dropout)
        linear = partial(project, layer=layer, adapter=own, precision=precision)
        inner = norm("mlp_norm", x)
        if config.moe is not None:
            out, routing = expert_mlp(config.moe, layer, inner, partial(activated, config), precision)
            return norm("mlp_out_norm", out), None if routed is None else routing
        gate, up = checkpoint_name(linear("gate", x=inner), KEPT), checkpoint_name(linear("up", x=inner), KEPT)
        return norm("mlp_out_norm", linear("down", x=activated(config, gate) * up)), None

    dropout = None if adapter is None else adapter.dropout
    added, routing = mlp((x, dropout)) if mlp_parts == 1 else _in_parts(mlp, x, dropout, mlp_parts)
    if routed is not None and routing is not None:
        routed(routing)
    return x + added, kept


def activated(config: ModelConfig, gate: Array) -> Array:
    """What the MLP's gate goes through."""
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


def _in_parts(f: Callable[[tuple[Array, Dropout | None]], Any], x: Float[Array, "B T D"], dropout: Dropout | None, parts: int) -> Any:
    """`f` of parts of the columns in turn; rows stay whole, as a mesh may have spread them."""

    def cut(a: Array) -> Array:
        rows, length, *rest = a.shape
        return a.reshape(rows, parts, length // parts, *rest).swapaxes(0, 1)

    def joined(a: Array) -> Array:
        return a.swapaxes(0, 1).reshape(*x.shape[:2], *a.shape[3:])

    def part(columns: tuple[Array, Any]) -> Any:
        x, tokens = columns
        return f((x, None if dropout is None else dropout._replace(tokens=tokens)))

    tokens = None if dropout is None else jax.tree.map(cut, dropout.tokens)
    return jax.tree.map(joined, jax.lax.map(jax.checkpoint(part, prevent_cse=False), (cut(x), tokens)))


def embed(config: ModelConfig, table: Float[Array, "V D"], tokens: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    """What enters the first layer."""
    rows = jnp.take(table, tokens, axis=0).astype(jnp.float32)
    return rows * math.sqrt(config.width) if config.scaled_embedding else rows


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visibility: Visibility,
    *,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    remat: Remat = False,
    noise: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"]:
    """Final hidden states (normalised, float32) of packed rows. Multiply by `head_matrix` for logits. noise: added to the embeddings.

    remat: what a backward pass computes again: the cheap parts of a layer (False); a layer, of which only the input is kept (True), its
    MLP in parts of some `MLP_TOKENS`; or besides, the inputs of all but every n-th layer, n about the root of their number ("nested": one
    more forward pass; Chen et al., 2016, arXiv:1604.06174). Another decoder (`config.decoder`) keeps and computes again what it likes.
    """
    options: dict[str, Any] = {"adapter": adapter, "precision": precision, "remat": remat, "noise": noise}
    return _through(config, params, tokens, positions, visibility, **options)[0]


def forward_with_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visibility: Visibility,
    *,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    remat: Remat = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"]]:
    """`forward`, and the residual stream behind every layer; "nested" keeps all of them anyhow, so it is as True."""
    options: dict[str, Any] = {"adapter": adapter, "precision": precision, "remat": bool(remat), "noise": None}
    final, states, _ = _through(config, params, tokens, positions, visibility, with_states=True, **options)
    return final, cast(Array, states)


def forward_with_load(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visibility: Visibility,
    *,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    remat: Remat = False,
    noise: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "B T D"], Load]:
    """`forward`, and what the routers of all layers do with the tokens, padding left out; "nested" is as True. Raises ValueError without
    experts."""
    if config.moe is None:
        raise ValueError(f"a model of the {config.family} family has no experts whose load could be counted")
    options: dict[str, Any] = {"adapter": adapter, "precision": precision, "remat": bool(remat), "noise": noise}
    final, _, load = _through(config, params, tokens, positions, visibility, with_load=True, **options)
    return final, cast(Load, load)


def _through(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visibility: Visibility,
    *,
    adapter: Adapter | None,
    precision: Precision,
    remat: Remat,
    noise: Float[Array, "B T D"] | None,
    with_states: bool = False,
    with_load: bool = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"] | None, Load | None]:
    if config.decoder is not None:
        if with_states or adapter is not None or noise is not None:
            raise UserError(
                f"{config.family} computes its own way: it takes no adapter and no noise (NEFTune), and shows no layers' states"
            )
        return config.decoder.hidden(params, tokens, positions, visibility), None, None
    mlp_parts = _divisor(tokens.shape[1], at_most=max(1, tokens.size // MLP_TOKENS)) if remat else 1
    scale = 0.0 if adapter is None else adapter.scale

    def run(
        x: Array,
        weights: tuple[Params, Params | None],
        own: tuple[LayerTraits | None, Array],
        context: tuple[Angles, Array, Visibility, Dropout | None],
        routed: Callable[[Routing], None] | None = None,
    ) -> Array:
        (traits, index), (angles, positions, visibility, dropout) = own, context

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            own = own_attention(config, traits)
            return attention(q, k, v, visibility, precision=precision, positions=positions, **own), None

        layer, pairs = weights
        x = keep_rows(x)
        adapter = None if pairs is None else Adapter(pairs, scale, None if dropout is None else _of_layer(dropout, index))
        options: dict[str, Any] = {"precision": precision, "mlp_parts": mlp_parts, "routed": routed}
        return block(config, layer, x, angles, attend, traits=traits, adapter=adapter, **options)[0]

    layers = params["layers"], None if adapter is None else adapter.pairs
    traits = layer_traits(config), jnp.arange(config.num_layers, dtype=jnp.int32)
    context = rope_angles(config, positions), positions, visibility, None if adapter is None else adapter.dropout
    x = embed(config, params["embed"], tokens) if noise is None else embed(config, params["embed"], tokens) + noise
    states = load = None
    if remat == "nested":
        x = cast(Array, _nested(run, config.num_layers, x, layers, traits, context))
    else:
        policy = None if remat else jax.checkpoint_policies.save_only_these_names(KEPT)

        def body(x: Array, layer: Any) -> tuple[Array, Load | None]:
            seen: list[Routing] = []
            x = run(x, layer[0], layer[1], context, seen.append if with_load else None)
            return x, load_of(seen[0], visibility.segments != 0) if seen else None

        kept = jax.checkpoint(body, policy=policy, prevent_cse=False)

        def step(x: Array, layer: Any) -> tuple[Array, tuple[Array | None, Load | None]]:
            x, load = kept(x, layer)
            return x, (x if with_states else None, load)

        x, (states, load) = jax.lax.scan(step, x, (layers, traits))
    return normed(config, x, params["final_norm"]), states, load


Run = Callable[[Array, Any, Any, Any], Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _nested(run: Run, num_layers: int, x: Array, layers: Any, traits: Any, context: Any) -> Array:
    """`run(x, one layer's slice, its traits, context)` through all layers, with the gradient of `remat: nested`. `traits` and `context` get
    none.

    Scans within checkpointed scans would copy the weights of a group of layers, twice, and gather its gradients apart: here each layer
    is taken from the whole by its index, and its gradient put into the whole.
    """
    return _nested_forward(run, num_layers, x, layers, traits, context)[0]


def _nested_forward(run: Run, num_layers: int, x: Array, layers: Any, traits: Any, context: Any) -> tuple[Array, Any]:
    size = num_layers // _divisor(num_layers, at_most=math.isqrt(num_layers) + 1)

    def group(x: Array, first: Array) -> tuple[Array, Array]:
        return jax.lax.fori_loop(first, first + size, lambda i, x: run(x, _at(layers, i), _at(traits, i), context), x), x

    x, inputs = jax.lax.scan(group, x, jnp.arange(0, num_layers, size))
    return x, (inputs, layers, traits, context)


def _nested_backward(run: Run, num_layers: int, residuals: Any, g: Array) -> tuple[Array, Any, None, None]:
    inputs, layers, traits, context = residuals
    size = num_layers // inputs.shape[0]

    def group(carry: tuple[Array, Any], start: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        first, x = start
        indices = first + jnp.arange(size)
        _, inside = jax.lax.scan(lambda x, i: (run(x, _at(layers, i), _at(traits, i), context), x), x, indices)
        return jax.lax.scan(layer, carry, (indices, inside), reverse=True)

    def layer(carry: tuple[Array, Any], start: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        (g, d_layers), (index, x) = carry, start
        _, pull = jax.vjp(lambda x, weights: run(x, weights, _at(traits, index), context), x, _at(layers, index))
        g, d_layer = pull(g)

        def put(whole: Array, part: Array) -> Array:  # whole numbers, as codes of quantised weights are, have no gradient
            return whole if part.dtype == float0 else jax.lax.dynamic_update_index_in_dim(whole, part, index=index, axis=0)

        return (g, jax.tree.map(put, d_layers, d_layer)), None

    start = g, jax.tree.map(jnp.zeros_like, layers)
    (g, d_layers), _ = jax.lax.scan(group, start, (jnp.arange(0, num_layers, size), inputs), reverse=True)
    d_layers = jax.tree.map(lambda d: d if jnp.issubdtype(d.dtype, jnp.floating) else np.zeros(d.shape, float0), d_layers)
    return g, d_layers, None, None


_nested.defvjp(_nested_forward, _nested_backward)


def _of_layer(dropout: Dropout, index: Array) -> Dropout:
    """With the key of one layer."""
    return dropout._replace(key=jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(dropout.key), index)))


def _at(layers: Any, index: Array) -> Any:
    """One layer's slice of stacked weights."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), layers)


def _divisor(whole: int, *, at_most: int) -> int:
    """The largest divisor up to a limit."""
    return max(d for d in range(1, at_most + 1) if whole % d == 0)
