"""Episodes as bytes, for the other processes of a run: plain data with arrays beside it, of which the reader executes nothing.

Owns the form: a JSON tree in which arrays are numbered, then the arrays' bytes. It knows the nouns of `burnish.types` and no others; an
object of another kind, which only an environment's `info` can hold, arrives as its `repr`. No pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.types import Completion, Status, Step, StopReason, ToolCall, Trajectory

_RECORDS: dict[str, type] = {kind.__name__: kind for kind in (Completion, Step, ToolCall, Trajectory)}
_ENUMS: dict[str, type[enum.Enum]] = {kind.__name__: kind for kind in (Status, StopReason)}
_HEAD_BYTES = 8


def pack(value: Any) -> bytes:
    """Records, enums, arrays and plain values, at any depth."""
    arrays: list[np.ndarray] = []
    tree = _flat(value, arrays)
    head = json.dumps([tree, [[array.dtype.str, array.shape] for array in arrays]]).encode()
    return b"".join([len(head).to_bytes(_HEAD_BYTES, "little"), head, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def unpack(data: bytes) -> Any:
    """What was packed; arrays of its own, which may be written to."""
    at = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
    tree, layouts = json.loads(data[_HEAD_BYTES:at])
    arrays = []
    for dtype, shape in layouts:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(data[at : at + size], dtype).reshape(shape).copy())
        at += size
    return _rebuilt(tree, arrays)


def _flat(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON: scalars as they are, everything else as [kind, …]."""
    match value:
        case enum.Enum() if type(value).__name__ in _ENUMS:
            return ["enum", type(value).__name__, value.value]
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return _flat(value.item(), arrays)
        case np.ndarray() if value.dtype.kind in "biuf":
            arrays.append(value)
            return ["array", len(arrays) - 1]
        case list():
            return ["list", *(_flat(item, arrays) for item in value)]
        case tuple():
            return ["tuple", *(_flat(item, arrays) for item in value)]
        case Mapping():
            return ["dict", *([_flat(key, arrays), _flat(item, arrays)] for key, item in value.items())]
    if type(value).__name__ in _RECORDS:
        return ["record", type(value).__name__, *(_flat(getattr(value, field.name), arrays) for field in dataclasses.fields(value))]
    return repr(value)


def _rebuilt(tree: Any, arrays: list[np.ndarray]) -> Any:
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["enum", name, value]:
            return _ENUMS[name](value)
        case ["array", number]:
            return arrays[number]
        case ["list", *items]:
            return [_rebuilt(item, arrays) for item in items]
        case ["tuple", *items]:
            return tuple(_rebuilt(item, arrays) for item in items)
        case ["dict", *pairs]:
            return {_rebuilt(key, arrays): _rebuilt(item, arrays) for key, item in pairs}
        case ["record", name, *values]:
            return _RECORDS[name](*(_rebuilt(value, arrays) for value in values))
    raise ValueError(f"unknown entry {str(tree)[:80]} in what another process sent")


__all__ = ["pack", "unpack"]
