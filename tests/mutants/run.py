"""Whether the tests of faults can fail: each patch breaks the library in one way, and the tests that it names must notice.

    python tests/mutants/run.py [NAME ...]

A patch begins with `Row:` (which rows and probes it is for), `Fault:` (what it breaks) and `Tests:` (node ids, separated by spaces), and
goes on as a unified diff. Each is applied to a copy of the tree. Without names all are run and tests/mutants/RESULTS.md is written.
Exits with 1 where a mutant survives, or where its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "RESULTS.md"
FAILED = 1
"""pytest's exit code when tests ran and some failed; any other says that they couldn't be run."""


@dataclass(frozen=True)
class Mutant:
    """One way of being wrong, and the tests that must see it."""

    name: str
    row: str
    fault: str
    tests: tuple[str, ...]
    patch: Path


def read(patch: Path) -> Mutant:
    lines = patch.read_text(encoding="utf-8").splitlines()
    head = dict(line.split(": ", 1) for line in lines[: lines.index("")])
    return Mutant(patch.stem, head["Row"], head["Fault"], tuple(head["Tests"].split()), patch)


def copy_tree(target: Path) -> None:
    """What is under version control, as it is now."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def main(names: list[str]) -> int:
    mutants = [read(patch) for patch in sorted(HERE.glob("*.patch")) if not names or patch.stem in names]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        copy_tree(whole)
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        code, output = run_tests(whole, tests)
        if code:
            print(output, "the tests fail without any mutant: nothing can be said", sep="\n")
            return 1
        rows, survived = [], 0
        for mutant in mutants:
            tree = shutil.copytree(whole, Path(folder) / mutant.name)  # not the tree as it is by now
            subprocess.run(["git", "apply", "--recount", str(mutant.patch)], cwd=tree, check=True)
            begun = time.monotonic()
            code, output = run_tests(tree, mutant.tests)
            verdict = "seen" if code == FAILED else "**survived**" if code == 0 else f"**can't be run ({code})**"
            survived += code != FAILED
            print(f"{mutant.name:<28} {verdict:<12} {time.monotonic() - begun:6.1f} s  {mutant.fault}", flush=True)
            if code not in (0, FAILED):
                print(output)
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in mutant.tests)
            rows.append(f"| {mutant.row} | {mutant.fault} | {tests} | {verdict} |")
            shutil.rmtree(tree)
    print(f"{len(mutants) - survived} of {len(mutants)} seen")
    if not names:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        head = f"# Mutants\n\n`make mutants`, {date.today().isoformat()}, at {commit}. Each fault was put in; its tests must fail.\n\n"
        table = "| row | fault | tests | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        RESULTS.write_text(head + table, encoding="utf-8")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
