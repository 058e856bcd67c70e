"""Divergences, pooled features and depths by hand; a divergence that is streamed over chunks is the dense one, gradient included."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.train.distillation import activity, direction_distance, divergence, pooling, same_depth, teacher_head
from burnish.train.score import HeadOptions, target_scores
from tests.rl.batches import scored

P, Q = jnp.log(jnp.array([[0.75, 0.25]])), jnp.log(jnp.array([[0.5, 0.5]]))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"kind": "forward_kl"}, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),  # .130812
        ({"kind": "reverse_kl"}, 0.5 * math.log(2 / 3) + 0.5 * math.log(2)),  # .143841
        ({"kind": "jsd", "beta": 0.5}, 0.033822),  # m = .625, .375: half of .035374 and of .032269
        ({"kind": "jsd", "beta": 0.1}, 0.1 * 0.107043 + 0.9 * 0.0012515),  # m = .525, .475
    ],
)
def test_divergences_by_hand(options: dict, wanted: float) -> None:
    np.testing.assert_allclose(divergence(P, Q, **options), [wanted], atol=1e-6)
    np.testing.assert_allclose(divergence(P + 3.0, P - 1.0, **options), [0.0], atol=1e-7)


def test_temperature_flattens_both_and_keeps_the_size_of_gradients() -> None:
    """Of .8 and .2 at temperature 2: 2/3 and 1/3; its KL to one half each is .056633, times 4."""
    teacher = jnp.log(jnp.array([[0.8, 0.2]]))
    np.testing.assert_allclose(divergence(teacher, Q, kind="forward_kl", temperature=2.0), [4 * 0.056633], atol=1e-5)


def test_an_id_that_the_teacher_never_says_is_finite_with_its_gradient() -> None:
    teacher, student = jnp.array([[0.0, -jnp.inf]]), jnp.array([[0.3, -0.2]])
    value, slope = jax.value_and_grad(lambda x: divergence(teacher, x, kind="forward_kl")[0])(student)
    assert float(value) == pytest.approx(math.log1p(math.exp(-0.5)), abs=1e-6) and bool(jnp.isfinite(slope).all())


def test_features_by_hand() -> None:
    np.testing.assert_allclose(pooling(4, 2), [[0.5, 0], [0.5, 0], [0, 0.5], [0, 0.5]])
    np.testing.assert_allclose(pooling(3, 2), [[0.5, 0], [0.5, 0.5], [0, 0.5]])  # two neighbourhoods of two
    with pytest.raises(ValueError, match="pooled to fewer of them, got 2 and 4"):
        pooling(2, 4)
    x = jnp.array([[3.0, 4.0]])
    for other, distance in (([6.0, 8.0], 0.0), ([-4.0, 3.0], 1.0), ([-3.0, -4.0], 2.0)):
        np.testing.assert_allclose(direction_distance(x, jnp.array([other])), [distance], atol=1e-6)
    np.testing.assert_allclose(activity(x), [12.5])
    assert [same_depth(*at) for at in ((-1, 2, 4), (0, 2, 4), (-1, 30, 12), (0, 4, 2), (1, 4, 2), (2, 4, 2))] == [3, 1, 11, 0, 0, 1]


@pytest.mark.parametrize("top_k", [None, 3])
def test_streamed_over_chunks_it_is_the_dense_one(top_k: int | None) -> None:
    batch = scored(np.ones((2, 5)))
    rows, length = batch.tokens.shape
    keys = iter(jax.random.split(jax.random.key(0), 4))
    hidden, head = jax.random.normal(next(keys), (rows, length, 4)), jax.random.normal(next(keys), (9, 4))
    known, theirs = jax.random.normal(next(keys), (*batch.mask.shape, 6)), jax.random.normal(next(keys), (11, 6))
    head_fn = teacher_head(kind="jsd", beta=0.3, temperature=1.5, top_k=top_k)
    options = HeadOptions(chunk=3, train_head=True, head_fn=head_fn, head_fn_gradient=True)

    def streamed(hidden: Array, head: Array) -> Array:
        return target_scores(hidden, head, batch, options=options, aux=known, shared=theirs)[1]["divergence"].sum()

    def dense(hidden: Array, head: Array) -> Array:
        at = jnp.take_along_axis(hidden, jnp.asarray(batch.columns)[..., None], axis=1).reshape(-1, 4)
        teacher, student = (known.reshape(-1, 6) @ theirs.T)[:, :9], at @ head.T
        if top_k is not None:
            teacher, ids = jax.lax.top_k(teacher, top_k)
            student = jnp.take_along_axis(student, ids, axis=1)
        each = divergence(teacher, student, kind="jsd", beta=0.3, temperature=1.5)
        return jnp.where(jnp.asarray(batch.mask).reshape(-1), each, 0.0).sum()

    for a, b in zip(*(jax.tree.leaves(jax.value_and_grad(f, argnums=(0, 1))(hidden, head)) for f in (streamed, dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert dataclasses.replace(options, head_fn_gradient=False).one_pass is False
