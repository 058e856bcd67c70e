"""`@pytree`: rebuilt without `__init__`, whatever the leaves are; static fields are structure."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.pytree import pytree, static


@pytree
class Batch:
    tokens: jax.Array
    kept: jax.Array | None
    rows: int = static(default=2)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2:  # fails for anything that isn't an array, as a checked shape annotation would
            raise ValueError(f"tokens must be [rows, columns], got {self.tokens.shape}")


def batch(kept: jax.Array | None = None) -> Batch:
    return Batch(tokens=jnp.arange(6, dtype=jnp.int32).reshape(2, 3), kept=kept)


def test_checks_run_for_people() -> None:
    with pytest.raises(ValueError, match="rows, columns"):
        Batch(tokens=jnp.zeros(3), kept=None)
    with pytest.raises(ValueError, match="rows, columns"):
        dataclasses.replace(batch(), tokens=jnp.zeros(3))


def test_checks_do_not_run_for_jax() -> None:
    names = jax.tree.map(lambda leaf: "a leaf", batch())
    assert names.tokens == "a leaf" and names.kept is None and names.rows == 2
    shapes = jax.eval_shape(lambda b: jax.tree.map(lambda x: x.sum(0), b), batch())
    assert shapes.tokens.shape == (3,)


def test_jit_and_scan_carry_it() -> None:
    doubled = jax.jit(lambda b: dataclasses.replace(b, tokens=b.tokens * 2))(batch())
    assert doubled.tokens.tolist() == [[0, 2, 4], [6, 8, 10]] and doubled.rows == 2

    def step(carry: Batch, _: None) -> tuple[Batch, jax.Array]:
        return dataclasses.replace(carry, tokens=carry.tokens + 1), carry.tokens[0, 0]

    last, seen = jax.lax.scan(step, batch(kept=jnp.ones(1)), None, length=4)
    assert last.tokens[0].tolist() == [4, 5, 6] and seen.tolist() == [0, 1, 2, 3]
    assert last.kept is not None and last.kept.tolist() == [1.0]


def test_none_is_no_leaf_and_static_is_structure() -> None:
    assert len(jax.tree.leaves(batch())) == 1
    assert len(jax.tree.leaves(batch(kept=jnp.zeros(1)))) == 2
    assert jax.tree.structure(batch()) != jax.tree.structure(dataclasses.replace(batch(), rows=3))
    traces = []
    count = jax.jit(lambda b: traces.append(b.rows) or b.tokens.sum())
    for rows in (2, 2, 3):
        count(dataclasses.replace(batch(), rows=rows))
    assert traces == [2, 3]


def test_paths_name_the_fields() -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch(kept=jnp.zeros(1)))]
    assert paths == [".tokens", ".kept"]


def test_frozen_and_compared_by_identity() -> None:
    b = batch()
    with pytest.raises(dataclasses.FrozenInstanceError):
        b.__setattr__("rows", 3)
    assert b == b and b != batch()
    assert np.array_equal(b.tokens, batch().tokens)
