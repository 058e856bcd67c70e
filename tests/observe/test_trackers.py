"""Other people's trackers: what they read back is what was measured, and one that hangs or fails holds up nothing."""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.observe.sinks import EvalReport, StepReport
from burnish.observe.trackers import Background, CallbackSink, make_tracker

STEPS = {step: {"reward/mean": step / 7, "optim/grad_norm": 1.5 * step} for step in (1, 2, 3)}


def feed(sink: Background) -> None:
    for step, metrics in STEPS.items():
        sink.step(StepReport(step, 3, metrics))
    sink.evaluation(EvalReport(3, "after", {"eval/greedy/accuracy": 0.75}))
    sink.close()


def test_a_function_gets_what_was_measured() -> None:
    got: list[tuple[int, dict[str, float]]] = []
    feed(Background(CallbackSink(lambda step, metrics: got.append((step, dict(metrics))))))
    assert got == [*STEPS.items(), (3, {"eval/greedy/accuracy": 0.75})]


def records(path: Path) -> Iterator[bytes]:
    """The records of an event file: length, its checksum, the record, its checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_tensorboard_reads_back_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    feed(make_tracker("tensorboard", tmp_path, config={}))
    (file,) = (tmp_path / "tensorboard").iterdir()
    found: dict[int, dict[str, float]] = {}
    for event in map(Event.FromString, records(file)):
        found.setdefault(event.step, {}).update({value.tag: value.simple_value for value in event.summary.value})
    for step, metrics in STEPS.items():
        assert {name: found[step][name] for name in metrics} == pytest.approx(metrics, rel=1e-6)
    assert found[3]["eval/greedy/accuracy"] == 0.75


def test_a_tracker_that_hangs_costs_nothing_but_its_records(capsys: pytest.CaptureFixture[str]) -> None:
    """It hangs for 30 s, while 1,500 steps of .2 s would take 300, of which 5 % are 15."""
    released = threading.Event()
    sink = Background(CallbackSink(lambda step, metrics: released.wait(30)), close_s=0.1)
    start = time.perf_counter()
    for step in range(1500):
        sink.step(StepReport(step, 1500, {"reward/mean": 0.5}))
    assert sink.dropped > 400
    sink.close()
    assert time.perf_counter() - start < 10
    released.set()
    assert "CallbackSink was too slow:" in capsys.readouterr().err


def test_a_tracker_that_fails_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(step: int, metrics: object) -> None:
        raise ConnectionError("no route to host")

    feed(Background(CallbackSink(fails)))
    assert "CallbackSink failed and is left out from here on: ConnectionError: no route to host" in capsys.readouterr().err


def test_a_tracker_that_isnt_installed_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        make_tracker("wandb", tmp_path, config={})


# --------------------------------------------------------------------------------------------------- in an environment of their own


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, in them pieces of records: checksum, length, kind (whole, first, middle, last)."""
    at, parts, block = 7, b"", 1 << 15  # after the file's own header
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")
def test_wandbs_offline_folder_reads_back_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    feed(make_tracker("wandb", tmp_path / "run", config={"training": {"max_steps": 3}}))
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (tmp_path / "run").rglob("*.wandb")
    found: dict[int, dict[str, float]] = {}
    for data in log_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            found.setdefault(items["_step"], {}).update(items)
    for step, metrics in STEPS.items():
        assert {name: found[step][name] for name in metrics} == metrics
    assert found[3]["eval/greedy/accuracy"] == 0.75


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")
def test_trackios_database_reads_back_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    feed(make_tracker("trackio", tmp_path / "run", config={}))
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics order by id").fetchall()
    found: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        found.setdefault(step, {}).update(json.loads(metrics))
    assert {step: {name: found[step][name] for name in metrics} for step, metrics in STEPS.items()} == STEPS
    assert found[3]["eval/greedy/accuracy"] == 0.75


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_back_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    feed(make_tracker("mlflow", tmp_path / "run", config={"training": {"max_steps": 3}}))
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    for name in STEPS[1]:
        assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} == {
            s: metrics[name] for s, metrics in STEPS.items()
        }
    assert run.data.metrics["eval/greedy/accuracy"] == 0.75 and run.data.params == {"training.max_steps": "3"}
