"""Rewards for programs: what the completion wrote is run in the sandbox on the row's tests.

Owns how a program is read off a completion, what a test is, and the comparison, which is made here and not in the sandbox: wherever a test
has an expected value, that value never enters, and the program's value comes out as plain data. A line of results counts only with the
run's nonce, which the program isn't told; an `assert` that names no value is decided inside, where a program that sets out to forge it
could. That a run couldn't be made is an exception (status `grader_error`), never a reward. Called by `RewardManager`.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from burnish.agentic.sandbox import PYTHON, Sandbox, SandboxLimits

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_DEPTH = 50

_HARNESS = """
import io, json, os, sys
job = json.loads(sys.stdin.read())
nonce, say = job.pop("nonce"), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stdin = io.StringIO()
def plain(value, depth=0):
    if depth > 50:
        raise ValueError("nested too deeply")
    if type(value) in (list, tuple, set, frozenset):
        for item in value: plain(item, depth + 1)
    elif type(value) is dict:
        for key, item in value.items(): plain(key, depth + 1), plain(item, depth + 1)
    elif type(value) not in (int, float, complex, bool, str, bytes, type(None)):
        raise TypeError(f"a {type(value).__name__} is no plain data")
    return value
def tell(**what):
    say.write(nonce + json.dumps(what) + chr(10)), say.flush()
space = {"__name__": "__main__"}
exec(compile(job["program"], "program.py", "exec"), space)
for number, (kind, text) in enumerate(job["tests"]):
    try:
        if kind == "value":
            tell(test=number, value=repr(plain(eval(compile(text, "test", "eval"), space))))
        else:
            exec(compile(text, "test", "exec"), space)
            tell(test=number, passed=True)
    except Exception as error:
        tell(test=number, error=type(error).__name__)
"""


@dataclass(frozen=True, slots=True)
class _Test:
    """kind: "stdin" (`text` goes in, `expected` must come out), "value" (an expression), "statements" (mustn't raise)."""

    kind: str
    text: str
    expected: Any = None


def unit_tests(
    completions: Sequence[str],
    tests: Sequence[Any],
    *,
    partial: bool = False,
    seconds: float = 6.0,
    memory_mib: int = 512,
) -> list[float]:
    """1.0 where the program in the completion passes all of the row's tests; with `partial` the share of them that it passes.

    The program is the last fenced block, or the whole text where there is none. tests: for each row a list, of `{"stdin": text, "stdout":
    text}` (trailing blanks aside), `{"call": "f(1)", "returns": value}`, or statements as text; of `assert f(1) == 2` the value is compared
    outside. seconds: for a program with all its calls and statements, and for each stdin. Raises `SandboxUnavailable` without isolation.
    """
    sandbox = _sandbox(seconds, memory_mib)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        shares = list(pool.map(functools.partial(_share, sandbox), completions, tests))
    return shares if partial else [float(share == 1.0) for share in shares]


def program_of(completion: str) -> str:
    """The last fenced block that is Python or of no language, also if it is never closed; else the whole text."""
    found = _FENCE.findall(completion)
    return found[-1] if found else completion


@functools.lru_cache
def _sandbox(seconds: float, memory_mib: int) -> Sandbox:
    return Sandbox(SandboxLimits(seconds=seconds, cpu_seconds=math.ceil(seconds), memory_bytes=memory_mib * 2**20, output_bytes=2**20))


def _share(sandbox: Sandbox, completion: str, tests: Any) -> float:
    """Of the tests, how many the completion's program passes."""
    wanted = [_read(test) for test in ([tests] if isinstance(tests, str | Mapping) else tests)]
    if not wanted:
        raise ValueError("a row without tests can't be graded: its column `tests` is empty")
    program = program_of(completion)
    inputs = [test for test in wanted if test.kind == "stdin"]
    inside = [test for test in wanted if test.kind != "stdin"]
    passed = sum(_prints(sandbox, program, test) for test in inputs)
    return (passed + (_calls(sandbox, program, inside) if inside else 0)) / len(wanted)


def _prints(sandbox: Sandbox, program: str, test: _Test) -> bool:
    ran = sandbox.run([PYTHON, "program.py"], files={"program.py": program}, stdin=test.text)
    return ran.ok and _lines(ran.stdout.decode("utf-8", errors="replace")) == _lines(str(test.expected))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _calls(sandbox: Sandbox, program: str, tests: Sequence[_Test]) -> int:
    """How many tests pass that share one process with the program; after one that hangs or ends it the others don't."""
    nonce = secrets.token_hex(16)
    job = {"program": program, "tests": [(test.kind, test.text) for test in tests], "nonce": nonce}
    ran = sandbox.run([PYTHON, "harness.py"], files={"harness.py": _HARNESS}, stdin=json.dumps(job))
    results: dict[int, Mapping[str, Any]] = {}
    for line in ran.stdout.decode("utf-8", errors="replace").splitlines():
        if line.startswith(nonce):
            try:
                said = json.loads(line.removeprefix(nonce))
                results.setdefault(said["test"], said)
            except (ValueError, KeyError, TypeError):
                continue
    return sum(_passes(test, results.get(number, {})) for number, test in enumerate(tests))


def _passes(test: _Test, said: Mapping[str, Any]) -> bool:
    if test.kind == "statements":
        return said.get("passed") is True
    try:
        return "value" in said and _same(ast.literal_eval(said["value"]), test.expected)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _same(given: Any, expected: Any, depth: int = 0) -> bool:
    """Equal as plain data; numbers up to rounding, lists and tuples alike, as JSON knows no tuples."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(expected, list | tuple) and isinstance(given, list | tuple):
        return len(given) == len(expected) and all(_same(a, b, depth + 1) for a, b in zip(given, expected, strict=True))
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key], depth + 1) for key in expected)
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    if isinstance(expected, float) and isinstance(given, int | float):
        return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)
    return bool(given == expected)


def _read(test: Any) -> _Test:
    """A test as the data writes it."""
    if isinstance(test, Mapping) and {"stdin", "stdout"} == test.keys():
        return _Test("stdin", str(test["stdin"]), test["stdout"])
    if isinstance(test, Mapping) and {"call", "returns"} == test.keys():
        return _Test("value", str(test["call"]), test["returns"])
    if not isinstance(test, str):
        raise ValueError(f"a test is statements, or a mapping with `stdin` and `stdout` or with `call` and `returns`; got {test!r:.80}")
    try:
        match ast.parse(test).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                return _Test("value", ast.unparse(left), ast.literal_eval(right))
    except SyntaxError as error:
        raise ValueError(f"a test can't be read: {error}; it is {test!r:.80}") from None
    except ValueError:  # what it is compared with is no plain value
        pass
    return _Test("statements", test)


__all__ = ["program_of", "unit_tests"]
