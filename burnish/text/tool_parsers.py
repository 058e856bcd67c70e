"""Tool calls as model families write them: from a reply's text to calls, well formed or not.

Owns the formats. One parser serves training and evaluation, and none raises: what can't be read is a call with an `error`, which the
environment answers. Reasoning (`<think>…</think>`, closed or not) is never searched. Called by `agentic.agents`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from burnish.types import ToolCall

MAX_CALLS = 16
"""Calls of one reply that are read; one more stands for the others, as an error."""
MAX_CHARACTERS = 65_536
"""Longest single call that is read."""


@dataclass(frozen=True, slots=True)
class ToolParser:
    """`calls`: a reply's text → the calls in it. `example`: how a call is written, for templates that don't tell the model."""

    calls: Callable[[str], list[ToolCall]]
    example: str


def _parser(find: Callable[[str], Iterator[ToolCall]], example: str) -> ToolParser:
    def calls(reply: str) -> list[ToolCall]:
        found: list[ToolCall] = []
        for call in find(_without_reasoning(reply)):
            if len(found) == MAX_CALLS:
                return [*found, ToolCall("", error=f"only the first {MAX_CALLS} calls of a message are run")]
            found.append(call)
        return found

    return ToolParser(calls, example)


def _without_reasoning(reply: str) -> str:
    """What stands outside of reasoning. The template may have opened it, so an end without a beginning closes it too."""
    text = re.sub(r"<think>.*?</think>", "", reply, flags=re.DOTALL)
    return text.rpartition("</think>")[2].partition("<think>")[0]


# ------------------------------------------------------------------------------------------------------------------------- formats


def _tagged(text: str) -> Iterator[ToolCall]:
    """Qwen, Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""
    for part in text.split("<tool_call>")[1:]:
        body, closed, _ = part.partition("</tool_call>")
        yield _from_json(body) if closed else ToolCall("", error="the call isn't closed by </tool_call>")


def _bare(text: str) -> Iterator[ToolCall]:
    """Llama 3: the reply is one JSON object with "name" and "parameters", or several parted by `;`, perhaps after `<|python_tag|>`."""
    text = text.strip()
    tagged = text.startswith("<|python_tag|>")
    text = text.removeprefix("<|python_tag|>").strip()
    while text:
        if not tagged and not _means_a_call(text):
            return
        value, rest = _first_value(text)
        if rest is None:
            yield ToolCall("", error=str(value))
            return
        yield _from_value(value)
        text = rest.strip().removeprefix(";").strip()


def _fenced_code(text: str) -> Iterator[ToolCall]:
    """Gemma: a fence "tool_code" around Python calls with keyword arguments, one a line, perhaps inside `print(…)`."""
    for part in re.split(r"```tool_code\b", text)[1:]:
        body, closed, _ = part.partition("```")
        if not closed:
            yield ToolCall("", error="the fence ```tool_code isn't closed")
        else:
            yield from _from_python(body.strip())


def _plain_json(text: str) -> Iterator[ToolCall]:
    """The reply, or the one fence in it, is an object with "name" and "arguments", or a list of such objects."""
    text = text.strip()
    fence = re.fullmatch(r".*?```(?:json)?\s*\n(.*?)```.*", text, flags=re.DOTALL)
    text = fence[1].strip() if fence else text
    if not _means_a_call(text):
        return
    value, rest = _first_value(text)
    if rest is None:
        yield ToolCall("", error=str(value))
    elif rest.strip():
        yield ToolCall("", error=f"there is something behind the call: {rest.strip()[:40]!r}")
    else:
        yield from map(_from_value, value if isinstance(value, list) else [value])


PARSERS = {
    "qwen": _parser(_tagged, '<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>'),
    "hermes": _parser(_tagged, '<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>'),
    "llama3": _parser(_bare, '{"name": NAME, "parameters": {…}}'),
    "gemma": _parser(_fenced_code, "```tool_code\nNAME(argument=value)\n```"),
    "json": _parser(_plain_json, '{"name": NAME, "arguments": {…}}'),
}
"""By the name that `tool_parser_name` takes."""


# --------------------------------------------------------------------------------------------------------------------- reading one


class _Unreadable(ValueError):
    """Why a text isn't a call."""


def _means_a_call(text: str) -> bool:
    """Whether a reply that should be JSON tries to call something; any other is an answer."""
    return text[:1] in ("{", "[") and '"name"' in text


def _from_json(text: str) -> ToolCall:
    value, rest = _first_value(text.strip())
    if rest is None:
        return ToolCall("", error=str(value))
    if rest.strip():
        return ToolCall("", error=f"there is something behind the call's JSON: {rest.strip()[:40]!r}")
    return _from_value(value)


def _first_value(text: str) -> tuple[Any, str | None]:
    """The JSON value that `text` begins with and what follows it; or why there is none, and None."""
    if len(text) > MAX_CHARACTERS:
        return f"the call has {len(text)} characters; at most {MAX_CHARACTERS} are read", None
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refused, parse_int=_integer)
    try:
        value, end = decoder.raw_decode(text)
    except RecursionError:
        return "the call is nested too deeply", None
    except ValueError as error:
        return f"the call isn't valid JSON: {error}", None
    return value, text[end:]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Unreadable("a key is given twice")
    return found


def _refused(constant: str) -> Any:
    raise _Unreadable(f"{constant} isn't a number in JSON")


def _integer(digits: str) -> int:
    if len(digits) > 1000:
        raise _Unreadable(f"an integer of {len(digits)} digits")
    return int(digits)


def _from_value(value: Any) -> ToolCall:
    """A call out of `{"name": …, "arguments" or "parameters": {…}}`."""
    if not isinstance(value, dict):
        return ToolCall("", error=f"a call must be a JSON object, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str):
        return ToolCall("", error='a call needs a string "name"')
    key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
    if not isinstance(value.get(key), dict):
        given = type(value[key]).__name__ if key in value else "nothing"
        return ToolCall(name, error=f'a call needs an object "{key}", got {given}')
    return ToolCall(name, value[key])


def _from_python(code: str) -> Iterator[ToolCall]:
    """Calls out of Python source, which is read and never run."""
    if len(code) > MAX_CHARACTERS:
        yield ToolCall("", error=f"the call has {len(code)} characters; at most {MAX_CHARACTERS} are read")
        return
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield ToolCall("", error=f"tool_code isn't Python: {error}")
        return
    if not statements:
        yield ToolCall("", error="the fence ```tool_code is empty")
    for statement in statements:
        yield _from_statement(statement)


def _from_statement(statement: ast.stmt) -> ToolCall:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" and len(call.args) == 1:
        call = call.args[0]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return ToolCall("", error="tool_code must hold calls such as NAME(argument=value), and nothing else")
    name, keywords = call.func.id, {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if call.args or len(keywords) < len(call.keywords):
        return ToolCall(name, error="arguments must be given by name, each once")
    try:
        return ToolCall(name, {key: ast.literal_eval(value) for key, value in keywords.items()})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ToolCall(name, error="arguments must be plain values: numbers, strings, lists, dicts, True, False, None")


__all__ = ["MAX_CALLS", "MAX_CHARACTERS", "PARSERS", "ToolParser"]
