"""YAML as plain values: reading with the line of every key, and writing single values so that they read back the same.

Follows the YAML 1.2 core schema (`1e-4` is a number; `on`, `yes` and `1_000` are texts) and refuses what a configuration never needs and an
attacker might: tags, duplicate keys, alias bombs, huge or deeply nested files. Knows nothing of burnish's options. Called by `loader.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from burnish.config.layers import join
from burnish.config.secrets import hides

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50
MAX_DIGITS = 100

_UNTAGGED = "untagged"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {word: value for value, text in ((None, "null"), (True, "true"), (False, "false")) for word in (text, text.title(), text.upper())}
_WORDS |= {"": None, "~": None}
_PLAIN = re.compile(r"[A-Za-z_./]([A-Za-z0-9_./:-]*[A-Za-z0-9_./])?")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


class DocumentError(ValueError):
    """A text that isn't acceptable YAML; `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class Document:
    """`values` as plain dicts, lists and scalars; `lines`: dotted path of every node -> line; `mistakes`: (path, line, what is wrong)."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    mistakes: list[tuple[str, int, str]] = field(default_factory=list)


class _Composer(yaml.SafeLoader):
    """Parses into nodes and resolves nothing, so that a tag in the text is the only way to a tag."""

    yaml_implicit_resolvers = {}
    DEFAULT_SCALAR_TAG = DEFAULT_SEQUENCE_TAG = DEFAULT_MAPPING_TAG = _UNTAGGED


def read(path: Path) -> Document:
    """The mapping in a file; raises `DocumentError` when it can't be read as one at all."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise DocumentError(f"is larger than {MAX_BYTES} bytes", 1)
        document = parse(raw.decode("utf-8"))
    except OSError as error:
        raise DocumentError(f"can't be read: {error.strerror}", 1) from error
    except UnicodeDecodeError as error:
        raise DocumentError("isn't UTF-8 text", 1) from error
    document.values = {} if document.values is None else document.values
    if not isinstance(document.values, dict):
        raise DocumentError("must be a mapping of sections", 1)
    return document


def parse(text: str) -> Document:
    """The document in a YAML text."""
    try:
        root = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = (error.problem or error.context or "").partition("undefined alias ")  # it names the alias: a password may begin with *
        raise DocumentError(f"isn't YAML: {''.join(problem[:2]).strip()}", line) from None
    except yaml.YAMLError as error:
        raise DocumentError(f"isn't YAML: {str(error).splitlines()[0]}", 1) from error
    except RecursionError as error:
        raise DocumentError("is nested too deeply", 1) from error
    document = Document()
    if root is not None:
        document.values = _Reader(document).value(root, "", 0)
    return document


def parse_value(text: str) -> Any:
    """The value of an override: a flow collection or quoted text as YAML, anything else one plain scalar, whatever it holds."""
    text = text.strip()
    if text[:1] not in tuple("[{\"'!&*"):
        return scalar(text)
    document = parse(text)
    for _, line, message in document.mistakes:
        raise DocumentError(message, line)
    return document.values


def scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):  # Python refuses to write out numbers of thousands of digits, and nobody means one
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= MAX_DIGITS else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float(text.replace(".", ""))
    return text


def write(value: Any) -> str:
    """One scalar or empty collection, on one line, so that `parse` gives it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value) if abs(value) < float("inf") else {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[repr(value)]
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and scalar(value) == value:
            return value
        return '"' + "".join(_ESCAPES.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
    return repr(list(value) if isinstance(value, tuple) else value)


class _Reader:
    """Turns nodes into values. Aliases share nodes, so the bound counts values made, not nodes parsed."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.made = 0

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        line = node.start_mark.line + 1
        self.made += 1
        if self.made > MAX_NODES:
            raise DocumentError(f"holds more than {MAX_NODES} values once its aliases are expanded", line)
        if depth > MAX_DEPTH:
            raise DocumentError(f"is nested deeper than {MAX_DEPTH} levels", line)
        self.document.lines[path] = line
        if node.tag != _UNTAGGED:
            tag = "" if hides(path) else f" {node.tag.replace('tag:yaml.org,2002:', '!!')}"  # a password may begin with !
            return self.mistake(path, line, f"the tag{tag} is refused; write a plain or a quoted value")
        if isinstance(node, yaml.ScalarNode):
            return scalar(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, join(path, index), depth + 1) for index, item in enumerate(node.value)]
        return self.mapping(node, path, depth)

    def mapping(self, node: yaml.Node, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, item in node.value:
            line = key_node.start_mark.line + 1
            key = self.value(key_node, path, depth + 1)
            if not isinstance(key, str):
                self.mistake(path, line, f"a key must be text, got {key!r}")
            elif key in values:
                self.mistake(join(path, key), line, f"the key is written twice, first in line {self.document.lines[join(path, key)]}")
            else:
                values[key] = self.value(item, join(path, key), depth + 1)
                self.document.lines[join(path, key)] = line
        self.document.lines[path] = node.start_mark.line + 1
        return values

    def mistake(self, path: str, line: int, message: str) -> None:
        self.document.mistakes.append((path, line, message))
