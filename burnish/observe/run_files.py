"""What a run has left in its folder, read back: configuration, metrics, episodes. `burnish trace`, `watch` and `report` call it.

Owns reading only, also while the run goes on: a line that isn't whole yet is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from burnish.config.errors import MissingFile


def run_path(folder: str | Path) -> Path:
    """The folder, if it is a run's."""
    path = Path(folder)
    if not (path / "status.json").is_file():
        raise MissingFile(f"{path} is no run's folder: it has no status.json; give the one that the run printed, e.g. runs/NAME")
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """The run's options; none where it has ended before it wrote them."""
    path = folder / "config.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that may still be written to."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """A step's metrics, one after another, "step" among them; what isn't finite as a float."""
    return [{name: float(value) for name, value in line.items()} for line in read_lines(folder / "metrics.jsonl")]


def read_episodes(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, its episodes) in order of steps."""
    paths = {int(path.stem.removeprefix("step_")): path for path in (folder / "transcripts").glob("step_*.jsonl")}
    for step in sorted(paths):
        yield step, read_lines(paths[step])


__all__ = ["read_config", "read_episodes", "read_lines", "read_metrics", "run_path"]
