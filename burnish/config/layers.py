"""A source's settings as a tree that remembers who wrote what, and how one tree is laid over another.

Owns the merge: a mapping is merged, so that a partial override keeps its siblings; a list is replaced, or changed at the positions that are
named; a tagged union whose tag changes starts afresh. Doesn't know options, files or the command line. Called by `loader.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value was written: a file and line, the name of an environment variable, the text of an override, or nowhere (default)."""

    kind: Literal["default", "file", "environment", "command line"]
    text: str = ""

    def __str__(self) -> str:
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in self.text)  # one line: it ends up in YAML comments
        return text if self.kind == "file" else f"{self.kind} {text}".strip()


DEFAULT = Source("default")


@dataclass(slots=True)
class Layer:
    """What one source says, or several merged: nested plain values, and who wrote each node, by dotted path."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Source] = field(default_factory=dict)

    def add(self, over: Layer, tags: Mapping[str, str]) -> None:
        """Lays `over` on top. `tags`: dotted path of a tagged union -> the key that names its branch."""
        self.values = _merge(self.values, over.values, "", tags, self.places)
        self.places |= over.places

    def switched(self, over: Layer, tags: Mapping[str, str]) -> Iterator[str]:
        """What would get lost, in words, if `over` were laid on top: settings of a tagged union whose branch `over` changes."""
        for path, tag in tags.items():
            old, new = _at(self.values, path), _at(over.values, path)
            if not (isinstance(old, dict) and isinstance(new, dict)) or new.get(tag, old.get(tag)) == old.get(tag):
                continue
            written = [node for node in leaves(old, path) if node in self.places and node != join(path, tag)]
            lost = [f"{node} [{self.places[node]}]" for node in written if _at(over.values, node) is None]
            if lost:
                chosen = join(path, tag)
                yield (
                    f"{chosen} is now {new[tag]} [{over.places[chosen]}] and was {old.get(tag)}; what was set for that one no longer "
                    f"counts: {', '.join(lost)}"
                )

    def set(self, path: str, value: Any, source: Source) -> None:
        """Writes one value at a dotted path."""
        places = {node: source for node in [path, *nodes(value, path)]}
        for part in reversed(path.split(".")):
            value = {part: value}
        self.add(Layer(value, places), {})

    def origin(self, path: str) -> str:
        """Who wrote the value at a path, in words; of a section also who overrode parts of it; else who wrote the section around it."""
        beneath = [place for node, place in self.places.items() if node.startswith(f"{path}.")]
        if path in self.places:
            beneath = [self.places[path], *(place for place in beneath if place.kind != "file")]
        if not beneath and "." in path:
            return self.origin(path.rpartition(".")[0])
        return "; ".join(dict.fromkeys(str(place) for place in beneath or [DEFAULT]))


def join(path: str, key: object) -> str:
    """The dotted path of `key` under `path`."""
    return f"{path}.{key}" if path else str(key)


def items(value: Any) -> list[tuple[Any, Any]]:
    """What is in a mapping or a list, by key or position; nothing for a scalar."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def nodes(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of everything inside a value."""
    for key, item in items(value):
        yield join(path, key)
        yield from nodes(item, join(path, key))


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of the scalars and the empty collections inside a value."""
    for key, item in items(value):
        if items(item):
            yield from leaves(item, join(path, key))
        else:
            yield join(path, key)


def _at(values: Any, path: str) -> Any:
    """The value at a dotted path of mappings; None where there is none."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _merge(old: Any, new: Any, path: str, tags: Mapping[str, str], places: dict[str, Source]) -> Any:
    """`new` laid over `old`; takes the places of what is replaced out of `places`."""
    if isinstance(new, dict) and isinstance(old, dict):
        tag = tags.get(path)
        if tag is None or new.get(tag, old.get(tag)) == old.get(tag):
            return old | {key: _merge(old.get(key), item, join(path, key), tags, places) for key, item in new.items()}
    if isinstance(new, dict) and isinstance(old, list) and new and set(new) <= {str(index) for index in range(len(old))}:
        return [_merge(item, new[str(i)], join(path, i), tags, places) if str(i) in new else item for i, item in enumerate(old)]
    if isinstance(old, (dict, list)):
        for node in [node for node in places if node.startswith(f"{path}.")]:
            del places[node]
    return new
