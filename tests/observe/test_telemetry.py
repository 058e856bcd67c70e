"""OpenTelemetry: a collector gets the spans that the trace has, under their parents; one that hangs costs the last spans, no time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from burnish.observe import trace
from burnish.observe.telemetry import SpanExport
from burnish.observe.trace import Lane
from burnish.observe.trace_reader import read
from burnish.observe.trace_writer import TraceWriter
from tests.observe.collector import collecting


def a_little_run(path: Path, export: SpanExport) -> None:
    """Spans in one another, on two lanes, one that fails and one that nobody stops."""
    writer = TraceWriter(path, then=export.take)
    with trace.span("step", step=3, flows=[7], what=Path("a")) as step:
        with trace.span("update"):
            trace.span("never stopped").start()
        trace.record("decode", Lane("devices", "engine"), time.monotonic_ns(), time.monotonic_ns() + 1_500, ids=2)
        step.note(found="seven")
    with pytest.raises(KeyError), trace.span("reward", right=True):
        raise KeyError("x")
    trace.count("queue", 2)
    writer.close()
    export.close()
    export.close()


def test_spans_lie_in_their_parents_with_ids_and_lanes(tmp_path: Path) -> None:
    memory = InMemorySpanExporter()
    a_little_run(tmp_path / "trace.pftrace", SpanExport("first", exporter=memory))
    found = {one.name: one for one in memory.get_finished_spans()}
    parents = {name: next((o.name for o in found.values() if one.parent and o.context == one.parent), None) for name, one in found.items()}
    assert parents == {
        "burnish first": None,
        "step": "burnish first",
        "update": "step",
        "never stopped": "update",
        "decode": "burnish first",
        "reward": "burnish first",
    }
    assert len({one.context.trace_id for one in found.values()}) == 1
    assert {one.resource.attributes["burnish.run"] for one in found.values()} == {"first"}
    assert found["step"].attributes == {
        "burnish.lane": "MainThread",
        "burnish.lane.group": "threads",
        "burnish.step": 3,
        "burnish.what": "a",
        "burnish.flows": (7,),
        "burnish.found": "seven",
    }
    assert found["reward"].status.description == "KeyError" and found["reward"].attributes["burnish.right"] is True
    for one in read(tmp_path / "trace.pftrace").slices:
        sent = found[one.name]
        assert sent.end_time - sent.start_time == one.end_ns - one.start_ns and abs(sent.start_time - one.start_ns) < 1e9
        assert (sent.attributes["burnish.lane"], sent.attributes["burnish.lane.group"]) == (one.lane, one.group)


def test_a_collector_gets_them_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as collector:
        a_little_run(tmp_path / "trace.pftrace", SpanExport("first", close_s=60))
    found = {one.name: one for one in collector.spans}
    assert collector.paths == {"/v1/traces"} and len(collector.spans) == 6
    assert found["update"].parent_span_id == found["step"].span_id and found["step"].parent_span_id == found["burnish first"].span_id
    values = {note.key: note.value for note in found["step"].attributes}
    assert values["burnish.step"].int_value == 3 and values["burnish.lane"].string_value == "MainThread"


class Hangs(InMemorySpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self.released, self.asked = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.asked.set()
        self.released.wait(60)
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_costs_the_run_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = Hangs()
    export = SpanExport("first", exporter=hangs, close_s=0.1)
    writer = TraceWriter(tmp_path / "trace.pftrace", then=export.take)
    start = time.perf_counter()
    while not hangs.asked.is_set() and time.perf_counter() - start < 30:
        with trace.span("step"):
            time.sleep(0.001)
    for step in range(3000):  # while it hangs
        with trace.span("step", step=step):
            pass
    writer.close()
    export.close()
    assert time.perf_counter() - start < 40, "it would hang for 60 s"
    hangs.released.set()
    assert "collector was too slow" in capsys.readouterr().err
    assert len([one for one in read(tmp_path / "trace.pftrace").named("step") if "step" in one.ids]) == 3000


def test_what_fails_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(events: object) -> None:
        raise ConnectionError("no route to host")

    writer = TraceWriter(tmp_path / "trace.pftrace", then=fails)
    for _ in range(2):
        with trace.span("step"):
            pass
        writer.flush()
    writer.close()
    assert capsys.readouterr().err.count("spans go nowhere else from here on: ConnectionError: no route to host") == 1
    assert len(read(tmp_path / "trace.pftrace").named("step")) == 2
