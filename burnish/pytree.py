"""`@pytree`: frozen records of device arrays that jax can take apart and put together.

Owns the decorator and the marker of static fields. Every device noun (`rl.batch`, `train.state`, `train.score` …) is declared with it;
host nouns are plain dataclasses in `types.py`.

Why not `jax.tree_util.register_dataclass`: it rebuilds through `__init__`, and while jax maps over a tree the leaves are anything
(`ShapeDtypeStruct`, `None`, `object()`, a sharding), so annotations that a test run checks in `__init__` would fail there. Here jax
rebuilds without `__init__` and `__post_init__`; only people run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, cast, dataclass_transform

import jax

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the tree's structure, not a leaf: hashable, and a new value means a new compilation."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a jax pytree whose children are its fields in order, `static()` ones excepted.

    Change a field with `dataclasses.replace(x, field=value)`. Two instances are equal only if they are the same object: comparing
    arrays elementwise has no single truth value.
    """
    record = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cast(Any, record))
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in children)

    def structure(x: T) -> tuple[Any, ...]:
        return tuple(getattr(x, name) for name in statics)

    def flatten(x: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(x, name) for name in children), structure(x)

    def flatten_with_keys(x: T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        return tuple((key, getattr(x, name)) for key, name in zip(keys, children, strict=True)), structure(x)

    def rebuild(aux: tuple[Any, ...], leaves: Iterable[Any]) -> T:
        x = object.__new__(record)
        x.__dict__.update(zip(children, leaves, strict=True))
        x.__dict__.update(zip(statics, aux, strict=True))
        return x

    jax.tree_util.register_pytree_with_keys(record, flatten_with_keys, rebuild, flatten)
    return record
