"""Small runs from the command line: a task beside its configuration, and `burnish` called in this process or in one that may be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from burnish.checkpoint import store
from burnish.cli.main import main

LORA = ["model.lora={rank: 2, targets: [q, v]}", "training.compare=false"]
"""Overrides for runs that only train."""

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


def start_train(task: Path, *arguments: str, faults: str = "", variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`burnish train` in a process of its own, with one device, as a person has. variables: of its environment."""
    environment = {
        **os.environ,
        **(variables or {}),
        "BURNISH_FAULTS": faults,
        "XLA_FLAGS": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    argv = [sys.executable, "-m", "burnish", "train", str(task), *arguments]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, once it has ended; one that doesn't is killed."""
    try:
        out, err = child.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    return child.returncode, out, err


def outcome(run: Path) -> dict[str, Any]:
    """What two runs must share to be one: the arrays of the last checkpoint, the data's cursor, rows and episodes of every step."""
    step = store.committed(run / "checkpoints")[-1]
    with ocp.StandardCheckpointer() as reader:
        arrays = reader.restore((run / "checkpoints" / str(step) / "arrays").absolute())
    episodes = {}
    for path in sorted((run / "transcripts").glob("step_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        episodes[path.name] = [(line["prompt_id"], line["messages"], line["reward"], line["versions"]) for line in lines]
    return {
        "arrays": {name: leaf.tobytes() for name, leaf in arrays.items()},
        "data": store.read_extra(run / "checkpoints", step)["data"],
        "episodes": episodes,
        "steps": [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()],
        "exported": (run / "adapter" / "adapter_model.safetensors").read_bytes(),
    }
