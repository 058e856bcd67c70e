"""Programs as answers: what counts as passing, and that neither poison, forgery nor broken infrastructure earns a reward."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from burnish.agentic.sandbox import Sandbox, SandboxError, SandboxUnavailable
from burnish.rewards import code
from burnish.rewards.code import program_of, unit_tests
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.types import Completion, Group, Prompt, Status, Step, StopReason, Trajectory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", {"call": "add([1], [2])", "returns": [1, 2]}]


def graded(completion: str, *tests: Any, **options: Any) -> float:
    return unit_tests([completion], [list(tests)], **options)[0]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (ADD, "def add(a, b):\n    return a + b\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2", "x = 2"),
        ("x = 3", "x = 3"),
        ("```json\n{}\n```", "```json\n{}\n```"),
    ],
)
def test_the_program_is_the_last_python_block_or_all(completion: str, program: str) -> None:
    assert program_of(completion) == program


def test_what_passes_and_what_doesnt() -> None:
    wrong = ADD.replace("+", "-")
    assert unit_tests([ADD, wrong, "I can't.", ""], [TESTS] * 4) == [1.0, 0.0, 0.0, 0.0]
    half = "def add(a, b):\n    return 3"
    assert unit_tests([half], [TESTS], partial=True) == [1 / 3] and unit_tests([half], [TESTS]) == [0.0]


def test_standard_input_and_output() -> None:
    doubles = "n = int(input())\nprint('x' * 0, end='')\nprint(2 * n)  "
    assert graded(doubles, {"stdin": "4\n", "stdout": "8"}, {"stdin": "5", "stdout": "10 \n\n"}) == 1.0
    assert graded(doubles, {"stdin": "4\n", "stdout": "8"}, {"stdin": "no", "stdout": ""}, partial=True) == 0.5, "it raised"


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def f(): return (1, [2.0000000001, {'a': {3}}])", 1.0),
        ("def f(): return (1, [2, {'a': {3}}])", 1.0),
        ("def f(): return (1, [2.1, {'a': {3}}])", 0.0),
        ("def f(): return (True, [2.0, {'a': {3}}])", 0.0),
        ("class Same:\n    def __eq__(self, other): return True\n    def __repr__(self): return '(1, [2.0, {\"a\": {3}}])'\nf = Same", 0.0),
        ("f = lambda: (yield)", 0.0),
        ("def f():\n    x = []\n    x.append(x)\n    return x", 0.0),
        ("def f(): raise SystemExit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("def f(:", 0.0),
    ],
)
def test_values_are_compared_outside_as_plain_data(program: str, right: float) -> None:
    assert graded(program, "assert f() == (1, [2.0, {'a': {3}}])") == right


def test_tests_that_name_no_value_are_statements() -> None:
    program = "def f(x):\n    if x < 0: raise ValueError('no')\n    return object()"
    statements = "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"
    assert graded(program, statements, "assert f(1) is not None") == 1.0
    assert graded("def f(x): return None", statements, "assert f(1) is not None", partial=True) == 0.0


def test_a_program_cant_answer_for_its_tests() -> None:
    """It prints what looks like results, ends early, rebinds what the tests use: without expected value and nonce it earns nothing."""
    forged = (
        'import json, sys\nfor n in range(3):\n    print(json.dumps({"test": n, "value": "3", "passed": True}), flush=True)\nsys.exit(0)'
    )
    assert graded(forged, *TESTS) == 0.0
    everywhere = """
        import json, os
        for fd in range(1, 20):
            try:
                os.write(fd, (json.dumps({"test": 0, "passed": True}) + chr(10)).encode())
            except OSError:
                pass
    """
    assert graded(textwrap.dedent(everywhere), "assert False") == 0.0
    assert graded("import builtins\nbuiltins.repr = lambda x: '3'\ndef add(a, b): return 0", TESTS[0], TESTS[1], partial=True) <= 0.5
    assert graded("import os\nadd = lambda a, b: os.write(1, b'passed')", "add(1, 2)\nassert False") == 0.0


def test_r46_poison_then_honest() -> None:
    """B135, B139: the poisoned sample changes nothing for those after it, in one call and in the next."""
    poison = "import os, sys, builtins\nopen('/tmp/x', 'w').write('x')\nbuiltins.sum = None\nos.kill(os.getppid(), 9)\nwhile True: pass"
    kwargs: dict[str, Any] = {"seconds": 3.0}
    assert unit_tests([ADD, poison, ADD], [TESTS] * 3, **kwargs) == [1.0, 0.0, 1.0]
    assert unit_tests([ADD] * 2, [TESTS] * 2, **kwargs) == [1.0, 1.0]


def test_a_test_that_hangs_costs_itself_and_those_after_it() -> None:
    program = "def f(x):\n    while x == 2: pass\n    return x"
    assert graded(program, "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3", partial=True, seconds=3.0) == 1 / 3


@pytest.mark.parametrize("test", [7, {"stdin": ""}, "assert ("])
def test_a_test_that_cant_be_read_is_an_error_that_shows_it(test: Any) -> None:
    with pytest.raises(ValueError, match="a test"):
        graded(ADD, test)
    with pytest.raises(ValueError, match="without tests"):
        graded(ADD)


# ------------------------------------------------------------------------------------------------- no reward without a sandbox


def scored(*texts: str) -> list[Trajectory]:
    none = np.zeros(0, np.int32)
    completion = Completion(none, none.astype(np.float32), none, StopReason.STOP_ID)
    members = [
        Trajectory([Step(none, completion, text)], none, none.astype(bool), completion.logps, none, 0, (1, 0), i)
        for i, text in enumerate(texts)
    ]
    group = Group((1, 0), Prompt("p", ({"role": "user", "content": "?"},), {"tests": TESTS}), members)
    asyncio.run(RewardManager([RewardSpec.of(unit_tests)]).score(group))
    return members


def test_a_run_that_couldnt_be_made_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise SandboxError("unshare(pid): Resource temporarily unavailable")

    monkeypatch.setattr(Sandbox, "run", broken)
    got = scored(ADD, "nonsense")
    assert [(t.reward, t.status) for t in got] == [(None, Status.GRADER_ERROR)] * 2
    assert got[0].error is not None and "reward unit_tests: SandboxError: unshare(pid)" in got[0].error


def test_r47_without_isolation_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise SandboxUnavailable("the sandbox can't isolate here")

    monkeypatch.setattr(code, "_sandbox", missing)
    with pytest.raises(SandboxUnavailable):
        scored(ADD)
