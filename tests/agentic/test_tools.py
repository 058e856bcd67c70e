"""Tools: schemas from signatures, arguments checked, and whatever goes wrong an answer to the model."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from burnish.agentic.agents import ToolAgent
from burnish.agentic.calculator import Calculator, calculate
from burnish.agentic.calls import Calls
from burnish.agentic.environments import ToolEnvironment
from burnish.agentic.toolbox import Python
from burnish.agentic.tools import BaseTool, Tool, ToolSet
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import UserError
from burnish.text.chat import ChatTemplate
from burnish.text.codec import Codec
from burnish.text.tool_parsers import PARSERS
from burnish.types import Status, ToolCall, Trajectory
from tests.agentic import worlds
from tests.agentic.episodes import context, play, script


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(4)
    yield made
    made.close()


def run(tool: Any, arguments: dict[str, Any], *, pool: WorkerPool | None = None, timeout_s: float = 20.0, max_characters: int = 100) -> str:
    call = ToolSet({"tool": tool}).run(ToolCall("tool", arguments), calls=Calls(pool), timeout_s=timeout_s, max_characters=max_characters)
    return asyncio.run(call)


# -------------------------------------------------------------------------------------------------------------------------- schemas


def search(
    query: str, kinds: list[Literal["a", "b"]], limit: int = 5, exact: bool | None = None, where: dict[str, float] | None = None
) -> str:
    """Find things that
    match.

    More about it.

    :param query: what to look for
    :param limit: how many
    """
    return f"{query} {kinds} {limit} {exact} {where}"


def test_a_schema_comes_from_the_signature_and_docstring() -> None:
    function = Tool.of("search", search).schema["function"]
    assert function["description"] == "Find things that match."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
            "limit": {"type": "integer", "description": "how many"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "where": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]},
        },
        "required": ["query", "kinds"],
    }


def test_a_class_an_instance_and_a_function_are_tools() -> None:
    schema = Tool.of("c", worlds.MyCalculator).schema
    assert schema == Tool.of("c", worlds.MyCalculator()).schema
    assert schema["function"]["parameters"]["properties"]["b"] == {"type": "integer", "description": "the right number"}
    assert run(worlds.MyCalculator, {"a": 2, "b": 3, "op": "*"}) == "6" and run(worlds.shout, {"text": "a", "times": 2}) == "AA"


@pytest.mark.parametrize(
    "fn, error",
    [
        (lambda x: x, "has no type"),
        (eval("lambda *words: 1"), "can't be given by name"),
        (eval("lambda **named: 1"), "can't be given by name"),
        (7, "must be a BaseTool or a function"),
    ],
)
def test_a_function_that_says_too_little_is_refused(fn: Any, error: str) -> None:
    with pytest.raises(UserError, match=error):
        ToolSet({"tool": fn})


def test_names_and_types_that_no_model_can_use_are_refused() -> None:
    def odd(x: complex) -> str:
        return ""

    with pytest.raises(UserError, match="has the type <class 'complex'>"):
        ToolSet({"odd": odd})
    for name in ("", "__class__", "a b", "x" * 65, "1a"):
        with pytest.raises(UserError, match="a tool's name is letters"):
            ToolSet({name: worlds.shout})
    with pytest.raises(UserError, match="tool_map is empty"):
        ToolSet({})


# -------------------------------------------------------------------------------------------------------------------------- calling


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"tool_name": "x"}, "tool takes no argument 'tool_name'; it takes a, b, op"),
        ({"a": 1, "b": 2, "self": 3}, "tool takes no argument 'self'"),
        ({"a": 1, "b": 2, "fn": 3}, "tool takes no argument 'fn'"),
        ({"a": 1, "b": 2, "opp": "+"}, "did you mean `op`?"),
        ({"a": 1}, "tool needs the argument 'b'"),
        ({"a": 1, "b": "2"}, "the argument 'b' must be integer, got '2'"),
        ({"a": True, "b": 2}, "the argument 'a' must be integer, got True"),
        ({"a": 1.0, "b": 2}, "the argument 'a' must be integer, got 1.0"),
    ],
)
def test_b077_arguments_that_dont_fit_are_told(arguments: dict[str, Any], error: str) -> None:
    said = run(worlds.MyCalculator, arguments)
    assert said.startswith("error: ") and error in said


@pytest.mark.parametrize("name", ["nope", "__class__", "", "run", "x" * 10_000])
def test_b077_an_unknown_tool_is_told(name: str) -> None:
    tools = ToolSet({"shout": worlds.shout})
    said = asyncio.run(tools.run(ToolCall(name), calls=Calls(None), timeout_s=5, max_characters=100))
    assert said.startswith("error: there is no tool") and "there are shout" in said and len(said) < 200


def test_a_call_that_couldnt_be_read_is_told() -> None:
    tools = ToolSet({"shout": worlds.shout})
    said = asyncio.run(tools.run(ToolCall("shout", error="a key is given twice"), calls=Calls(None), timeout_s=5, max_characters=100))
    assert said == "error: a key is given twice"


def test_an_exception_is_told_with_its_place() -> None:
    def broken(x: int) -> str:
        """Divide."""
        return str(1 // x)

    assert run(broken, {"x": 0}).startswith("error: ZeroDivisionError: integer division or modulo by zero (test_tools.py:")


def test_a_plain_tool_that_hangs_is_killed(pool: WorkerPool) -> None:
    start, before = time.monotonic(), pool.killed
    assert run(worlds.Sleeps, {"seconds": 60.0}, pool=pool, timeout_s=0.2) == "error: tool took longer than 0.2 s"
    assert pool.killed == before + 1 and time.monotonic() - start < 10
    assert run(worlds.Sleeps, {"seconds": 0.0}, pool=pool) == "rested"


def test_an_async_tool_runs_on_the_loop_and_may_keep_things() -> None:
    class Counter(BaseTool):
        def __init__(self) -> None:
            self.count = 0

        async def run(self) -> int:
            """Count."""
            await asyncio.sleep(0)
            self.count += 1
            return self.count

    tools = ToolSet({"count": Counter})

    async def twice() -> list[str]:
        return [await tools.run(ToolCall("count"), calls=Calls(None), timeout_s=5, max_characters=9) for _ in range(2)]

    assert asyncio.run(twice()) == ["1", "2"]


@pytest.mark.parametrize("tool", [worlds.endless, worlds.binary, worlds.shout])
def test_r41_output_is_cut_with_a_notice(pool: WorkerPool, tool: Any) -> None:
    said = run(tool, {"text": "a" * 10_000_000} if tool is worlds.shout else {}, pool=pool)
    assert said.endswith("\n[cut: only the first 100 characters are shown]") and len(said) == 100 + len(
        "\n[cut: only the first 100 characters are shown]"
    )
    assert said.encode()


# ----------------------------------------------------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    "expression, value",
    [("2+3*4", 14), ("(2 + 3) * 4", 20), ("-7 // 2", -4), ("7 % 3", 1), ("2 ** 10", 1024), ("sqrt(2) ** 2", 2.0), ("round(pi, 2)", 3.14)]
    + [("max(1, 2.5, -3)", 2.5), ("1e3", 1000.0), ("2 ** -1", 0.5), ("10 ** 400 // 10 ** 399", 10)],
)
def test_the_calculator_calculates(expression: str, value: float) -> None:
    assert math.isclose(calculate(expression), value) and type(calculate(expression)) is type(value)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch PWN')", "().__class__.__mro__", "\\pi)+__import__('os').system('touch PWN')",
        "open('/etc/passwd').read()", "x", "'a' * 3", "True", "1 if 1 else 2", "[1]", "lambda: 1", "1 << 9", "abs(x=1)", "1 = 1", "", "1;2",
        "9 ** 9 ** 9", "2 ** 4097", "10 ** 1000 * 10 ** 1000", "round(5, -1000000000)", "(-8) ** 0.5", "1" * 2000, "(" * 300 + "1",
        "1_000_000 ** 999", "1j", "max()", "1 / 0", "exp(9999)", "9" * 999 + "* 9 ** 999",
    ],
)  # fmt: skip
def test_b135_anything_else_is_an_error_at_no_cost(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with pytest.raises((ValueError, ArithmeticError, TypeError)):
        calculate(expression)
    assert time.process_time() - start < 1 and os.listdir(tmp_path) == []


def test_the_calculator_is_a_tool() -> None:
    assert run(Calculator, {"expression": "6 * 7"}) == "42"
    assert run(Calculator, {"expression": "os.getcwd()"}).startswith("error: ValueError: 'os.getcwd()' isn't allowed")


# ------------------------------------------------------------------------------------------------------------------ agent and world

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": 7, "op": "*"}}\n</tool_call>'
QUESTION = {"prompt": [{"role": "user", "content": "6 * 7?"}]}


def tool_agent(**options: Any) -> ToolAgent:
    return ToolAgent("Use the tools.", **({"tool_parser_name": "qwen", "tool_map": {"calculator": worlds.MyCalculator}} | options))


def ask(codec: Codec, *says: str, agent: ToolAgent | None = None, env: ToolEnvironment | None = None, **options: Any) -> Trajectory:
    episode = context(script(codec, *says), codec, context=8000, max_prompt_tokens=2000, **options)
    return play(episode, env or ToolEnvironment(QUESTION), agent=agent or tool_agent(), max_tokens=500)


def test_calls_are_run_results_go_back_and_an_answer_ends_it(codec: Codec, pool: WorkerPool) -> None:
    got = ask(codec, f"I multiply.\n{CALL}", "42", calls=Calls(pool))
    assert got.status is Status.OK and got.final_text == "42"
    assert [message["role"] for message in got.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert got.messages[0]["content"] == "Use the tools." and got.messages[3]["content"] == "42"
    assert [step.info for step in got.steps] == [{"tool_calls": 1, "tool_errors": 0}, {}]
    text = codec.tokenizer.decode(got.ids, skip_special=False)
    assert "Their JSON schemas:" in text and "To call one, write:\n<tool_call>" in text, "ChatML knows no tools: they are told in words"
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n42<|im_end|>")
    assert codec.tokenizer.decode(got.ids[got.sampled]) == f"I multiply.\n{CALL}42"


def test_every_mistake_is_an_answer_and_the_episode_goes_on(codec: Codec) -> None:
    says = ["<tool_call>{</tool_call>", '<tool_call>{"name": "no", "arguments": {}}</tool_call>' + CALL, "<tool_call>", "done"]
    got = ask(codec, *says)
    results = [message["content"] for message in got.messages if message["role"] == "tool"]
    assert got.status is Status.OK and [result.startswith("error: ") for result in results] == [True, True, False, True]
    assert [step.info.get("tool_errors") for step in got.steps] == [1, 1, 1, None]


def test_r41_what_a_tool_says_forges_no_call_role_or_stop_token(codec: Codec) -> None:
    call = '<tool_call>{"name": "forges", "arguments": {}}</tool_call>'
    got = ask(codec, call, "done", agent=tool_agent(tool_map={"forges": worlds.forges, "shout": worlds.shout}))
    assert len(got.steps) == 2 and got.steps[0].info["tool_calls"] == 1
    ends = [int(i) for i in got.ids if i == 2]
    assert len(ends) == 5, "system, user, call, result, answer; none out of the result"


def test_a_model_that_only_calls_ends_at_the_limit(codec: Codec) -> None:
    got = ask(codec, *[CALL] * 5, limits={"max_turns": 3})
    assert got.status is Status.TRUNCATED and len(got.steps) == 3


WITH_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\nTools:' }}
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}
{{- '<|im_end|>' }}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NO_TOOLS = """
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def with_template(codec: Codec, source: str) -> Codec:
    return Codec(codec.tokenizer, ChatTemplate({"default": source}, codec.tokenizer))


def test_a_template_that_takes_tools_gets_their_schemas(codec: Codec) -> None:
    got = ask(with_template(codec, WITH_TOOLS), CALL, "42")
    text = codec.tokenizer.decode(got.ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nUse the tools.\nTools: calculator<|im_end|><|im_start|>user\n6 * 7?")
    assert "<|im_start|>user\n<tool_response>42</tool_response><|im_end|>" in text and got.forks == ()


def test_a_template_without_tool_results_gets_them_as_the_users(codec: Codec) -> None:
    got = ask(with_template(codec, NO_TOOLS), CALL + CALL, "42")
    text = codec.tokenizer.decode(got.ids, skip_special=False)
    assert "<|im_start|>user\n```tool_output\n42\n```\n```tool_output\n42\n```<|im_end|><|im_start|>assistant\n42" in text
    assert got.status is Status.OK and got.messages[3]["role"] == "tool"


def test_b079_one_parser_for_training_and_evaluation() -> None:
    for name, parser in PARSERS.items():
        said = "<think>" + parser.example + "</think>no call"
        assert tool_agent(tool_parser_name=name).update_from_model(said).tool_calls == parser.calls(said) == []


def test_mistakes_in_an_agents_options_are_told_at_once() -> None:
    with pytest.raises(UserError, match="no tool parser 'qwem'; did you mean `qwen`"):
        tool_agent(tool_parser_name="qwem")
    for timeout_s in (0, -1, math.nan, math.inf, "5", None, True):
        with pytest.raises(UserError, match="timeout_s of a tool's call must be finite and > 0"):
            ToolEnvironment({}, timeout_s=timeout_s)  # type: ignore[arg-type]


def test_an_agent_without_tools_is_the_environments_error(codec: Codec) -> None:
    from burnish.agentic.agents import Action, ModelAgent

    class Odd(ModelAgent):
        def update_from_model(self, response: str) -> Action:
            return Action(response, [ToolCall("x")])

    got = play(context(script(codec, "a"), codec), ToolEnvironment(QUESTION), agent=Odd())
    assert got.status is Status.ENV_ERROR and got.error is not None and "needs an agent with tools" in got.error


# ------------------------------------------------------------------------------------------------------------------ Python, shut in


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
def test_python_runs_in_the_sandbox_and_says_what_it_printed(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "secret")
    tool = Python(seconds=3.0)
    assert Tool.of("python", tool).schema["function"]["parameters"]["required"] == ["code"]
    assert run(tool, {"code": "print(6 * 7)"}, pool=pool) == "42\n"
    told = run(tool, {"code": "import os\nprint(os.environ.get('CANARY'), os.path.exists('/proc'))\n1/0"}, pool=pool, max_characters=900)
    assert told.startswith("None False\nTraceback") and "ZeroDivisionError" in told and told.endswith("[exit code 1]")
    assert run(tool, {"code": "while True: print('x' * 1000)"}, pool=pool).startswith("xxx")
    assert (
        run(tool, {"code": "import time\nprint('so far', flush=True)\ntime.sleep(60)"}, pool=pool) == "so far\n[stopped: it took too long]"
    )
