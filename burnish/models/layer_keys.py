"""What a `config.json` says about single layers: which see a window, which aren't rotated. One reader and writer for each way of saying it.

Owns those keys; the record is `config.LayerKind`. A family of `families.py` names the rule that it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.models.config import LayerKind, ModelConfig
from burnish.models.rope_keys import FULL, SLIDING

Kinds = tuple[LayerKind, ...]


@dataclass(frozen=True, slots=True)
class LayerRule:
    """read: the kinds of all layers (() where all are plain) and what can't be honoured. write: the keys that say the same."""

    read: Callable[[Mapping[str, Any]], tuple[Kinds, list[str]]]
    write: Callable[[ModelConfig], dict[str, Any]]


def _kinds(windows: list[int | None], seconds: list[bool] | None = None) -> Kinds:
    """Canonical: () says that all layers are plain."""
    kinds = tuple(map(LayerKind, windows, seconds or [False] * len(windows)))
    return () if all(kind == LayerKind() for kind in kinds) else kinds


def _windows(raw: Mapping[str, Any], sliding: list[bool], window: int | None) -> tuple[list[int | None], list[str]]:
    """The window of each layer, from which of them slide. A list `layer_types` in the config says it instead."""
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if slides else FULL for slides in sliding]
    problems = [f"layer_types has {len(types)} entries for {len(sliding)} layers"] if len(types) != len(sliding) else []
    other = sorted(set(types) - {FULL, SLIDING})
    if other:
        problems.append(f"layer_types has {', '.join(map(repr, other))}; supported: {FULL!r}, {SLIDING!r}")
    if SLIDING in types and not window:
        problems.append(f"layer_types has {SLIDING!r}, but sliding_window is {window!r}")
    return [window if kind == SLIDING else None for kind in types], problems


def _layers(raw: Mapping[str, Any]) -> range:
    return range(raw.get("num_hidden_layers") or 0)


def _size(config: ModelConfig) -> int | None:
    """The window that the windowed layers share."""
    sizes = {kind.window for kind in config.layer_kinds} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def _types(config: ModelConfig) -> list[str]:
    kinds = config.layer_kinds or (LayerKind(),) * config.num_layers
    return [FULL if kind.window is None else SLIDING for kind in kinds]


# ---------------------------------------------------------------------------------------------------------------- the rules


def _read_plain(raw: Mapping[str, Any]) -> tuple[Kinds, list[str]]:
    problems = []
    if raw.get("use_sliding_window") and raw.get("sliding_window") and raw.get("max_window_layers", 0) < len(_layers(raw)):
        problems.append(f"a sliding window of {raw['sliding_window']} is in use (use_sliding_window); only full attention is supported")
    other = sorted(set(raw.get("layer_types") or ()) - {FULL})
    if other:
        problems.append(f"layer_types has {', '.join(map(repr, other))}; only {FULL!r} is supported")
    return (), problems


PLAIN = LayerRule(_read_plain, lambda config: {})
"""No layer differs."""


def everywhere(*, unless_said: int | None = None, switched: bool = False) -> LayerRule:
    """`sliding_window` holds in every layer; null: in none. unless_said: what a config without the key means. switched: only where
    `use_sliding_window` is true."""

    def read(raw: Mapping[str, Any]) -> tuple[Kinds, list[str]]:
        window = raw.get("sliding_window", unless_said)
        if switched and not raw.get("use_sliding_window"):
            window = None
        return _kinds([window for _ in _layers(raw)]), []

    def write(config: ModelConfig) -> dict[str, Any]:
        size = _size(config)
        return {"sliding_window": size} | ({"use_sliding_window": size is not None} if switched else {})

    return LayerRule(read, write)


def alternating(*, every: int, window: int, second_rope: bool) -> LayerRule:
    """Every `every`-th layer sees everything, the others a window and, with `second_rope`, they rotate by a RoPE of their own."""

    def read(raw: Mapping[str, Any]) -> tuple[Kinds, list[str]]:
        period = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or every
        windows, problems = _windows(raw, [(i + 1) % period != 0 for i in _layers(raw)], raw.get("sliding_window", window))
        return _kinds(windows, [second_rope and size is not None for size in windows]), problems

    def write(config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": _size(config), "layer_types": _types(config)}

    return LayerRule(read, write)


def _read_upper(raw: Mapping[str, Any]) -> tuple[Kinds, list[str]]:
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    windows, problems = _windows(raw, [window is not None and i >= raw.get("max_window_layers", 28) for i in _layers(raw)], window)
    return _kinds(windows), problems


def _write_upper(config: ModelConfig) -> dict[str, Any]:
    types = _types(config)
    first = types.index(SLIDING) if SLIDING in types else config.num_layers
    used = {"use_sliding_window": SLIDING in types, "sliding_window": _size(config), "max_window_layers": first}
    return used | {"layer_types": types}


UPPER = LayerRule(_read_upper, _write_upper)
"""Layers from `max_window_layers` on see a window, where `use_sliding_window` is true."""


def _read_unrotated(raw: Mapping[str, Any]) -> tuple[Kinds, list[str]]:
    interval = raw.get("no_rope_layer_interval") or 4
    rotated = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in _layers(raw)]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    windows, problems = _windows(raw, [window is not None and not rotated[i] for i in _layers(raw)], window)
    return _kinds(windows, [not rotated[i] for i in _layers(raw)]), problems


def _write_unrotated(config: ModelConfig) -> dict[str, Any]:
    kinds = config.layer_kinds or (LayerKind(),) * config.num_layers
    said = {"no_rope_layers": [int(not kind.second_rope) for kind in kinds], "layer_types": _types(config)}
    return said | {"use_sliding_window": config.windowed, "sliding_window": _size(config)}


UNROTATED = LayerRule(_read_unrotated, _write_unrotated)
"""`no_rope_layers` has a 0 for each layer that isn't rotated (every fourth, if the config says nothing)."""
