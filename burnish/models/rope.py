"""Rotary position embedding: frequencies after stretching, the angles of positions, the rotation.

Owns the formulas; which layer rotates by what is the configuration's. Called by `transformer.py` and the native engine.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from burnish.models.config import ModelConfig, RopeConfig

Angles = tuple[Array, Array]
"""cos and sin [*n, half] of every position; where layers don't all rotate alike, of `rope` and `second_rope`: [2, *n, half]."""


def rope_angles(config: ModelConfig, positions: Int[Array, "*n"]) -> Angles:
    """cos and sin of the rotary embedding at each position (Su et al., 2021, arXiv:2104.09864)."""
    first = _angles(config.rope, config.head_dim, positions)
    if not config.two_ropes:
        return first
    second = _angles(config.second_rope, config.head_dim, positions)
    return jnp.stack([first[0], second[0]]), jnp.stack([first[1], second[1]])


def _angles(rope: RopeConfig | None, head_dim: int, positions: Int[Array, "*n"]) -> Angles:
    if rope is None:
        still = jnp.zeros((*positions.shape, head_dim // 2))
        return still + 1.0, still
    frequencies, factor = rope_frequencies(rope, head_dim)
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
