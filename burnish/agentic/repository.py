"""A coding task: a small repository with a fault, tools to look, edit and run, and hidden tests that decide.

Owns the repository of an episode (text files in memory; nothing is written to this machine's disk), its tools, and the reward: 1.0 if,
after the agent's last word, all tests that must pass do, else 0.0. Tests run in the sandbox only, each time on a copy, and what the agent
did to the test files is undone before they decide. Takes rows in SWE-bench's shape (Jimenez et al., 2024, arXiv:2310.06770); as nothing is
cloned, a row brings the files of its commit. That tests couldn't be run is an error of the episode, never a reward.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.agentic.agents import Action, ConversationAgentBase
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.agentic.sandbox import PYTHON, Ran, Sandbox, SandboxError, SandboxLimits
from burnish.agentic.tools import ToolSet
from burnish.config.errors import UserError
from burnish.text.tool_parsers import PARSERS

_HARNESS = """
import importlib.util, inspect, io, json, os, sys, unittest
job = json.loads(sys.stdin.read())
nonce, say = job.pop("nonce"), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdin, sys.path[:0] = io.StringIO(), ["."]
def cases(path):
    spec = importlib.util.spec_from_file_location(path[:-3].replace("/", "."), path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(path) or ".")
    spec.loader.exec_module(module)
    for name, thing in vars(module).items():
        if name.startswith("test") and inspect.isfunction(thing):
            yield f"{path}::{name}", thing
        elif inspect.isclass(thing) and issubclass(thing, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(thing):
                def run(case=thing(method)):
                    result = unittest.TestResult()
                    case.run(result)
                    for _, text in result.errors + result.failures:
                        raise AssertionError(text.strip().splitlines()[-1])
                yield f"{path}::{name}::{method}", run
def tell(name, why):
    say.write(nonce + json.dumps([name, why]) + chr(10)), say.flush()
for path in job["paths"]:
    try:
        for name, case in cases(path):
            try:
                case()
                tell(name, None)
            except Exception as error:
                tell(name, f"{type(error).__name__}: {error}")
    except Exception as error:
        tell(path, f"{type(error).__name__}: {error}")
"""


class Repository(BaseTaskEnv):
    """One repository, one fault.

    The row: `files` (path → text), `problem_statement`, `FAIL_TO_PASS` and `PASS_TO_PASS` (test names `path::function` or
    `path::Class::method`, a list or its JSON), and the hidden tests as `test_patch` (a unified diff) or `tests` (path → text). Test files
    are `test_*.py` of plain functions or `unittest` cases; no package beside the standard library is there. seconds: of one run of the
    tests; max_characters: of one tool's answer.
    """

    def __init__(self, task: Mapping[str, Any], *, seconds: float = 10.0, max_characters: int = 2000, max_steps: int | None = None) -> None:
        super().__init__(task, max_steps=max_steps)
        missing = [name for name in ("files", "problem_statement", "FAIL_TO_PASS") if not task.get(name)]
        if missing or not (task.get("tests") or task.get("test_patch")):
            raise UserError(
                f"a coding task needs files, problem_statement, FAIL_TO_PASS and tests or test_patch; missing: {missing or 'tests'}"
            )
        self.files = dict(task["files"])
        self.max_characters = max_characters
        self._sandbox = Sandbox(SandboxLimits(seconds=seconds))
        self._broken: SandboxError | None = None
        self._tools = ToolSet({"list": self.list, "read": self.read, "edit": self.edit, "run": self.run})

    def _initial_observation(self) -> str:
        return f"{self.task['problem_statement'].strip()}\nFiles: {', '.join(sorted(self.files))}"

    def _step_impl(self, action: Action) -> EnvStepResult:
        if not action.tool_calls:
            return EnvStepResult("", float(self.solved()), True)
        results = [self._tools.run_here(call, max_characters=self.max_characters) for call in action.tool_calls]
        if self._broken is not None:
            raise self._broken  # no tool's answer: the tests couldn't be run at all
        messages = [{"role": "tool", "name": call.name, "content": said} for call, said in zip(action.tool_calls, results, strict=True)]
        failed = sum(said.startswith("error: ") for said in results)
        return EnvStepResult(messages, None, False, {"tool_calls": len(results), "tool_errors": failed})  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------------------------------- the tools

    def list(self) -> str:
        """The names of all files."""
        return "\n".join(sorted(self.files))

    def read(self, path: str) -> str:
        """What is in a file."""
        return self.files[self._known(path)]

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that stands exactly once in a file. An empty `old` makes a new file."""
        if not old:
            if path in self.files or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path) or ".." in path:
                raise ValueError(f"{path} can't be made: it is there, or no relative name")
            self.files[path] = new
            return f"made {path}"
        text = self.files[self._known(path)]
        if (count := text.count(old)) != 1:
            raise ValueError(f"the old text stands {count} times in {path}, it must stand there once")
        self.files[path] = text.replace(old, new)
        return f"edited {path}"

    def run(self) -> str:
        """Run the tests that are there."""
        results, ran = self._test(self.files, sorted(path for path in self.files if _is_test(path)))
        lines = [f"{name}: {'passed' if why is None else why}" for name, why in results.items()]
        return "\n".join(lines) or f"no test ran\n{ran.told()}"

    def _known(self, path: str) -> str:
        if path not in self.files:
            raise ValueError(f"there is no file {path}; there are {', '.join(sorted(self.files))}")
        return path

    # ---------------------------------------------------------------------------------------------------------------- the verdict

    def solved(self) -> bool:
        """Whether all tests that must pass do, with the test files as the task has them."""
        files = {path: text for path, text in self.files.items() if not _is_test(path)}
        original = {path: text for path, text in self.task["files"].items() if _is_test(path)}
        hidden = dict(self.task.get("tests") or apply_patch(original, self.task["test_patch"]))
        wanted = _names(self.task["FAIL_TO_PASS"]) + _names(self.task.get("PASS_TO_PASS") or [])
        results, _ = self._test(files | original | hidden, sorted({name.partition("::")[0] for name in wanted}))
        return all(name in results and results[name] is None for name in wanted)

    def _test(self, files: Mapping[str, str], paths: Sequence[str]) -> tuple[dict[str, str | None], Ran]:
        """By test, why it failed; None where it passed."""
        nonce = secrets.token_hex(16)
        job = json.dumps({"nonce": nonce, "paths": paths})
        try:
            ran = self._sandbox.run([PYTHON, ".harness.py"], files={**files, ".harness.py": _HARNESS}, stdin=job)
        except SandboxError as error:
            self._broken = error
            raise
        results: dict[str, str | None] = {}
        for line in ran.stdout.decode("utf-8", errors="replace").splitlines():
            if line.startswith(nonce):
                name, why = json.loads(line.removeprefix(nonce))
                results[name] = why
        return results, ran


class CodingAgent(ConversationAgentBase):
    """Reads calls of a repository's tools out of what the model says.

    tell_tools False: the schemas aren't shown, as a system prompt tells of the tools, or a model has learned to call them.
    """

    def __init__(
        self, system_prompt: str | None = None, *, tool_parser_name: str = "json", tell_tools: bool = True, remembers: int | None = None
    ) -> None:
        super().__init__(system_prompt, remembers=remembers)
        if tool_parser_name not in PARSERS:
            raise UserError(f"there is no tool parser {tool_parser_name!r}; known: {', '.join(PARSERS)}")
        self._parser = PARSERS[tool_parser_name]
        if tell_tools:
            here = object.__new__(Repository)  # for the signatures only
            self.tools = ToolSet({"list": here.list, "read": here.read, "edit": here.edit, "run": here.run}).schemas

    def update_from_model(self, response: str) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response, self._parser.calls(response))


def apply_patch(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """The files that a unified diff (`git diff`) changes or makes, afterwards. ValueError where it doesn't fit."""
    changed: dict[str, str] = {}
    for part in re.split(r"^(?=--- .+\n\+\+\+ )", patch, flags=re.MULTILINE):
        header = re.search(r"^--- (\S+).*\n\+\+\+ (\S+).*\n", part, flags=re.MULTILINE)
        if header is None:
            continue
        path = (header[2] if header[2] != "/dev/null" else header[1]).split("/", 1)[-1]
        before = [] if header[1] == "/dev/null" else changed.get(path, files.get(path, "")).splitlines(keepends=True)
        after, at = [], 0
        for hunk in re.finditer(
            r"^@@ -(\d+)(?:,(\d+))? \+\S+ @@.*\n((?:[ +\-\\].*(?:\n|\Z)|\n)*)", part[header.end() :], flags=re.MULTILINE
        ):
            start = int(hunk[1]) - (hunk[2] != "0")
            after += before[at:start]
            at = start
            for line in hunk[3].splitlines(keepends=True):
                kind, text = (line[0], line[1:]) if line != "\n" else (" ", "\n")
                if kind in " -":
                    if at >= len(before) or before[at].rstrip("\n") != text.rstrip("\n"):
                        raise ValueError(f"the patch of {path} doesn't fit at its line {at + 1}: expected {text.strip()!r:.80}")
                    at += 1
                if kind in " +":
                    after.append(text)
        if header[2] != "/dev/null":
            changed[path] = "".join([*after, *before[at:]])
    return changed


def _names(value: Any) -> list[str]:
    return list(json.loads(value) if isinstance(value, str) else value)


def _is_test(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_") and path.endswith(".py")


__all__ = ["CodingAgent", "Repository", "apply_patch"]
