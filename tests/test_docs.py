"""Every code block of README.md and docs/ runs, as a reader would run it.

- `python`: a program of its own, in an empty folder that has the repository's `recipes/` in it.
- `bash`, `console` (its lines after `$ `): likewise, with this environment's `burnish` and `python` first on the path. What a reader does
  once and a test can't (clone, virtual environment, install) is checked against the tree instead; so are `make` targets, as `make test`
  would never end here.
- `yaml`: a configuration, or a part of one, that the loader accepts.
- A block after the line `<!-- file NAME -->` is a file of that name in the folder of every later block of its page; it runs too.
- A block after the line `<!-- slow -->` runs in `make docs-slow` only, its `make` lines included; there are at most 5.
"""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_SLOW = 5
RUNNABLE = {"python", "bash", "console", "yaml"}
TO_READ = {"text", "json", "toml"}
TOCTREE = re.compile(r"```\{toctree\}.*?```\n", re.DOTALL)
"""What sphinx reads of docs/index.md."""
SETUP = ("git clone ", "cd burnish", "python3 -m venv ", "source ", ". .venv", "pip install ")
FENCE = re.compile(
    r"(?P<slow><!-- slow -->\n\s*)?(?:<!-- file (?P<file>[\w.]+) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, in which language, whether it is marked slow, and the files that blocks before it and it are."""

    where: str
    language: str
    text: str
    slow: bool
    files: Mapping[str, str] = field(default_factory=dict)


def read_blocks(path: Path) -> list[Block]:
    document = TOCTREE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text(encoding="utf-8"))
    blocks: list[Block] = []
    files: dict[str, str] = {}
    for match in FENCE.finditer(document):
        line = document.count("\n", 0, match.start("language")) + 1
        text = "".join(row.removeprefix(match["indent"]) for row in match["text"].splitlines(keepends=True))
        files = files | ({match["file"]: text} if match["file"] else {})
        blocks.append(Block(f"{path.name}:{line}", match["language"], text, bool(match["slow"]), files))
    return blocks


def run_block(block: Block, folder: Path) -> str:
    """Run a block in `folder`; returns what it printed, raises AssertionError with it when it failed."""
    for name, text in block.files.items():
        (folder / name).write_text(text)
    if block.language == "yaml":
        (folder / "block.yaml").write_text(block.text)
        importlib.import_module("burnish.config.loader").load_config(folder / "block.yaml", (), {})
        return ""
    if not (folder / "recipes").is_symlink():
        (folder / "recipes").symlink_to(ROOT / "recipes")
    program = folder / f"block.{'py' if block.language == 'python' else 'sh'}"
    program.write_text(block.text if block.language == "python" else shell_program(block))
    command = [sys.executable, program.name] if block.language == "python" else ["bash", "-euo", "pipefail", program.name]
    ended = subprocess.run(command, cwd=folder, env=reader_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, f"{block.where} ended with {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


def shell_program(block: Block) -> str:
    """The lines of a shell block that a test can run; the others are checked against the tree."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    program = []
    for line in lines:
        if line.startswith(SETUP):
            check_install(block, line)
        elif line.startswith("make "):
            check_targets(block, line)
            program += [f'make -C "{ROOT}" {line.removeprefix("make ")}'] if block.slow else []
        else:
            program.append(line)
    return "\n".join(program) + "\n"


def check_install(block: Block, line: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for group in re.findall(r"(?:\.|burnish)\[([^\]]*)\]", line):
        unknown = set(group.split(",")) - extras.keys()
        assert not unknown, f"{block.where}: {line!r} asks for extras that pyproject.toml hasn't: {unknown}"
    for file in re.findall(r"(?:-c|-r) (\S+)", line):
        assert (ROOT / file).is_file(), f"{block.where}: {line!r} names {file}, which isn't in the tree"


def check_targets(block: Block, line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in line.partition("#")[0].split()[1:]:
        known = "=" in target or re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
        assert known, f"{block.where}: {line!r}, but the Makefile has no target {target}"


def reader_environment() -> dict[str, str]:
    """This process's environment without what conftest.py sets for tests."""
    ours = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}", "PYTHONPATH": str(ROOT)}


DOCUMENTS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.is_file()]
BLOCKS = [block for path in DOCUMENTS for block in read_blocks(path)]


def cases(*, slow: bool) -> list[object]:
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in RUNNABLE and block.slow == slow]


@pytest.mark.slow
@pytest.mark.parametrize("block", cases(slow=False))
def test_block_runs(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


@pytest.mark.docs_slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", cases(slow=True))
def test_slow_block_runs(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


def test_blocks_say_their_language_and_few_are_slow() -> None:
    assert [block.where for block in BLOCKS if block.language not in RUNNABLE | TO_READ] == []
    assert sum(block.slow for block in BLOCKS) <= MAX_SLOW


SAMPLE = """\
# Sample

```bash
git clone somewhere burnish
pip install -c constraints.txt -e ".[quickstart,dev]"
make check test  # a lane that would never end here
echo hello > said; ls recipes_missing 2>/dev/null || cat said
```

1. In a list:

   ```python
   import os
   print("XLA_FLAGS" in os.environ, __name__)
   ```

<!-- slow -->
```console
$ echo "what a reader types"
what a reader sees
```

```text
not code
```

<!-- file said.py -->
```python
word = "kept"
```

```python
from said import word
print(word)
```
"""


@pytest.fixture
def sample(tmp_path: Path) -> list[Block]:
    (tmp_path / "sample.md").write_text(SAMPLE)
    return read_blocks(tmp_path / "sample.md")


def test_blocks_are_found_where_they_are(sample: list[Block]) -> None:
    assert [(b.where, b.language, b.slow) for b in sample] == [
        ("sample.md:3", "bash", False),
        ("sample.md:12", "python", False),
        ("sample.md:18", "console", True),
        ("sample.md:23", "text", False),
        ("sample.md:28", "python", False),
        ("sample.md:32", "python", False),
    ]
    assert [list(b.files) for b in sample] == [[], [], [], [], ["said.py"], ["said.py"]]
    assert sample[1].text.startswith("import os\nprint")


def test_blocks_run_as_a_reader_runs_them(sample: list[Block], tmp_path: Path) -> None:
    assert [run_block(block, tmp_path) for block in sample[:3]] == ["hello\n", "False __main__\n", "what a reader types\n"]
    assert [run_block(block, tmp_path) for block in sample[4:]] == ["", "kept\n"]


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("python", "raise SystemExit('no')", "ended with 1"),
        ("bash", "false\ntrue", "ended with 1"),
        ("bash", "false | true", "ended with 1"),
        ("bash", 'pip install "burnish[everything]"', "extras that pyproject.toml hasn't: {'everything'}"),
        ("bash", "pip install -c constraint.txt -e .", "names constraint.txt"),
        ("console", "$ make coffee", "no target coffee"),
    ],
)
def test_a_wrong_block_fails(language: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_block(Block("x.md:1", language, text, slow=False), tmp_path)


def test_every_page_is_in_the_tree_that_sphinx_reads() -> None:
    listed = re.findall(r"^([a-z-]+)$", "".join(TOCTREE.findall((ROOT / "docs" / "index.md").read_text())), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index")


def test_every_algorithm_has_its_part_with_the_keys_that_only_it_has() -> None:
    algorithms = importlib.import_module("burnish.config.algorithms")
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    shared = algorithms.ClippedConfig.model_fields.keys()
    for config in algorithms.AlgorithmConfig.__subclasses__() + algorithms.ClippedConfig.__subclasses__():
        if "name" in config.model_fields:
            part = " ".join(parts[config.model_fields["name"].default].split())
            assert [key for key in config.model_fields.keys() - shared - {"name"} if f"`{key}" not in part] == []
            assert "Differs from the paper" in part and re.search(r"arXiv:\d{4}\.\d{5}", part)


@pytest.mark.slow
def test_the_pages_build_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="`make docs` makes an environment of its own")
    built = subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "tour.html").is_file()
