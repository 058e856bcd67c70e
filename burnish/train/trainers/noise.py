"""What is random in a pass of training: noise on the embeddings, what an adapter doesn't read. Of the step's key and the token alone.

Owns which numbers a token has, wherever a layout puts it: how a mini-batch is packed and cut changes no draw, and so no gradient. Called by
`policy`; applying a dropout is `models.transformer`'s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from burnish.models.transformer import Dropout
from burnish.rl.batch import TokenBatch


def token_numbers(batch: TokenBatch) -> Int32[Array, "R T"]:
    """Whose each token is: 2 n + 2 of sequence n of the mini-batch, 2 n + 1 of the n-th row's shared part. Padding's mean nothing."""
    segments, mask = jnp.asarray(batch.segments), jnp.asarray(batch.mask)
    num_rows, length = segments.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]

    def named(table: Array, of: Array, number: Array) -> Array:
        """The segments that scored ids lie in, or see, get the number; those of padding lie outside the table."""
        found = jnp.take_along_axis(of, jnp.asarray(batch.own_columns), axis=1)
        return table.at[rows, jnp.where(mask, found, length + 1)].set(number, mode="drop")

    table = jnp.zeros((num_rows, length + 1), jnp.int32)
    table = named(table, jnp.asarray(batch.parents), 2 * jnp.asarray(batch.prompts_index) + 1)
    table = named(table, segments, 2 * jnp.asarray(batch.sequences) + 2)
    return jnp.take_along_axis(table, segments, axis=1)


def dropout(key: UInt32[Array, " words"], batch: TokenBatch, *, rate: float) -> Dropout:
    """Of a step's key, for the tokens of a batch."""
    return Dropout(rate, key, (token_numbers(batch), jnp.asarray(batch.positions)))


def neftune(key: UInt32[Array, " words"], batch: TokenBatch, width: int, *, alpha: float) -> Float[Array, "R T D"]:
    """Uniform noise in ± alpha / sqrt(L D) for the embeddings, L the tokens of a token's own segment (NEFTune, arXiv:2310.05914)."""
    segments = jnp.asarray(batch.segments)
    rows, length = segments.shape
    numbers = (jnp.arange(rows, dtype=jnp.int32)[:, None] * (length + 1) + segments).ravel()
    counts = jax.ops.segment_sum(jnp.ones(numbers.shape, jnp.float32), numbers, num_segments=rows * (length + 1))
    size = alpha * jax.lax.rsqrt(counts[numbers].reshape(rows, length, 1) * width)
    root = jax.random.wrap_key_data(key)

    def of_token(number: Array, position: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(root, number), position)
        return jax.random.uniform(own, (width,), jnp.float32, minval=-1.0, maxval=1.0)

    noise = jax.vmap(of_token)(token_numbers(batch).ravel(), jnp.asarray(batch.positions).ravel())
    return noise.reshape(rows, length, width) * size
