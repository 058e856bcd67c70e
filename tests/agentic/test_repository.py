"""Coding tasks: tools on files in memory, hidden tests in the sandbox, rows in SWE-bench's shape."""

from __future__ import annotations

import difflib
import json
import sys
from typing import Any

import pytest

from burnish.agentic.agents import Action
from burnish.agentic.repository import CodingAgent, Repository, apply_patch
from burnish.agentic.sandbox import Sandbox, SandboxError
from burnish.config.errors import UserError
from burnish.text.codec import Codec
from burnish.types import Status, ToolCall
from tests.agentic.episodes import context, play, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

VISIBLE = "from shop.prices import total\n\n\ndef test_two():\n    assert total([1, 2]) == 3\n"
HIDDEN = VISIBLE + (
    "\n\nimport unittest\n\n\nclass Empty(unittest.TestCase):\n    def test_none(self):\n        self.assertEqual(total([]), 0)\n"
)
FILES = {"shop/__init__.py": "", "shop/prices.py": "def total(prices):\n    return max(prices)\n", "tests/test_prices.py": VISIBLE}


def diff(path: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def task(**changes: Any) -> dict[str, Any]:
    """As SWE-bench writes a row: lists as JSON, hidden tests as a patch."""
    row = {
        "instance_id": "shop-1",
        "seed": 1,
        "problem_statement": "total() must add all prices.",
        "files": FILES,
        "test_patch": diff("tests/test_prices.py", VISIBLE, HIDDEN),
        "FAIL_TO_PASS": json.dumps(["tests/test_prices.py::test_two", "tests/test_prices.py::Empty::test_none"]),
        "PASS_TO_PASS": "[]",
    }
    return row | changes


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_an_agent_looks_edits_runs_and_is_judged_by_hidden_tests(codec: Codec) -> None:
    turns = [
        call("read", path="shop/prices.py"),
        call("run"),
        call("edit", path="shop/prices.py", old="max", new="sum"),
        call("run"),
        "done",
    ]
    got = play(
        context(script(codec, *turns), codec, context=4000, max_prompt_tokens=3000), Repository(task()), agent=CodingAgent(), max_tokens=200
    )
    said = [message["content"] for message in got.messages if message["role"] == "tool"]
    assert got.messages[0]["content"] == "total() must add all prices.\nFiles: shop/__init__.py, shop/prices.py, tests/test_prices.py"
    assert said == [
        FILES["shop/prices.py"],
        "tests/test_prices.py::test_two: AssertionError: ",
        "edited shop/prices.py",
        "tests/test_prices.py::test_two: passed",
    ]
    assert got.status is Status.OK and [step.reward for step in got.steps] == [None] * 4 + [1.0]


@pytest.mark.parametrize(
    ("edits", "reward"),
    [
        ([], 0.0),
        ([("shop/prices.py", "max(prices)", "3")], 0.0),
        ([("tests/test_prices.py", VISIBLE, "def test_two():\n    pass\n")], 0.0),
        ([("shop/prices.py", "max(prices)", "sum(prices)"), ("tests/test_prices.py", VISIBLE, "")], 1.0),
        ([("shop/prices.py", FILES["shop/prices.py"], "import os\nos._exit(0)\n")], 0.0),
        ([("shop/prices.py", FILES["shop/prices.py"], "def total(prices):\n    while True: pass\n")], 0.0),
        ([("", "unittest.py", "")], 0.0),
    ],
)
def test_only_a_mended_fault_is_paid(edits: list[tuple[str, str, str]], reward: float) -> None:
    env = Repository(task(), seconds=4.0)
    for path, old, new in edits:
        if path:
            env.edit(path, old, new)
        else:
            env.edit(old, "", "raise SystemExit(0)\n")
    result = env._step_impl(Action("done"))
    assert (result.reward, result.done) == (reward, True)


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("read", {"path": "/etc/passwd"}, "error: there is no file /etc/passwd; there are shop/__init__.py"),
        ("edit", {"path": "shop/prices.py", "old": "r", "new": ""}, "error: the old text stands 4 times"),
        ("edit", {"path": "../x", "old": "", "new": ""}, "error: ../x can't be made"),
        ("edit", {"path": "shop/prices.py", "old": "", "new": ""}, "error: shop/prices.py can't be made: it is there"),
        ("edit", {"path": "shop/prices.py"}, "error: edit needs the argument 'old'"),
        ("delete", {}, "error: there is no tool 'delete'"),
        ("list", {}, "shop/__init__.py\nshop/prices.py\ntests/test_prices.py"),
    ],
)
def test_what_goes_wrong_is_told(tool: str, arguments: dict[str, str], said: str) -> None:
    result = Repository(task())._step_impl(Action("", [ToolCall(tool, arguments)]))
    assert result.reward is None and str(result.observation[0]["content"]).startswith(said)  # type: ignore[index]


def test_tests_that_couldnt_be_run_are_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Repository(task())

    def broken(*_: Any, **__: Any) -> None:
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "run", broken)
    with pytest.raises(SandboxError):
        env._step_impl(Action("done"))
    with pytest.raises(SandboxError):
        env._step_impl(Action("", [ToolCall("run")]))


def test_rows_must_be_whole() -> None:
    for changes in ({"files": {}}, {"test_patch": ""}, {"FAIL_TO_PASS": ""}):
        with pytest.raises(UserError, match="a coding task needs files"):
            Repository(task(**changes))


def test_patches() -> None:
    old = "".join(f"line {n}\n" for n in range(30))
    new = old.replace("line 3\n", "-- three\n\n").replace("line 25\n", "").replace("line 29\n", "line 29\nmore\n")
    files = {"a/b.txt": old, "gone.txt": "x\n", "end.txt": "no newline"}
    patch = diff("a/b.txt", old, new) + diff("end.txt", "no newline", "no newline\nnow\n").replace(
        "-no newline+", "-no newline\n\\ No newline at end of file\n+"
    )
    patch += "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+one\n+two\n"
    patch += "diff --git a/gone.txt b/gone.txt\n--- a/gone.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert apply_patch(files, patch) == {"a/b.txt": new, "new.py": "one\ntwo\n", "end.txt": "no newline\nnow\n"}
    back = apply_patch({"a/b.txt": new}, diff("a/b.txt", new, old))
    assert back == {"a/b.txt": old}
    with pytest.raises(ValueError, match="doesn't fit at its line"):
        apply_patch({"a/b.txt": old.replace("line 2\n", "line two\n")}, patch)
