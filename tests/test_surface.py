"""What a user can reach: the public names, the recipes, the pins; and what must not be in the tree."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def tracked_files() -> list[Path]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # whoever owns the checkout
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def test_public_names_are_sorted_and_importable() -> None:
    burnish = importlib.import_module("burnish")
    assert list(burnish.__all__) == sorted(burnish.__all__)
    assert len(set(burnish.__all__)) == len(burnish.__all__)
    for name in burnish.__all__:
        assert getattr(burnish, name) is not None


def test_importing_burnish_imports_neither_jax_nor_anything_slow() -> None:
    code = "import burnish, sys; print([m for m in ('jax', 'numpy', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_there_are_recipes() -> None:
    assert ROOT / "recipes" / "quickstart.yaml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_parses_and_is_short(path: Path) -> None:
    load = importlib.import_module("burnish.config.loader").load
    configs = importlib.import_module("burnish.config.tuning").CONFIGS
    text = path.read_text()
    name = path.relative_to(ROOT)
    (command,) = set(re.findall(rf"^#   burnish ([\w-]+) {name}", text, re.MULTILINE)) - {"check"}  # which reads what `train` reads
    load(configs[command], path, (), {})
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.name)
def test_every_recipe_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_no_index_address_and_no_path_of_one_machine_in_the_tree() -> None:
    address = re.compile(r"index" + r"-url|https?://[a-z0-9.:-]+/simple|(?<![\w.])/(work|root|farm)" + r"/|bash" + r"_jobs")
    found = []
    for path in tracked_files():
        if path == Path(__file__) or b"\0" in path.read_bytes()[:8000]:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if address.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_all_is_every_extra_that_a_user_may_want() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("burnish[").removesuffix("]").split(",")
    assert named == sorted(extras.keys() - {"all", "dev", "docs", "parity", "quickstart", "templates", "verifiers"})
    assert set(extras["quickstart"]) <= {dependency for name in named for dependency in extras[name]}


def test_the_version_is_the_newest_of_the_changelog() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_pins_are_exact_and_cover_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for file, left_out in (("constraints.txt", ()), ("constraints-py312.txt", ("parity",))):
        lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line) for line in lines), file
        pinned = dict(line.split("==") for line in lines)
        needed = project["dependencies"] + [
            d for name, extra in extras.items() if name not in (*left_out, "all", "verifiers") for d in extra
        ]
        for requirement in map(Requirement, needed):
            assert requirement.name in pinned and pinned[requirement.name] in requirement.specifier, (file, str(requirement))
    (all_of_them,) = extras["all"]
    assert Requirement(all_of_them).extras >= extras.keys() - {"all", "dev", "docs", "parity", "quickstart", "templates", "verifiers"}
