"""`${path.to.key}`: one value of a configuration used in another. Nothing else is interpolated: no code, no environment, no files.

A reference that is the whole text takes the value as it is; inside a longer text it is written out. `$${` is a plain `${`.
"""

from __future__ import annotations

import re
from typing import Any

from burnish.config import documents
from burnish.config.errors import Mistake, suggest
from burnish.config.layers import Layer, join, nodes
from burnish.config.secrets import hides

MAX_SIZE = 1 << 20
MAX_CHAIN = 20
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")


def interpolate(layer: Layer) -> list[Mistake]:
    """Replaces every reference in what was written (defaults are taken as they are); returns what couldn't be."""
    mistakes: list[Mistake] = []
    expander = _Expander(layer.values)

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, join(path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value or path not in layer.places:
            return value
        expander.hidden = hides(path)
        try:
            result = expander.expand(value, ())
        except ValueError as error:
            mistakes.append(Mistake(path, str(error), layer.origin(path)))
            return value
        layer.places.update({node: layer.places[path] for node in nodes(result, path)})
        return result

    layer.values = walk(layer.values, "")
    return mistakes


def escape(text: str) -> str:
    """The text that interpolates to `text`."""
    return text.replace("${", "$${")


class _Expander:
    """Follows references from one tree of values. Bounds how far they chain and how much they can blow up to.

    hidden: whether what is expanded stands where it won't be shown, so that it may hold a secret.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.size = 0
        self.hidden = False

    def expand(self, value: Any, trail: tuple[str, ...]) -> Any:
        self.size += 1 + (len(value) if isinstance(value, str) else 0)
        if self.size > MAX_SIZE or len(trail) > MAX_CHAIN:
            raise ValueError("references to references expand to too much")
        if isinstance(value, dict):
            return {key: self.expand(item, trail) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.expand(item, trail) for item in value]
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self.target(whole, trail)
        return _REFERENCE.sub(lambda match: _inline(self.target(match, trail), match[0]), value)

    def target(self, match: re.Match[str], trail: tuple[str, ...]) -> Any:
        if match[0] == "$${":
            return "${"
        name, value = match[1] or "", self.values
        if hides(name) and not self.hidden:
            raise ValueError(f"{match[0]} is a secret, which may only be copied to a key that is one too")
        if name in trail:
            raise ValueError(f"refers to itself: {' -> '.join([*trail, name])}")
        for part in name.split("."):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise ValueError(f"{match[0]} names no key{suggest(name, nodes(self.values))} ($${{ stands for a plain ${{)")
        return self.expand(value, (*trail, name))


def _inline(value: Any, reference: str) -> str:
    if value is None or isinstance(value, (dict, list)):
        raise ValueError(f"{reference} is no single value, so it can't stand inside a longer text")
    return value if isinstance(value, str) else documents.write(value)
