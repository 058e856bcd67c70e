"""The trace on disk: what is written is what happened, bounded, whole after a kill, and linked from episode to update."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from burnish.cli.main import main
from burnish.models.model import Model
from burnish.observe import trace
from burnish.observe.run_folder import RunFolder
from burnish.observe.trace import Lane
from burnish.observe.trace_reader import read
from burnish.observe.trace_writer import TraceWriter, previous_part, whole_packets
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import finish, start_train, write_task
from tests.observe.traces import ALPHABET, BEGIN, END, faults_of, packets, spans_in, traced_learner


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.pftrace"


def test_spans_come_back_as_they_were(path: Path) -> None:
    writer = TraceWriter(path)
    with trace.span("outer", flows=[7], step=3, what=Path("a"), share=0.5, right=True) as outer:
        with trace.span("inner"):
            time.sleep(0.01)
        outer.note(found="seven")
    with pytest.raises(KeyError), trace.span("fails"):
        raise KeyError("x")
    trace.count("queue", 2)
    trace.record("decode", Lane("devices", "engine"), 1_000, 2_500)
    writer.close()
    writer.close()
    found = read(path)
    decode, first, inner, fails = found.slices
    assert (first.name, first.group, first.lane, first.depth, first.flows) == ("outer", "threads", "MainThread", 0, (7,))
    assert first.ids == {"step": 3, "what": "a", "share": 0.5, "right": True, "found": "seven"} and first.seconds == outer.seconds
    assert (inner.name, inner.depth) == ("inner", 1) and first.start_ns <= inner.start_ns and inner.end_ns <= first.end_ns
    assert fails.ids == {"error": "KeyError"}
    assert (decode.group, decode.lane, decode.seconds) == ("devices", "engine", 1.5e-6)
    assert [value for _, value in found.counters["queue"]] == [2.0]


def test_events_cost_few_bytes(path: Path) -> None:
    writer = TraceWriter(path)
    for i in range(5_000):
        with trace.span("model", turn=i % 7):
            pass
    writer.close()
    assert path.stat().st_size / 10_000 < 45


def test_the_file_is_bounded_and_its_open_spans_begin_again(path: Path) -> None:
    writer = TraceWriter(path, most_bytes=200_000)
    with trace.span("run"):
        for i in range(20):
            for _ in range(500):
                with trace.span("work", i=i):
                    pass
            writer.flush()
    writer.close()
    assert path.stat().st_size + previous_part(path).stat().st_size < 300_000
    found = read(path)
    (run,) = found.named("run")
    assert not run.cut and found.named("work")[-1].ids == {"i": 19} and found.named("work")[0].ids["i"] > 0


KILLED = """
import os, signal, sys, time
from pathlib import Path
from burnish.observe import trace
from burnish.observe.trace_writer import TraceWriter
writer = TraceWriter(Path(sys.argv[1]))
with trace.span("run"):
    with trace.span("step", step=0):
        pass
    with trace.span("step", step=1):
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_goes_on_ends_what_a_kill_left_open(path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60)
    with path.open("ab") as file:
        file.write(pb.Trace(packet=[pb.TracePacket(timestamp=5)] * 50).SerializeToString()[:-3])  # and a packet that was cut
    assert [one.cut for one in read(path).named("run", "step")] == [True, False, True]
    writer = TraceWriter(path)
    with trace.span("run"):
        pass
    writer.close()
    found = read(path)
    assert len(found.named("run")) == 2 and not any(one.cut for one in found.slices)
    assert whole_packets(path.read_bytes()) == path.stat().st_size


def test_whole_packets_of_every_length() -> None:
    data = pb.Trace(packet=[pb.TracePacket(timestamp=5), pb.TracePacket(trusted_packet_sequence_id=2**30)]).SerializeToString()
    first = len(pb.Trace(packet=[pb.TracePacket(timestamp=5)]).SerializeToString())
    assert [whole_packets(data[:n]) for n in range(len(data) + 1)] == [0] * first + [first] * (len(data) - first) + [len(data)]


def test_a_full_disk_costs_the_trace_and_not_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(path)

    def full(data: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(writer, "_write", full)
    with trace.span("work"):
        pass
    with pytest.raises(OSError, match="no space left"):
        writer.close()


# ----------------------------------------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("traced")
    (root / "model").mkdir()
    write_tiny_model(root / "model", config=tiny_config(width=16), alphabet=ALPHABET, scale=2.0)
    with RunFolder(root, "run") as folder:
        traced_learner(Model.load(root / "model"), folder, steps=3, env_s=0.02).train()
    yield root / "run" / "trace.pftrace"


@pytest.mark.slow
def test_an_agentic_run_leaves_a_sound_trace(run: Path) -> None:
    assert faults_of(run, cut=False) == []
    found = read(run)
    names = {one.name for one in found.slices}
    assert {"run", "step", "rollout", "episode", "model", "env.reset", "env.step", "env.close", "reward", "batch", "data"} <= names
    assert {"queued", "queue.put", "gate.wait", "wait", "score", "update", "sync", "request", "prefill", "decode"} <= names
    episodes = found.named("episode")
    assert [sorted((e.ids["step"], e.ids["group"], e.ids["sample"]) for e in episodes)] == [
        [(step, group, sample) for step in range(3) for group in range(4) for sample in range(4)]
    ]
    assert {e.ids["turns"] for e in episodes} == {2} and len(found.named("model")) == 2 * len(episodes)
    assert {one.ids["version"] for one in found.named("model")} == {0, 1, 2}
    assert [one.ids["step"] for one in found.named("update") if one.group == "devices"] == [0, 1, 2]


@pytest.mark.slow
def test_the_check_sees_what_is_wrong(run: Path, tmp_path: Path) -> None:
    """Each change to a sound trace is found."""
    sound = pb.Trace(packet=packets(run))

    def after(change: str) -> list[str]:
        changed = pb.Trace()
        changed.CopyFrom(sound)
        events = [p for p in changed.packet if p.HasField("track_event")]
        if change == "unbalanced":
            next(p for p in reversed(events) if p.track_event.type == END).track_event.type = BEGIN
        elif change == "back in time":
            events[len(events) // 2].timestamp = 5
        elif change == "no parent":
            next(p for p in changed.packet if p.track_descriptor.parent_uuid).track_descriptor.parent_uuid = 99
        else:
            for p in events:
                p.track_event.ClearField("terminating_flow_ids")
        (tmp_path / "changed").write_bytes(changed.SerializeToString())
        return faults_of(tmp_path / "changed", cut=False)

    assert all(after(change) for change in ("unbalanced", "back in time", "no parent", "no flows"))


@pytest.mark.slow
def test_the_commands_shares_are_those_of_the_traces_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run.parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first, *later = sorted(spans_in(run, "step"))
    start, end = later[0][0], later[1][1]

    def seconds(*names: str) -> float:
        """Of the time between, what at least one span of these names covers."""
        covered, until = 0, start
        for a, b in sorted(spans_in(run, *names)):
            a, b = max(a, until), min(b, end)
            covered, until = covered + max(0, b - a), max(until, b)
        return covered / 1e9

    assert told["seconds"] == pytest.approx((end - start) / 1e9, abs=1e-9)
    for name in ("wait", "sync"):
        assert told["trainer"][name] * told["seconds"] == pytest.approx(seconds(name), abs=1e-6)
    assert told["engine_busy"] * told["seconds"] == pytest.approx(seconds("prefill", "decode"), abs=1e-6)
    assert told["rollout"]["rollout"] * told["seconds"] == pytest.approx(seconds("rollout"), abs=1e-6)
    assert sum(s for _, s in told["path"]) == pytest.approx(told["step_s"], rel=0.5)
    assert main(["trace", str(run.parent)]) == 0
    said = capsys.readouterr().out
    assert f"waits {100 * told['trainer']['wait']:.0f} %" in said and "environments: 64 calls a step" in said


@pytest.mark.slow
def test_a_run_cut_by_kill_9_leaves_a_sound_trace(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model", config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    task = write_task(tmp_path / "task", tmp_path / "model")
    (tmp_path / "task" / "world.py").write_text(Path(__file__).with_name("traces.py").read_text())
    more = ["environment={env: './world.py:TwoTurns'}", "rollout.max_episode_tokens=40", f"run.folder={tmp_path / 'runs'}"]
    child = start_train(task, "training.compare=false", "training.max_steps=9", *more, faults="engine.push@version=3:kill")
    code, _, err = finish(child)
    assert code == -9, err
    path = tmp_path / "runs" / "first" / "trace.pftrace"
    assert faults_of(path, cut=True) == []
    open_now = {one.name for one in read(path).slices if one.cut}
    steps = [one for one in read(path).named("step") if not one.cut]
    assert "run" in open_now and steps and len(read(path).named("episode")) >= 8, "all but the last quarter of a second"
