"""Tools: what a model may call, described to it by a JSON schema, and run within limits.

Owns schemas (from a signature and its docstring), the check of arguments, and the calling. Whatever goes wrong with a call is an answer to
the model, never an exception. Which text is a call is `text.tool_parsers`'; where plain functions run is `workers`'.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from burnish.agentic.calls import Calls
from burnish.config.errors import CallError, CallTimeout, UserError, suggest
from burnish.observe.trace import lane, span
from burnish.types import ToolCall

ToolFunction: TypeAlias = Callable[..., Any]


class BaseTool(ABC):
    """A tool as a class: `run` takes typed arguments and returns text, or what JSON can hold; plain or `async`.

    The schema comes from the signature and docstring of `run`; `description` stands for the docstring's first paragraph where it is set.
    A plain `run` works on a copy of the tool, in a process of its own: it keeps nothing from one call to the next. One of coroutines runs
    beside the episode and may keep what it likes.
    """

    description: str | None = None

    @abstractmethod
    def run(self, *arguments: Any, **named: Any) -> Any:
        """Subclasses write their own parameters, each with a type."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool ready to be called: its name for the model, its schema, and the function."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    fn: Callable[..., Any]

    @classmethod
    def of(cls, name: str, thing: type[BaseTool] | BaseTool | ToolFunction | Tool) -> Tool:
        """The tool that a class (called without arguments), an instance or a typed function is; one that is ready gets the name."""
        if isinstance(thing, Tool):
            return replace(thing, name=name)
        if isinstance(thing, type):
            thing = thing()
        fn = thing.run if isinstance(thing, BaseTool) else thing
        if not callable(fn):
            raise UserError(f"tool {name!r} must be a BaseTool or a function, got {thing!r:.80}")
        about, arguments = _read_docstring(inspect.getdoc(fn) or "")
        own = thing.description if isinstance(thing, BaseTool) else None
        return cls(name, own or about, _parameters(name, fn, arguments), fn)

    @property
    def schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def refuses(self, arguments: Mapping[str, Any]) -> str | None:
        """Why `arguments` don't fit the schema."""
        properties, required = self.parameters["properties"], self.parameters["required"]
        for name in arguments:
            if name not in properties:
                return f"{self.name} takes no argument {name!r}{suggest(name, properties)}; it takes {', '.join(properties) or 'none'}"
        for name in required:
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}"
        for name, value in arguments.items():
            if not _fits(value, properties[name]):
                return f"{self.name}: the argument {name!r} must be {_words(properties[name])}, got {value!r:.80}"
        return None


class ToolSet:
    """The tools of an agent, by name. `schemas`: as chat templates take them."""

    def __init__(self, tool_map: Mapping[str, type[BaseTool] | BaseTool | ToolFunction | Tool]) -> None:
        if not tool_map:
            raise UserError("tool_map is empty: give the agent at least one tool")
        for name in tool_map:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
                raise UserError(f"a tool's name is letters, digits and underscores, a letter first; got {name!r}")
        self._tools = {name: Tool.of(name, thing) for name, thing in tool_map.items()}
        self.schemas: Sequence[Mapping[str, Any]] = [tool.schema for tool in self._tools.values()]

    async def run(self, call: ToolCall, *, calls: Calls, timeout_s: float | None, max_characters: int) -> str:
        """The tool's answer, or an error in words, cut to `max_characters`. calls: decides where plain functions run."""
        try:
            with lane("tools"), span("tool", tool=call.name):
                return await self._answer(call, calls, timeout_s, max_characters)
        except CallTimeout:
            return f"error: {call.name} took longer than {timeout_s:g} s"
        except CallError as error:
            return _cut(f"error: {error}", max_characters)

    def run_here(self, call: ToolCall, *, max_characters: int) -> str:
        """The same of a plain tool, at once and without a limit of time: for environments whose tools are their own, as are limits."""
        tool = self._meant(call)
        if isinstance(tool, str):
            return _cut(tool, max_characters)
        try:
            return _run(tool.fn, dict(call.arguments), max_characters)
        except Exception as error:
            return _cut(f"error: {error}", max_characters)

    def _meant(self, call: ToolCall) -> Tool | str:
        """The tool that a call means, or what is wrong with the call."""
        if call.error is not None:
            return f"error: {call.error}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r:.80}{suggest(call.name, self._tools)}; there are {', '.join(self._tools)}"
        refusal = tool.refuses(call.arguments)
        return tool if refusal is None else f"error: {refusal}"

    async def _answer(self, call: ToolCall, calls: Calls, timeout_s: float | None, max_characters: int) -> str:
        tool = self._meant(call)
        if isinstance(tool, str):
            return _cut(tool, max(max_characters, 200))
        asked = {"fn": tool.fn, "arguments": dict(call.arguments), "max_characters": max_characters}
        run = _run_on_loop if inspect.iscoroutinefunction(tool.fn) else _run
        return await calls(run, asked, timeout_s=timeout_s, name=f"tool {call.name}")


def _run(fn: Callable[..., Any], arguments: dict[str, Any], max_characters: int) -> str:
    """Call a tool and make its result a text, where it runs: what is cut off is never sent."""
    return _as_text(fn(**arguments), max_characters)


async def _run_on_loop(fn: Callable[..., Any], arguments: dict[str, Any], max_characters: int) -> str:
    return _as_text(await fn(**arguments), max_characters)


def _as_text(result: Any, max_characters: int) -> str:
    """Text as it is, bytes read as UTF-8, what is yielded joined as far as there is room, anything else as JSON."""
    if isinstance(result, Iterator):
        parts, room = [], max_characters + 1
        for part in result:
            parts.append(str(part)[:room])
            room -= len(parts[-1])
            if room <= 0:
                break
        result = "".join(parts)
    if isinstance(result, bytes | bytearray):
        result = bytes(result[: 4 * max_characters + 4]).decode("utf-8", errors="replace")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return _cut(result.encode("utf-8", errors="replace").decode(), max_characters)


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[:max_characters]}\n[cut: only the first {max_characters} characters are shown]"


# -------------------------------------------------------------------------------------------------------------------------- schemas

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def _parameters(name: str, fn: Callable[..., Any], about: Mapping[str, str]) -> dict[str, Any]:
    """The JSON schema of a function's parameters."""
    hints, properties, required = typing.get_type_hints(fn), {}, []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {name!r}: the parameter {parameter} can't be given by name; write each parameter out")
        if parameter.name not in hints:
            raise UserError(f"tool {name!r}: the parameter {parameter.name!r} has no type; a model must be told what to give")
        schema = _schema(hints[parameter.name], f"tool {name!r}: the parameter {parameter.name!r}")
        if parameter.name in about:
            schema["description"] = about[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}


def _schema(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, what) for argument in arguments]}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema(arguments[0], what)}
    if origin in (dict, Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], what)}
    raise UserError(
        f"{what} has the type {hint!r}; a tool takes str, int, float, bool, None, Literal, and lists, dicts and unions of these"
    )


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value out of JSON is what a schema of `_schema` says; of a server's schema only what we know to read is held against it."""
    if "enum" in schema:
        return any(type(value) is type(allowed) and value == allowed for allowed in schema["enum"])
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if isinstance(schema.get("type"), list):
        return any(_fits(value, {**schema, "type": kind}) for kind in schema["type"])
    match schema.get("type"):
        case None:
            return True
        case "number":
            return type(value) in (int, float)
        case "array":
            return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value if "items" in schema)
        case "object":
            inner = schema.get("additionalProperties")
            return isinstance(value, dict) and (not isinstance(inner, Mapping) or all(_fits(item, inner) for item in value.values()))
        case name:
            return _JSON_TYPES.get(type(value)) == name


def _words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(map(_words, schema["anyOf"]))
    kind = schema.get("type", "something else")
    return f"{kind} of {_words(schema['items'])}" if "items" in schema else str(kind)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and what is said of each parameter: `name: …` lines under "Args:", or `:param name: …`."""
    about = " ".join(text.split("\n\n")[0].split())
    lines = re.findall(r"^\s*:param (\w+):\s*(.+)$", text, flags=re.MULTILINE)
    section = re.search(r"^\s*(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.+\n?)+)", text, flags=re.MULTILINE)
    if section:
        lines += re.findall(r"^\s+(\w+)(?: \([^)]*\))?:\s*(.+)$", section[1], flags=re.MULTILINE)
    return about, {name: said.strip() for name, said in lines}


__all__ = ["BaseTool", "Tool", "ToolFunction", "ToolSet"]
