"""From what pydantic reports to what a person reads: the key's path, what was expected, what was got, the nearest name.

Owns the words. Where a value was written is the loader's knowledge; it adds the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from burnish.config import documents
from burnish.config.errors import suggest
from burnish.config.layers import items, join
from burnish.config.secrets import HIDDEN, secrets

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "model_attributes_type": "a mapping of options",
    "model_type": "a mapping of options",
    "string_type": "a text",
    "tuple_type": "a list",
}
_QUOTED = re.compile("'([^']*)'")
_BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_BOUND_WORDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def outline(schema: type[BaseModel], values: Any, prefix: str = "") -> dict[str, FieldInfo]:
    """Every option's dotted path (list positions left out). Of a tagged union, the branch that `values` names; all when it names none."""
    found: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        found[prefix + name] = info
        inner = values.get(name) if isinstance(values, dict) else None
        tag = info.discriminator if isinstance(info.discriminator, str) else None
        for model in _models(info.annotation):
            chosen = inner.get(tag) if tag and isinstance(inner, dict) else None
            if tag is None or chosen is None or chosen in get_args(model.model_fields[tag].annotation):
                found |= outline(model, inner, f"{prefix}{name}.")
    return found


def explain(error: ValidationError, schema: type[BaseModel], values: Any) -> dict[str, str]:
    """Dotted path -> what is wrong there, in words. What the branches of a union expected becomes one sentence."""
    options = outline(schema, values)
    expected: dict[str, list[str]] = {}
    ends: dict[str, str] = {}
    found: dict[str, str] = {}
    for failure in error.errors(include_url=False):
        kind, got, context = failure["type"], failure["input"], failure.get("ctx", {})
        path = _path(failure["loc"], kind, values)
        if kind == "union_tag_invalid":
            path, got = join(path, context["discriminator"].strip("'")), context["tag"]
        if kind in _EXPECTED or "expected" in context or "expected_tags" in context:
            words = _EXPECTED.get(kind) or context.get("expected") or context["expected_tags"]
            expected.setdefault(path, []).append(words)
            ends[path] = f", got {_show(got, path)}{suggest(str(got), _QUOTED.findall(words))}"
        else:
            found[path] = _explain_one(kind, path, got, context, options) or str(context.get("error", failure["msg"]))
    return found | {path: f"expected {' or '.join(dict.fromkeys(words))}{ends[path]}" for path, words in expected.items()}


def _explain_one(kind: str, path: str, got: Any, context: dict[str, Any], options: dict[str, FieldInfo]) -> str | None:
    """What is wrong where a type as such would fit; None where pydantic's own words must do."""
    if kind == "extra_forbidden":
        return f"there is no such key{_of_another_branch(path, options) or _nearest(path, options)}"
    if kind == "missing":
        return "is needed and not set"
    if kind in _BOUNDS:
        bound = _BOUNDS[kind]
        return f"must be {_BOUND_WORDS[bound]} {context[bound]:g}, got {_show(got, path)}"
    return f"must match {context['pattern']}, got {_show(got, path)}" if kind == "string_pattern_mismatch" else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The option models inside an annotation, through unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _path(location: tuple[int | str, ...], kind: str, values: Any) -> str:
    """The dotted path of pydantic's location, without the names of union branches that pydantic puts between the keys."""
    path = ""
    for part in location:
        inside = dict(items(values))
        if part in inside:
            values, path = inside[part], join(path, part)
    return join(path, location[-1]) if kind == "missing" else path


def _of_another_branch(path: str, options: dict[str, FieldInfo]) -> str:
    """Which branches of a tagged union have the key that the chosen one hasn't; nothing outside of unions."""
    section, _, name = path.rpartition(".")
    info = options.get(section)
    if info is None or not isinstance(info.discriminator, str):
        return ""
    tag = info.discriminator
    having = [get_args(model.model_fields[tag].annotation)[0] for model in _models(info.annotation) if name in model.model_fields]
    return f"; it is an option of {', '.join(having)}" if having else ""


def _nearest(path: str, options: dict[str, FieldInfo]) -> str:
    """The nearest key in the same section, else the place elsewhere that has a key of this name."""
    section, _, name = ".".join(part for part in path.split(".") if not part.isdigit()).rpartition(".")
    siblings = [option.rpartition(".")[2] for option in options if option.rpartition(".")[0] == section]
    elsewhere = next((option for option in options if option.rpartition(".")[2] == name), None)
    return suggest(name, siblings) or (f"; did you mean `{elsewhere}`?" if elsewhere else f"; known here: {', '.join(sorted(siblings))}")


def _show(value: Any, path: str) -> str:
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if any(secrets(value, path)):
        return HIDDEN
    text = repr(value) if isinstance(value, str) else documents.write(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
