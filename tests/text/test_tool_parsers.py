"""Calls as models write them, well formed or not; B079: what stands in reasoning is no call, in training and evaluation alike."""

from __future__ import annotations

import json

import pytest

from burnish.text.tool_parsers import MAX_CALLS, MAX_CHARACTERS, PARSERS
from burnish.types import ToolCall

ADD = ToolCall("add", {"a": 1, "b": [2, None]})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, null]}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, null]}}'
GEMMA = "```tool_code\nadd(a=1, b=[2, None])\n```"
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, null]}}'
WRITTEN = {"qwen": HERMES, "hermes": HERMES, "llama3": LLAMA, "gemma": GEMMA, "json": JSON}
assert WRITTEN.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read_and_an_answer_is_none(name: str) -> None:
    calls = PARSERS[name].calls
    assert calls(WRITTEN[name]) == [ADD]
    assert calls("The answer is 3.") == calls("") == calls('{"answer": 3}') == []


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "reply, count",
    [
        ("<think>I could</think>{call}", 1),
        ("<think>{call}</think>It is 3.", 0),
        ("<think>{call}", 0),  # cut while it thought
        ("{call}</think>It is 3.", 0),  # the template had opened the reasoning
        ("so {call} it goes</think>\n{call}", 1),
        ("<think>a</think><think>{call}</think>{call}", 1),
        ("<think>a</think>{call}<think>{call}", 1),
    ],
)
def test_b079_reasoning_holds_no_calls_closed_or_not(name: str, reply: str, count: int) -> None:
    assert PARSERS[name].calls(reply.replace("{call}", WRITTEN[name])) == [ADD] * count


@pytest.mark.parametrize(
    "name, reply, count",
    [
        ("qwen", f"I add.\n{HERMES}\n{HERMES} so", 2),
        ("qwen", f"```\n{HERMES}\n```", 1),
        ("hermes", HERMES.replace("\n", ""), 1),
        ("llama3", f"<|python_tag|>{LLAMA}", 1),
        ("llama3", f"{LLAMA}; {LLAMA};{LLAMA}", 3),
        ("llama3", LLAMA.replace("parameters", "arguments"), 1),
        ("gemma", "```tool_code\nprint(add(a=1, b=[2, None]))\nadd(b=[2, None], a=1)\n```", 2),
        ("json", f"Here:\n```json\n{JSON}\n```", 1),
        ("json", f"[{JSON}, {JSON}]", 2),
    ],
)
def test_several_calls_and_words_around_them(name: str, reply: str, count: int) -> None:
    assert PARSERS[name].calls(reply) == [ADD] * count


def tagged(body: str) -> list[ToolCall]:
    return PARSERS["qwen"].calls(f"<tool_call>{body}</tool_call>")


@pytest.mark.parametrize(
    "body, error",
    [
        ('{"name": "add", "arguments": {"a": 1}', "isn't valid JSON"),
        ("add(1)", "isn't valid JSON"),
        ("", "isn't valid JSON"),
        ('{"arguments": {}}', 'needs a string "name"'),
        ('{"name": 5, "arguments": {}}', 'needs a string "name"'),
        ('{"name": "add"}', 'needs an object "arguments", got nothing'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', 'needs an object "arguments", got str'),
        ('{"name": "add", "arguments": null}', "got NoneType"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN isn't a number in JSON"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity isn't a number"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "a key is given twice"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "a key is given twice"),
        ('{"name": "add", "arguments": {}} and more', "something behind the call"),
        ('"add"', "must be a JSON object, got str"),
        ('{"name": "add", "arguments": ' + "[" * 30_000 + "]" * 30_000 + "}", "nested too deeply"),
        ('{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}", "an integer of 5000 digits"),
        ('{"name": "add", "arguments": {"a": "' + "x" * 1_000_000 + '"}}', f"at most {MAX_CHARACTERS} are read"),
    ],
)
def test_b077_r40_what_cant_be_read_is_a_call_with_an_error(body: str, error: str) -> None:
    (call,) = tagged(body)
    assert call.error is not None and error in call.error


def test_a_call_that_was_cut_is_an_error() -> None:
    (call,) = PARSERS["qwen"].calls('<tool_call>{"name": "add", "argu')
    assert call.error == "the call isn't closed by </tool_call>"
    (call,) = PARSERS["gemma"].calls("```tool_code\nadd(a=1")
    assert call.error == "the fence ```tool_code isn't closed"
    (call,) = PARSERS["llama3"].calls('{"name": "add", "parameters": {"a"')
    assert call.error is not None and "isn't valid JSON" in call.error


@pytest.mark.parametrize(
    "code, error",
    [
        ("add(1)", "by name"),
        ("add(a=1, **b)", "by name"),
        ("add(a=b)", "plain values"),
        ("add(a=__import__('os').system('x'))", "plain values"),
        ("x = add(a=1)", "and nothing else"),
        ("import os", "and nothing else"),
        ("math.add(a=1)", "and nothing else"),
        ("add(a=", "isn't Python"),
        ("", "is empty"),
        ("add(a=" + "-" * 60_000 + "1)", "error"),
        ("(" * 30_000, "isn't Python"),
    ],
)
def test_python_is_read_and_never_run(code: str, error: str) -> None:
    (call,) = PARSERS["gemma"].calls(f"```tool_code\n{code}\n```")
    assert call.error is not None and (error == "error" or error in call.error)


def test_r40_ten_thousand_calls_are_a_few_and_an_error() -> None:
    many = PARSERS["qwen"].calls(HERMES * 10_000)
    assert many[:-1] == [ADD] * MAX_CALLS and many[-1].error == f"only the first {MAX_CALLS} calls of a message are run"


def test_examples_are_what_the_parsers_read() -> None:
    for name, parser in PARSERS.items():
        example = parser.example.replace("NAME", '"f"' if name != "gemma" else "f").replace("{…}", json.dumps({"argument": 1}))
        assert parser.calls(example.replace("=value", "=1")) == [ToolCall("f", {"argument": 1})], name
