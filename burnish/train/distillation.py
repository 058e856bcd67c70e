"""What a student learns from a teacher's numbers: divergences of distributions, of directions of features, of where activations are large.

Owns the three kinds of target as pure functions. Divergences are head functions (`train.score`): both models' logits exist for a chunk of
tokens at a time, never for a batch. Doesn't own the models (`trainers.distilled`), nor distillation on the student's own samples, which is
an algorithm of reinforcement learning (`on_policy_distillation`).

| name | of each token, p the teacher's distribution, q the student's |
|---|---|
| forward_kl | Σ p (log p - log q): the student must cover all that the teacher may say (Hinton et al., 2015, arXiv:1503.02531) |
| reverse_kl | Σ q (log q - log p): the student may say only what the teacher does (Gu et al., 2023, arXiv:2306.08543) |
| jsd | β Σ p (log p - log m) + (1 - β) Σ q (log q - log m), m = β p + (1 - β) q (Agarwal et al., 2023, arXiv:2306.13649) |
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from burnish.models.transformer import capped, vocab_logits
from burnish.train.score import HeadFn

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
Logits = Float[Array, "C V"]
_SMALL = 1e-12
"""Added under roots and to norms: a vector of zeros has no direction, and no gradient."""


def divergence(teacher: Logits, student: Logits, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0) -> Float[Array, " C"]:
    """The divergence of each token, in nats, times temperature², so that gradients keep their size (Hinton et al., section 2.1).

    beta: of the jsd; towards 1 it has β KL(p|m) of the forward kind, towards 0 of the reverse one. Both sets of logits are divided by the
    temperature first.
    """
    log_p, log_q = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature, axis=-1) for x in (teacher, student))
    if kind == "forward_kl":
        each = _expected(log_p, log_p - log_q)
    elif kind == "reverse_kl":
        each = _expected(log_q, log_q - log_p)
    else:
        log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log1p(-beta))
        each = beta * _expected(log_p, log_p - log_m) + (1 - beta) * _expected(log_q, log_q - log_m)
    return each * temperature**2


def _expected(log_weights: Logits, values: Logits) -> Float[Array, " C"]:
    """Σ exp(log_weights) values; what has no weight adds nothing, whatever its value."""
    weights = jnp.exp(log_weights)
    return jnp.sum(weights * jnp.where(weights > 0, values, 0.0), axis=-1)


def teacher_head(
    *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0, top_k: int | None = None, logit_cap: float | None = None
) -> HeadFn:
    """A head function that gives "divergence"; `aux` are the teacher's final hidden states, `shared` is its head [V, D].

    top_k: over the ids that the teacher finds likeliest alone, both distributions as shares of those. logit_cap: the teacher's. Where one
    vocabulary is longer than the other, by padding, its end is left out.
    """

    def head(student: Logits, aux: Any) -> dict[str, Float[Array, " C"]]:
        hidden, matrix = aux
        teacher = jax.lax.stop_gradient(capped(vocab_logits(hidden, matrix.astype(jnp.float32)), logit_cap))
        size = min(teacher.shape[-1], student.shape[-1])
        teacher, student = teacher[:, :size], student[:, :size]
        if top_k is not None and top_k < size:
            teacher, ids = jax.lax.top_k(teacher, top_k)
            student = jnp.take_along_axis(student, ids, axis=-1)
        return {"divergence": divergence(teacher, student, kind=kind, beta=beta, temperature=temperature)}

    return head


# --------------------------------------------------------------------------------------------------------------- features, attention


def direction_distance(student: Float[Array, "*n d"], teacher: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """1 - cosine: 0 for the same direction, 2 for the opposite one. Residual streams differ in size from model to model."""
    return 1.0 - jnp.sum(_unit(student) * _unit(jax.lax.stop_gradient(teacher)), axis=-1)


def pooling(wide: int, narrow: int) -> np.ndarray:
    """float32[wide, narrow]: means of `narrow` neighbourhoods, as even as they can be, that cover all of `wide` features."""
    if not 0 < narrow <= wide:
        raise ValueError(f"features are pooled to fewer of them, got {wide} and {narrow}")
    starts, ends = (np.arange(narrow) * wide) // narrow, -((-(np.arange(narrow) + 1) * wide) // narrow)
    inside = (np.arange(wide)[:, None] >= starts) & (np.arange(wide)[:, None] < ends)
    return (inside / inside.sum(axis=0)).astype(np.float32)


def activity(states: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """The mean square of a token's features: how much a layer makes of it (attention maps of activations, Zagoruyko & Komodakis, 2016,
    arXiv:1612.03928)."""
    return jnp.mean(jnp.square(states), axis=-1)


def _unit(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _SMALL)


def same_depth(layer: int, layers: int, of: int) -> int:
    """Which layer of a model of `of` layers stands as deep as one of `layers`: `layer` counts from 0, or from the end below that."""
    layer = layer % layers
    return min(of - 1, max(0, round((layer + 1) * of / layers) - 1))
