"""Small repositories with one fault and tests that show it, in SWE-bench's shape. See coding.yaml.

`create_dataset`: the tasks; a third of all (by a hash of function, names and fault) is held out. `create_repairs`: conversations that mend
one, for supervised training: read the file, replace the line, run the tests, say so.
"""

import json
import random
import zlib
from typing import Any

SYSTEM = 'Mend the fault. Call a tool: {"name": "read", "arguments": {"path": ...}}, edit (path, old, new), run (). '
SYSTEM += "When the tests pass, say done."
FAULTS = {  # what it should do: the right expression, wrong ones, an example
    "add {a} and {b}": ("{a} + {b}", ["{a} - {b}", "{a} * {b}"], "3, 5", 8),
    "subtract {b} from {a}": ("{a} - {b}", ["{a} + {b}", "{b} - {a}"], "9, 4", 5),
    "multiply {a} by {b}": ("{a} * {b}", ["{a} + {b}", "{a} - {b}"], "3, 4", 12),
    "give the larger of {a} and {b}": ("max({a}, {b})", ["min({a}, {b})", "{a}"], "2, 7", 7),
    "give the smaller of {a} and {b}": ("min({a}, {b})", ["max({a}, {b})", "{b}"], "2, 7", 2),
    "say whether {a} is above {b}": ("{a} > {b}", ["{a} < {b}", "{a} == {b}"], "5, 1", True),
}
NAMES = [("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("n", "m"), ("p", "q"), ("one", "two"), ("u", "v")]
WORDS = ("total", "combine", "compute", "score", "value", "result", "measure", "solve")


def create_dataset(count: int, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """The first `count` different tasks of a split ("train" or "eval")."""
    rng, rows = random.Random(f"{split}:{seed}"), {}
    while len(rows) < count:
        (aim, (right, wrong, given, out)), (a, b), word = rng.choice([*FAULTS.items()]), rng.choice(NAMES), rng.choice(WORDS)
        bad = rng.choice(wrong).format(a=a, b=b)
        name = f"{word}:{a}:{b}:{aim}:{bad}"
        if (zlib.crc32(name.encode()) % 3 == 0) != (split == "eval"):
            continue
        test, more = f"from {word} import {word}\n\n\ndef test_{word}():\n    assert {word}({given}) == {out}\n", [(10, 3), (6, 6), (-2, 4)]
        checks = [f"assert {word}{pair} == {eval(right.format(a=pair[0], b=pair[1]))}" for pair in more]  # our own table, nobody's text
        files = {f"{word}.py": f"def {word}({a}, {b}):\n    return {bad}\n", f"test_{word}.py": test}
        hidden = {f"test_{word}.py": test + "".join(f"\n\ndef test_{n}():\n    {check}\n" for n, check in enumerate(checks))}
        tests = [f"test_{word}.py::test_{n}" for n in (word, *range(len(checks)))]
        row = {"prompt": "", "instance_id": name, "problem_statement": f"{word}({a}, {b}) should {aim.format(a=a, b=b)}.", "files": files}
        fix = {"path": f"{word}.py", "old": f"return {bad}", "new": f"return {right.format(a=a, b=b)}"}
        rows[name] = row | {"tests": hidden, "FAIL_TO_PASS": json.dumps(tests), "PASS_TO_PASS": "[]", "fix": fix}
    return list(rows.values())


def create_repairs(count: int, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    rows = []
    for task in create_dataset(count, split, seed):
        from burnish.agentic.repository import Repository

        env, path = Repository({**task, "seed": 0}), task["fix"]["path"]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": env._initial_observation()}]
        for name, arguments in (("read", {"path": path}), ("edit", task["fix"]), ("run", {})):
            call = json.dumps({"name": name, "arguments": arguments})
            said = env.run() if name == "run" else getattr(env, name)(**arguments)
            messages += [{"role": "assistant", "content": call}, {"role": "tool", "name": name, "content": said}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": "done"}]})
    return rows
