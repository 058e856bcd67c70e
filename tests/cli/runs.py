"""Small runs from the command line: a model folder, a task beside its configuration, and `burnish` called in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main

CONFIG = """
model: {path: MODEL, precision: f32}
data:
  train: [{path: train.jsonl}]
  eval: [{path: eval.jsonl}]
rewards: [{fn: "./grade.py:hits"}]
algorithm: {num_generations: 2}
rollout:
  max_prompt_tokens: 12
  slots: 8
  prefill_rows: 4
  decode_chunk: 4
  sampling: {max_tokens: 4}
training:
  max_steps: 2
  batch_size: 4
  compare: true
  head_chunk: 64
  optimizer: {learning_rate: 0.01}
run: {name: first}
"""

GRADE = """
def hits(completions, answer):
    return [text.count(gold) + 0.01 * len(text) for text, gold in zip(completions, answer)]

def raises(completions):
    raise ZeroDivisionError("no tests were run")

not_a_function = 3
"""


def write_task(folder: Path, model: Path) -> Path:
    """A configuration with its data and rewards in `folder`; returns the configuration's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", range(10)), ("eval", range(10, 16))):
        lines = [json.dumps({"prompt": str(i), "answer": str(i % 10)}) for i in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "grade.py").write_text(GRADE)
    (folder / "task.yaml").write_text(CONFIG.replace("MODEL", str(model)))
    return folder / "task.yaml"


class Shell:
    """Runs commands, in a working directory that isn't the configuration's."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *argv: Any) -> tuple[int, str, str]:
        self._capture.readouterr()
        code = main([str(word) for word in argv])
        out, err = self._capture.readouterr()
        return code, out, err
