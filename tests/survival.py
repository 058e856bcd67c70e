"""Which test shows what a run survives: the tables of docs/survival.md.

    python tests/survival.py

A test is for a row where its name (`test_r12_…`) or its docstring ("R12") says so, or where the row's mutant names it; its lane follows
from its markers. The numbers of the last `make soak` are read from tests/soak/results.json. `tests/test_survival.py` asks that no row is
without a test and a mutant, and that the page is what this program writes.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "survival.md"
RESULTS = ROOT / "tests" / "soak" / "results.json"

ROWS = {
    "R01": "`kill -9` at random times, one run again and again, other runs once: they end bitwise as the unbroken run",
    "R02*": "`kill -9` inside a save, at each of its points: the last committed step is taken, the torso is replaced",
    "R04": "Ctrl-C twice: gone at once, no children, the last checkpoint whole",
    "R05*": "a file of the newest checkpoint flipped, cut, deleted: the step before is taken, or the file is named",
    "R07*": "nowhere to write checkpoints: an error before step 1",
    "R08": "two processes with one run folder: the second is refused; a dead one's lock isn't one",
    "R09*": "a fresh run in another's folder: refused",
    "R11*": "resume of a finished run: nothing to do, no file changed",
    "R12": "resume at each of 20 steps: bitwise the unbroken run",
    "R13": "resume with 0, 1 and 2 loading workers: the same rows",
    "R15*": "NaN or infinity in a gradient or the loss: nothing moves, counted",
    "R16*": "NaN in every step: the run stops at the third, and names the leaves",
    "R17*": "NaN at padding, a reference 100 nats away: finite",
    "R19*": "all rewards equal: nothing moves, not even by decay",
    "R20": "a reward function hangs on one sample: killed at its limit, that sample alone is lost",
    "R21": "a reward function leaks: its worker is replaced",
    "R22*": "environments raise: counted, closed, not trained on",
    "R24*": "environments always raise: the run stops in its first batch, with the traceback",
    "R25": "environments' workers are killed: played again within the budget, then a clean end",
    "R26*": "an episode never comes back: one retry, then left out of its group",
    "R29": "the sampling server dies in mid-batch: restarted, given the weights again, the batch done",
    "R30": "a push of weights fails: the old ones stay as a whole, the next push works",
    "R31*": "the sampler has old weights: the alarm within one step",
    "R32*": "prefixes of old weights are kept: seen",
    "R33": "producer, consumer or both raise: both leave, the first cause is told",
    "R35": "200 learners begun and ended: files, threads, children, memory flat",
    "R36*": "no rows, too few, a row that raises, rows without end: named",
    "R37*": "prompts around the limit: one policy, counted; all too long is an error",
    "R39*": "a tokenizer without padding or with ids beyond the embedding: a fallback, or an error",
    "R40*": "tool calls that can't be read, ten thousand of them: answers, caps, no exception",
    "R41": "a tool says 10 MB, or forges a call: cut with a notice, never parsed",
    "R43": "a candidate's code looks for the network, files, the environment: there are none",
    "R44": "fork bomb, memory, files, output, a sleeper, the parent's death: contained, nobody left",
    "R46": "a poisoned sample, then honest ones: graded right",
    "R47*": "no isolation on this machine: an error when it is made",
    "R48": "bad frames, lengths, tokens, crowds at the endpoint: refused, a good request answered after",
    "R49*": "listeners: loopback only, or with a token",
    "R51*": "object tags, alias bombs, duplicate keys: refused, no canary touched",
    "R52*": "names that would leave the folder: refused",
    "R53*": "unknown keys and wrong types at any depth: the path, and the nearest name",
    "R54*": "secrets in the configuration and the environment: in no output",
    "R56": "the wall clock jumps an hour either way: no negative duration, no timeout",
    "R57": "memory runs out in a step: said with its phase, the checkpoint whole",
    "R58": "processes starve for a while: nobody is taken for dead",
    "R59*": "another hash seed, locale, timezone, folder, number of threads: equal",
    "R61*": "a batch cut otherwise: the same gradient",
    "R63": "killed in the first compile or step: it starts over, no step 0 is claimed",
    "R64": "30 minutes of mixed faults at 5 %: completes, goodput at least 80 %, injected = reported",
}
"""A star: in a lane that every change must pass."""

PROBES = {
    "B093": "a staleness of k is k versions",
    "B095": "files of an earlier run aren't consumed",
    "B097": "a failed push ends with its cause",
    "B099": "weights come back bit by bit, square matrices too",
    "B101": "a half-written checkpoint isn't one",
    "B103": "a failed save is told, counted, tried again",
    "B105": "a resume at an epoch's end skips nothing",
    "B107": "loading workers don't start the stream again",
    "B109": "moments, counts and learning rates go on",
    "B111": "schedules count updates",
    "B113": "too few rows are an error",
    "B115": "a reader sees whole lines",
    "B117": "sums are float32",
    "B119": "a skipped update stays skipped",
    "B121": "merged = base with adapter; another head isn't dropped",
    "B123": "all that doesn't fit is in one error",
    "B125": "a partial override keeps its siblings",
    "B127": "every option does something",
    "B129": "metrics that are no numbers end nothing",
    "B131": "answers are read neither too strictly nor too laxly",
    "B133": "0 only after the last save",
    "B135": "nothing is evaluated",
    "B137": "no token, no service; nothing is unpickled",
    "B139": "the sandbox is the kernel's",
    "B141": "children of children die too",
    "B143": "names reach no shell",
}

LANES = {"soak": "soak", "learn": "learn", "slow": "test", "smollm2": "test"}
"""Marker → lane of `make`; the first that a test has counts. Without any it is in `check`, and so in `test` too."""
_ID = re.compile(r"(?<![A-Za-z0-9])([RrBb]\d{2,3})(?!\d)")


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of one row: node ids below tests/ with their lanes, and names of mutants."""

    tests: dict[str, str] = field(default_factory=dict)
    mutants: list[str] = field(default_factory=list)


def collected() -> Iterator[tuple[str, str, str]]:
    """Each test's node id below tests/, what it says it is for (its name and docstring), and its lane."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = [mark for node in module.body if isinstance(node, ast.Assign) and _named(node, "pytestmark") for mark in _marks(node)]
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = [mark for decorator in node.decorator_list if not _is_parametrize(decorator) for mark in _marks(decorator)]
                lane = next((LANES[mark] for mark in LANES if mark in own + everywhere), "check")
                name = f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"
                yield name, f"{node.name.replace('_', ' ')} {ast.get_docstring(node) or ''}", lane


def _named(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _marks(node: ast.AST) -> list[str]:
    return [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]


def _is_parametrize(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize"


@functools.cache
def shown() -> dict[str, Shown]:
    """By row and probe."""
    found = {name.rstrip("*"): Shown() for name in (*ROWS, *PROBES)}
    lanes = {}
    for test, says, lane in collected():
        lanes[test] = lane
        for name in {match.upper() for match in _ID.findall(says)} & found.keys():
            found[name].tests[test] = lane
    for patch in sorted((ROOT / "tests" / "mutants").glob("*.patch")):
        lines = patch.read_text(encoding="utf-8").splitlines()
        head = dict(line.split(": ", 1) for line in lines[: lines.index("")])
        for name in found.keys() & set(_ID.findall(head["Row"])):
            found[name].mutants.append(patch.stem)
            for test in head["Tests"].replace("tests/", "", 1).split(" tests/"):
                if "::" in test:
                    found[name].tests[test] = lanes[test]
    return found


def table(rows: dict[str, str], found: dict[str, Shown]) -> str:
    lines = ["| | what is done, and what holds | tests | mutants | lane |", "|---|---|---|---|---|"]
    for name, words in rows.items():
        one = found[name.rstrip("*")]
        tests = "<br>".join(f"`{test}`" for test in sorted(one.tests))
        lanes = sorted(set(one.tests.values()), key=["check", "test", "learn", "soak"].index)
        lines.append(f"| {name} | {words} | {tests} | {'<br>'.join(f'`{m}`' for m in one.mutants)} | {', '.join(lanes)} |")
    return "\n".join(lines)


def soak_table() -> str:
    if not RESULTS.is_file():
        return "No soak has been recorded yet."
    lines = ["| row | what was done | how it ended | date |", "|---|---|---|---|"]
    lines += [f"| {r['row']} | {r['done']} | {r['ended']} | {r['date']} |" for r in json.loads(RESULTS.read_text()).values()]
    return "\n".join(lines)


def page() -> str:
    """docs/survival.md with its tables made anew."""
    found = shown()
    text = PAGE.read_text(encoding="utf-8")
    for name, body in (("rows", table(ROWS, found)), ("probes", table(PROBES, found)), ("soak", soak_table())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
