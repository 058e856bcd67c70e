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
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from burnish.models.attention import KEPT, Visibility, attention
from burnish.models.config import ModelConfig, Precision, RopeConfig
from burnish.models.rows import keep_rows

Params = dict[str, Any]
Remat = bool | Literal["nested"]
"""How much a backward pass computes again: see `forward`."""

MLP_TOKENS = 1024
"""Tokens of a part of the MLP, where it goes in parts: its hidden arrays are several times as wide as the residual stream."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One leaf: its shape, the logical axis of each dimension, how it starts (`normal` has standard deviation `scale`)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    scale: float = 0.02


class Adapter(NamedTuple):
    """A low-rank update of some matrices of the layers: `x @ w + scale * (x @ a) @ b`.

    pairs: {"q": {"a": [L, in, r], "b": [L, r, out]}, …}; scale = alpha / rank, a compile-time constant.
    """

    pairs: Params
    scale: float


def spec(config: ModelConfig) -> Params:
    """Shape, axes and initialiser of every leaf, as a tree like the parameters'."""
    num_layers, width = config.num_layers, config.width
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out_scale = 0.02 / math.sqrt(2 * num_layers)

    def matrix(rows: int, columns: int, axes: tuple[str, str], scale: float = 0.02) -> ParamSpec:
        return ParamSpec((num_layers, rows, columns), ("layers", *axes), scale=scale)

    def vector(size: int, axis: str, init: Literal["ones", "zeros"]) -> ParamSpec:
        return ParamSpec((num_layers, size), ("layers", axis), init)

    layers: Params = {
        "attn_norm": vector(width, "embed", "ones"),
        "q": matrix(width, heads, ("embed", "heads")),
        "k": matrix(width, kv_heads, ("embed", "kv_heads")),
        "v": matrix(width, kv_heads, ("embed", "kv_heads")),
        "o": matrix(heads, width, ("heads", "embed"), out_scale),
        "mlp_norm": vector(width, "embed", "ones"),
        "gate": matrix(width, config.mlp_width, ("embed", "mlp")),
        "up": matrix(width, config.mlp_width, ("embed", "mlp")),
        "down": matrix(config.mlp_width, width, ("mlp", "embed"), out_scale),
    }
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
    if config.qk_norm:
        layers |= {"q_norm": vector(config.head_dim, "head_dim", "ones"), "k_norm": vector(config.head_dim, "head_dim", "ones")}
    tree: Params = {
        "embed": ParamSpec((config.vocab_size, width), ("vocab", "embed")),
        "layers": layers,
        "final_norm": ParamSpec((width,), ("embed",), "ones"),
    }
    if not config.tied_head:
        tree["head"] = ParamSpec((config.vocab_size, width), ("vocab", "embed"))
    return tree


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


def _broadcast(vector: Array, ndim: int) -> Array:
    return vector.reshape((1,) * (ndim - 1) + (-1,)).astype(jnp.float32)


def rope_angles(config: ModelConfig, positions: Int[Array, "*n"]) -> tuple[Float[Array, "*n half"], Float[Array, "*n half"]]:
    """cos and sin of the rotary embedding at each position (Su et al., 2021, arXiv:2104.09864)."""
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32).reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    """Inverse frequencies (head_dim / 2 of them) and the factor on cos and sin, after stretching.

    `linear` divides every frequency (Chen et al., 2023, arXiv:2306.15595); `llama3` keeps short wavelengths, divides long ones and blends
    between; `yarn` ramps from extrapolation to interpolation over dimensions and sharpens attention (Peng et al., 2023, arXiv:2309.00071).
    """
    half = head_dim // 2
    base = [rope.theta ** (-2.0 * i / head_dim) for i in range(half)]
    if rope.kind == "none":
        return base, 1.0
    if rope.kind == "linear":
        return [f / rope.factor for f in base], 1.0
    if rope.kind == "llama3":
        return [_llama3_frequency(f, rope) for f in base], 1.0
    return _yarn_frequencies(base, rope, head_dim)


def _llama3_frequency(frequency: float, rope: RopeConfig) -> float:
    wavelength = 2 * math.pi / frequency
    low, high = rope.original_max_positions / rope.low_freq_factor, rope.original_max_positions / rope.high_freq_factor
    if wavelength > low:
        return frequency / rope.factor
    if wavelength < high:
        return frequency
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn_frequencies(base: list[float], rope: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 1e-3)
    keep = [1.0 - min(max((i - low) / span, 0.0), 1.0) for i in range(len(base))]
    frequencies = [f * k + f / rope.factor * (1 - k) for f, k in zip(base, keep, strict=True)]
    return frequencies, _yarn_factor(rope)


def _yarn_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotate(x: Float[Array, "*n H h"], cos: Float[Array, "*n half"], sin: Float[Array, "*n half"]) -> Float[Array, "*n H h"]:
    """Rotate the two halves of each head (the Hugging Face layout)."""
    first, second = jnp.split(x, 2, axis=-1)
    c, s = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)


# -------------------------------------------------------------------------------------------------------------------- layers

Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q [..., H, h], k [..., K, h], v [..., K, h]) → (mixed [..., H, h], whatever the caller keeps: its cache, or None)."""


def project(name: str, layer: Params, x: Float[Array, "*n i"], adapter: Adapter | None, precision: Precision) -> Float[Array, "*n o"]:
    """One named matrix of a layer with its bias and its adapter, where it has them."""
    y = dot(x, layer[name], precision)
    if f"{name}_bias" in layer:
        y = y + _broadcast(layer[f"{name}_bias"], y.ndim)
    if adapter is not None and name in adapter.pairs:
        pair = adapter.pairs[name]
        y = y + dot(checkpoint_name(dot(x, pair["a"], precision), KEPT) * adapter.scale, pair["b"], precision)
    return y


def block(
    config: ModelConfig,
    layer: Params,
    x: Float[Array, "*n D"],
    angles: tuple[Array, Array],
    attend: Attend,
    *,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    mlp_parts: int = 1,
) -> tuple[Float[Array, "*n D"], Any]:
    """One layer on the float32 residual stream; returns it and what `attend` kept. `layer` and `adapter.pairs` are one layer's slice.

    mlp_parts: over how many parts of the tokens the MLP goes, one after another, keeping nothing inside for a backward pass.
    """
    linear = partial(project, layer=layer, adapter=adapter, precision=precision)
    normed = rms_norm(x, layer["attn_norm"], config.norm_eps)
    q = linear("q", x=normed).reshape(*x.shape[:-1], config.num_heads, config.head_dim)
    k = linear("k", x=normed).reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
    v = linear("v", x=normed).reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config.norm_eps), rms_norm(k, layer["k_norm"], config.norm_eps)
    mixed, kept = attend(rotate(q, *angles), rotate(k, *angles), v)
    x = checkpoint_name(x + linear("o", x=mixed.reshape(*x.shape[:-1], -1)), KEPT)

    def mlp(x: Array) -> Array:
        normed = rms_norm(x, layer["mlp_norm"], config.norm_eps)
        gate, up = checkpoint_name(linear("gate", x=normed), KEPT), checkpoint_name(linear("up", x=normed), KEPT)
        return linear("down", x=jax.nn.silu(gate) * up)

    return x + (mlp(x) if mlp_parts == 1 else _in_parts(mlp, x, mlp_parts)), kept


def _in_parts(f: Callable[[Array], Array], x: Float[Array, "B T D"], parts: int) -> Float[Array, "B T D"]:
    """`f` of parts of the columns in turn; rows stay whole, as a mesh may have spread them."""
    rows, length, width = x.shape
    cut = x.reshape(rows, parts, length // parts, width).swapaxes(0, 1)
    return jax.lax.map(jax.checkpoint(f, prevent_cse=False), cut).swapaxes(0, 1).reshape(x.shape)


def embed(params: Params, tokens: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    return jnp.take(params["embed"], tokens, axis=0).astype(jnp.float32)


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
    more forward pass; Chen et al., 2016, arXiv:1604.06174).
    """
    mlp_parts = _divisor(tokens.shape[1], at_most=max(1, tokens.size // MLP_TOKENS)) if remat else 1
    scale = 0.0 if adapter is None else adapter.scale

    def run(x: Array, weights: tuple[Params, Params | None], context: tuple[tuple[Array, Array], Visibility]) -> Array:
        angles, visibility = context

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attention(q, k, v, visibility, precision=precision), None

        layer, pairs = weights
        x = keep_rows(x)
        own = None if pairs is None else Adapter(pairs, scale)
        return block(config, layer, x, angles, attend, adapter=own, precision=precision, mlp_parts=mlp_parts)[0]

    layers = params["layers"], None if adapter is None else adapter.pairs
    context = rope_angles(config, positions), visibility
    x = embed(params, tokens) if noise is None else embed(params, tokens) + noise
    if remat == "nested":
        x = cast(Array, _nested(run, config.num_layers, x, layers, context))
    else:
        policy = None if remat else jax.checkpoint_policies.save_only_these_names(KEPT)
        body = jax.checkpoint(lambda x, weights: (run(x, weights, context), None), policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(body, x, layers)
    return rms_norm(x, params["final_norm"], config.norm_eps)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _nested(run: Callable[[Array, Any, Any], Array], num_layers: int, x: Array, layers: Any, context: Any) -> Array:
    """`run(x, one layer's slice, context)` through all layers, with the gradient of `remat: nested`. `context` gets none.

    Scans within checkpointed scans would copy the weights of a group of layers, twice, and gather its gradients apart: here each layer
    is taken from the whole by its index, and its gradient put into the whole.
    """
    return _nested_forward(run, num_layers, x, layers, context)[0]


def _nested_forward(run: Callable[[Array, Any, Any], Array], num_layers: int, x: Array, layers: Any, context: Any) -> tuple[Array, Any]:
    size = num_layers // _divisor(num_layers, at_most=math.isqrt(num_layers) + 1)

    def group(x: Array, first: Array) -> tuple[Array, Array]:
        return jax.lax.fori_loop(first, first + size, lambda i, x: run(x, _at(layers, i), context), x), x

    x, inputs = jax.lax.scan(group, x, jnp.arange(0, num_layers, size))
    return x, (inputs, layers, context)


def _nested_backward(run: Callable[[Array, Any, Any], Array], num_layers: int, residuals: Any, g: Array) -> tuple[Array, Any, None]:
    inputs, layers, context = residuals
    size = num_layers // inputs.shape[0]

    def group(carry: tuple[Array, Any], start: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        first, x = start
        indices = first + jnp.arange(size)
        _, inside = jax.lax.scan(lambda x, i: (run(x, _at(layers, i), context), x), x, indices)
        return jax.lax.scan(layer, carry, (indices, inside), reverse=True)

    def layer(carry: tuple[Array, Any], start: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        (g, d_layers), (index, x) = carry, start
        _, pull = jax.vjp(lambda x, weights: run(x, weights, context), x, _at(layers, index))
        g, d_layer = pull(g)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return (g, jax.tree.map(put, d_layers, d_layer)), None

    start = g, jax.tree.map(jnp.zeros_like, layers)
    (g, d_layers), _ = jax.lax.scan(group, start, (jnp.arange(0, num_layers, size), inputs), reverse=True)
    return g, d_layers, None


_nested.defvjp(_nested_forward, _nested_backward)


def _at(layers: Any, index: Array) -> Any:
    """One layer's slice of stacked weights."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), layers)


def _divisor(whole: int, *, at_most: int) -> int:
    """The largest divisor up to a limit."""
    return max(d for d in range(1, at_most + 1) if whole % d == 0)
