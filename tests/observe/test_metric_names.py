"""docs/metrics.md is the list of metrics: a name in the code that isn't there fails here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
FAMILIES = sorted({name.split("/")[0] for name in LISTED} - {"METRIC"})
NAME = re.compile(rf"(?:{'|'.join(FAMILIES)})(?:/[A-Za-z0-9_*]+)+")


def names(source: str) -> Iterator[str]:
    """String literals that read as metric names; the computed parts of an f-string become `*`."""
    inside_f_strings: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        text = None
        if isinstance(node, ast.JoinedStr):
            inside_f_strings.update(node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside_f_strings:
            text = node.value
        if text is not None and NAME.fullmatch(text):
            yield text


def is_listed(name: str) -> bool:
    """Whether a row of the table covers `name`, `*` standing for something that isn't known before the run."""
    for row in LISTED:
        pattern = re.sub(r"[A-Z]+", "[^/]+", row)
        if name == row or re.fullmatch(pattern, name.replace("*", "X")):
            return True
    return False


def test_every_metric_of_the_code_is_listed() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "burnish").rglob("*.py"))
        for name in names(path.read_text(encoding="utf-8"))
        if not is_listed(name)
    ]
    assert missing == []


def test_the_check_sees_what_is_missing() -> None:
    found = list(names("""a = {"reward/mean": 1, f"reward/{n}/mean": 2, f"time/{p}_seconds": 3, "policy/kli": 4, "no/metric": 5}"""))
    assert found == ["reward/mean", "reward/*/mean", "time/*_seconds", "policy/kli"]
    assert [name for name in found if not is_listed(name)] == ["policy/kli"]


def test_the_list_is_sound() -> None:
    assert len(LISTED) == len(set(LISTED)) > 30
