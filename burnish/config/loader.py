"""One configuration out of four sources: defaults, YAML files, environment, command line; each overrides the one before, key by key.

Owns where settings come from and the list of everything that is wrong with them. What options exist is `schema.py`, how settings merge
`layers.py`, how mistakes read `mistakes.py`. Called by the commands and by Python users (`burnish.load_config`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from burnish.config import documents, secrets
from burnish.config.errors import ConfigError, Mistake, suggest
from burnish.config.interpolation import escape, interpolate
from burnish.config.layers import DEFAULT, Layer, Source, items, join, leaves
from burnish.config.mistakes import explain, outline
from burnish.config.schema import Config

PREFIX = "BURNISH__"
MAX_FILES = 50
_HIDDEN = f"is a secret that was written as {secrets.HIDDEN}: give it again, best in the environment"
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Resolved(Generic[Schema]):
    """A checked configuration, who wrote every value (by dotted path), and the folder that relative `./file.py:fn` names start from.

    notes: what is right and may yet surprise, in words; the commands show them.
    """

    config: Schema
    provenance: dict[str, Source]
    base: Path
    notes: tuple[str, ...] = ()


def load_config(
    path: Path | str | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Resolved[Config]:
    """The configuration of a run; raises `ConfigError` with every mistake at once.

    `overrides` are texts such as `training.max_steps=20`. Of `environ` (the process's, unless given) variables such as
    `BURNISH__TRAINING__MAX_STEPS` are read.
    """
    return load(Config, Path(path) if path is not None else None, overrides, os.environ if environ is None else environ)


def load(schema: type[Schema], path: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Resolved[Schema]:
    """`load_config` for any pydantic model."""
    mistakes: list[Mistake] = []
    files = _files(path, mistakes, (), "command line") if path else []
    environment = _layer(_from_environ(environ, mistakes), mistakes)
    command_line = _layer(_from_overrides(overrides, mistakes), mistakes)
    mistakes += _set_twice(environment, command_line)

    tags = {option: info.discriminator for option, info in outline(schema, {}).items() if isinstance(info.discriminator, str)}
    given = Layer()  # one layer, as neither may set what the other does: a tag in one must not drop what the other says beside it
    for layer in (environment, command_line):
        given.add(layer, {})
    merged, notes = Layer(_defaults(schema)), []
    for layer in [*files, given]:
        secrets.remember(layer.values)
        notes += merged.switched(layer, tags)
        merged.add(layer, tags)
    mistakes += interpolate(merged)
    mistakes += [Mistake(key, _HIDDEN, merged.origin(key)) for key, value in secrets.secrets(merged.values) if value == secrets.HIDDEN]
    try:
        config = schema.model_validate(merged.values)
    except ValidationError as error:
        known = {mistake.path for mistake in mistakes}
        found = explain(error, schema, merged.values)
        raise ConfigError(mistakes + [Mistake(key, found[key], merged.origin(key)) for key in sorted(found) if key not in known]) from None
    if mistakes:
        raise ConfigError(mistakes)
    provenance = {leaf: merged.places.get(leaf, DEFAULT) for leaf in leaves(config.model_dump())}
    return Resolved(config, provenance, path.parent if path else Path(), tuple(notes))


def dump_config(resolved: Resolved[Any]) -> str:
    """The whole configuration as YAML that `load_config` reads back, with the source of every value as a comment.

    Secrets are written as `***`: `load_config` then asks for them again.
    """

    def lines(section: Any, path: str, indent: str) -> Iterator[str]:
        for key, value in items(section):
            here = join(path, key)
            head = f"{indent}{documents.write(key)}:" if isinstance(section, dict) else f"{indent}-"
            inner = list(lines(value, here, indent + "  "))
            if not inner:
                value = secrets.HIDDEN if any(secrets.secrets(value, here)) else value
                text = documents.write(escape(value) if isinstance(value, str) else value)
                yield f"{head} {text}  # {resolved.provenance[here]}"
            elif isinstance(section, dict):
                yield from (head, *inner)
            else:
                yield from (f"{head} {inner[0].lstrip()}", *inner[1:])

    return "\n".join(lines(resolved.config.model_dump(), "", "")) + "\n"


def json_schema(config: type[BaseModel] = Config) -> str:
    """The JSON schema of a configuration file, for editors."""
    schema = config.model_json_schema()
    files: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["extends"] = files | {"description": "Files that this one builds on, relative to its folder; later ones win."}
    return json.dumps(schema, indent=2) + "\n"


def _defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Defaults as the lowest layer: a section's default may differ from its class's, and overriding one key must keep the others."""
    values = {name: info.get_default(call_default_factory=True) for name, info in schema.model_fields.items() if not info.is_required()}
    return {name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in values.items()}


def _files(path: Path, mistakes: list[Mistake], trail: tuple[Path, ...], source: str) -> list[Layer]:
    """The layers of a file: those of the files that it extends, in order, then its own. `source`: who named the file."""
    if path.resolve() in trail:
        raise ConfigError([Mistake("extends", f"{path} extends itself, by way of {' -> '.join(file.name for file in trail)}", source)])
    if not path.is_file():
        nearest = suggest(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        raise ConfigError([Mistake("", f"there is no configuration file {path}{nearest}", source)])
    try:
        document = documents.read(path)
    except documents.DocumentError as error:
        raise ConfigError([Mistake("", f"the configuration file {error}", f"{path}:{error.line}")]) from error
    mistakes += [Mistake(key, message, f"{path}:{line}") for key, line, message in document.mistakes]
    extends = document.values.pop("extends", [])
    names = [extends] if isinstance(extends, str) else extends
    here = f"{path}:{document.lines.get('extends', 1)}"
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        names = []
        mistakes.append(Mistake("extends", "expected a file name or a list of file names", here))
    layers: list[Layer] = []
    for name in names:
        layers += _files(path.parent / name, mistakes, (*trail, path.resolve()), here)
        if len(layers) > MAX_FILES:
            raise ConfigError([Mistake("extends", f"brings in more than {MAX_FILES} files", here)])
    return [*layers, Layer(document.values, {node: Source("file", f"{path}:{line}") for node, line in document.lines.items()})]


def _from_environ(environ: Mapping[str, str], mistakes: list[Mistake]) -> Iterator[tuple[str, str, Source]]:
    """(dotted path, text of the value, source) of every variable with our prefix. One that nearly has it would be ignored unseen."""
    for name in sorted(environ):
        nearly = re.match(r"_?BURNISH_(?!_)(?=.*__)|_?BURNISH_{3,}", name, re.IGNORECASE)
        if nearly:
            right = PREFIX + name.removeprefix(nearly[0]).upper()
            mistakes.append(Mistake("", f"is no variable of burnish's; did you mean `{right}`?", f"environment {name}"))
        if name.startswith(PREFIX) and not nearly:
            yield name.removeprefix(PREFIX).lower().replace("__", "."), environ[name], Source("environment", name)


def _from_overrides(overrides: Sequence[str], mistakes: list[Mistake]) -> Iterator[tuple[str, str, Source]]:
    """(dotted path, text of the value, source) of every override."""
    for override in overrides:
        source = Source("command line", override)
        key, _, text = override.removeprefix("--").partition("=")
        if key and "=" in override:
            yield key, text, source
        else:
            mistakes.append(Mistake("", "an override is written KEY=VALUE, e.g. training.max_steps=20", str(source)))


def _layer(settings: Iterator[tuple[str, str, Source]], mistakes: list[Mistake]) -> Layer:
    """The layer that the settings make; of two for one key the later wins. A secret is a text as it stands."""
    layer = Layer()
    for path, text, source in settings:
        hidden = replace(source, text=f"{path}={secrets.HIDDEN}") if source.kind == "command line" else source
        try:
            value = escape(text) if secrets.hides(path) else documents.parse_value(text)
        except documents.DocumentError as error:
            mistakes.append(Mistake(path, str(error), str(hidden if secrets.mentions(text) else source)))
        else:
            layer.set(path, value, hidden if any(secrets.secrets(value, path)) else source)
    return layer


def _set_twice(environment: Layer, command_line: Layer) -> Iterator[Mistake]:
    """Keys that both set, or of which one sets a part of what the other sets: neither is the obvious winner."""
    for key in leaves(command_line.values):
        for other in leaves(environment.values):
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                sources = f"{environment.places[other]}; {command_line.places[key]}"
                yield Mistake(key, "is set by the environment and on the command line; drop one", sources)
