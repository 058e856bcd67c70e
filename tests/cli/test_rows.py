"""`burnish sft` and `burnish dpo`: what a run leaves, that one which was stopped goes on as it was, and what bad input leads to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from burnish.cli.result import load_result
from burnish.config.tuning import command_of
from burnish.models.lora import merge
from burnish.models.model import Model
from burnish.models.quant import opened, quantised
from burnish.models.weights import load_adapter
from burnish.observe.run_folder import read_status
from burnish.observe.trace_reader import read
from tests.cli.runs import Shell
from tests.observe.collector import collecting

pytestmark = pytest.mark.slow  # each run compiles programs of its own

CONFIG = """
model: {path: MODEL, precision: f32, lora: {rank: 2, targets: [q, v]}}
data: {train: [{path: train.jsonl}], eval: [{path: eval.jsonl}]}
training:
  max_steps: 4
  batch_size: 4
  max_tokens: 16
  tokens_per_device: 64
  compare: true
  optimizer: {learning_rate: 0.01}
run: {name: first}
"""


@pytest.fixture
def rows(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, with rows that serve both commands, in a folder of its own; the working directory is another."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name, numbers in (("train", range(10)), ("eval", range(10, 16))):
        lines = [
            {"prompt": str(i), "completion": str(i % 10), "chosen": str(i % 10), "rejected": "99", "label": i % 2 == 0} for i in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "rows.yaml").write_text(CONFIG.replace("MODEL", str(model_folder)))
    return tmp_path / "rows.yaml"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("command", "options", "name"),
    [("sft", [], "eval/loss"), ("dpo", [], "eval/margin"), ("dpo", ["loss.name=kto"], "eval/loss")],
    ids=["sft", "dpo", "kto"],
)
def test_a_run_leaves_what_it_promises(
    rows: Path, shell: Shell, command: str, options: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as collector:
        code, out, err = shell(command, rows, *options, "observe.trackers=[otel]")
        collector.wait_for("run", "step", "prepare", "data", "update", "evaluate")
    run = Path("runs/first")
    assert code == 0, err
    assert f"4 steps done; {run / 'adapter'} holds the result" in out and f"{name}: " in out
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert {"policy/loss", "optim/learning_rate", "perf/row_tokens_per_second"} <= metrics(run)[0].keys()
    first, last = json.loads((run / "eval.json").read_text())["evaluations"]
    assert (first["label"], last["label"]) == ("before", "after") and first["metrics"]["eval/loss"] > last["metrics"]["eval/loss"]
    assert read_status(run)["state"] == "complete"
    check_trace(run, shell)
    if command == "sft":
        code, out, err = shell("eval", run)
        assert code == 0, err
        assert f"eval/loss: {last['metrics']['eval/loss']:.4f}" in out.splitlines() and "eval/count: 6" in out.splitlines()


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("distill", ["teacher.path=MODEL", "distillation.temperature=2"], "burnish chat runs/first"),
        ("reward-model", [], "reward_model.path=runs/first/model"),
    ],
)
def test_distillation_and_reward_models_run_and_are_evaluated_from_their_folders(
    rows: Path, shell: Shell, model_folder: Path, command: str, options: list[str], says: str
) -> None:
    fewer_bits = "model.lora={rank: 2, quantize: int8}"
    code, out, err = shell(
        command, rows, fewer_bits, *(option.replace("MODEL", str(model_folder)) for option in options), "training.max_steps=2"
    )
    assert code == 0, err
    run = Path("runs/first")
    assert says in out and (run / ("adapter" if command == "distill" else "model")).is_dir()
    after = json.loads((run / "eval.json").read_text())["evaluations"][-1]["metrics"]
    if command == "distill":
        told, base = load_result(run).params, Model.load(model_folder).params
        adapter = load_adapter(run / "adapter", Model.load(model_folder).config)
        np.testing.assert_array_equal(told["layers"]["q"], merge(opened(quantised(base, "int8")), adapter)["layers"]["q"])
        assert not np.array_equal(told["embed"], base["embed"]), "the rest of the base is in bf16"
    assert command_of(run) == command
    check_trace(run, shell)
    code, out, err = shell("eval", run)
    assert code == 0, err
    assert {f"{name}: {value:.4f}" for name, value in after.items() if name != "eval/count"} <= {*out.splitlines()}


def check_trace(run: Path, shell: Shell) -> None:
    """Every step is in it, with its parts, and what took how long of the steps is told."""
    timeline, rows = read(run / "trace.pftrace"), metrics(run)
    steps, parts = timeline.named("step"), ("prepare", "data", "update", "update.wait")
    assert [step.ids["step"] for step in steps] == [row["step"] - 1 for row in rows]
    for step in steps:
        inside = [one.name for one in timeline.slices if one.track == step.track and step.start_ns <= one.start_ns < step.end_ns]
        assert tuple(name for name in inside if name in parts) == parts
    assert 0 in [one.ids["step"] for one in timeline.named("update") if (one.group, one.lane) == ("devices", "actor")]
    code, out, err = shell("trace", run)
    assert code == 0, err
    assert "busy: " in out and "update " in out and "rollout" not in out


def test_a_run_that_was_cut_short_goes_on_to_the_same_adapter(rows: Path, shell: Shell) -> None:
    assert shell("sft", rows)[0] == 0
    half = ["run.name=half", "training.compare=false"]
    assert shell("sft", rows, *half, "training.max_steps=2")[0] == 0
    code, _, err = shell("sft", rows, *half, "training.max_steps=4", "--resume")
    assert code == 0 and "training.max_steps: was 2, is 4" in err
    whole, again = (load_file(Path("runs", name, "adapter", "adapter_model.safetensors")) for name in ("first", "half"))
    assert all(np.array_equal(whole[name], again[name]) for name in whole)
    assert [row["policy/loss"] for row in metrics(Path("runs/half"))] == [row["policy/loss"] for row in metrics(Path("runs/first"))]
    code, out, _ = shell("sft", rows, *half, "training.max_steps=4", "--resume")
    assert code == 0 and "nothing is left to do" in out
    code, _, err = shell("sft", rows, *half, "training.max_steps=5", "training.batch_size=5", "--resume")
    assert code == 2 and "training.batch_size: was 4, is 5" in err


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("sft", "model.path=''", "`model.path` isn't set"),
        ("sft", "data.train=[]", "`data.train` names no source"),
        ("sft", "data.eval=[]", "held-out"),
        ("sft", "training.batch_size=11", "10"),
        ("sft", "training.max_tokens=3", "all 10 rows are longer"),
        ("sft", "training.optimizer={schedule: cosine, warmup_updates: 9}", "no room after a warm-up of 9"),
        ("sft", "rewards=[]", "rewards"),
        ("dpo", "loss.name=dpo", "dpo"),
        ("dpo", "loss={name: simpo, length_normalised: true}", "length_normalised"),
        ("dpo", "training.neftune_alpha=5", "neftune_alpha"),
        ("dpo", "loss.name=orpo training.precompute_reference=true", "the loss orpo compares with no reference"),
        ("dpo", "data.train=[{path: eval.jsonl}, {path: broken.jsonl}]", "broken.jsonl:0: there is no column 'chosen'"),
    ],
)
def test_what_cant_work_is_said_before_weights_are_loaded(rows: Path, shell: Shell, command: str, override: str, message: str) -> None:
    (rows.parent / "broken.jsonl").write_text('{"prompt": "1"}\n')
    code, out, err = shell(command, rows, *([override] if "{" in override else override.split()))
    assert code == 2 and message in err and "Traceback" not in err and "model  " not in out, err
    assert not Path("runs").exists()
