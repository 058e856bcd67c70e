"""Sends the spans of a run to an OpenTelemetry collector as well (extra `otel`); `OTEL_EXPORTER_OTLP_ENDPOINT` and the like are theirs.

Owns the translation. A run is one trace; a span's parent is the one that it lies in on its lane, or the run. Ids, what was noted, lane and
flows are attributes, `burnish.…`. `TraceWriter` hands events on from its thread; queue, thread and protocol are the package's own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from burnish.observe.sinks import EvalReport, StepReport
from burnish.observe.trace import Event, Lane, span
from burnish.observe.trackers import CLOSE_S, package

QUEUED = 20_000
"""Ended spans that wait for the collector; more are dropped."""
EVERY_MS = 1000


class SpanExport:
    """A sink that a `TraceWriter` feeds (`then`), and that is closed after it.

    exporter: where to, if not over OTLP/HTTP. close_s: how long the collector gets at the end to take what still waits. Raises UserError
    where the package isn't there.
    """

    def __init__(self, run: str, *, exporter: Any = None, close_s: float = CLOSE_S) -> None:
        sdk, export, resources = (
            package(f"opentelemetry.sdk.{name}", "opentelemetry-sdk") for name in ("trace", "trace.export", "resources")
        )
        self._otel = package("opentelemetry.trace", "opentelemetry-api")
        if exporter is None:
            over_http = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
            exporter = package(over_http, "opentelemetry-exporter-otlp-proto-http").OTLPSpanExporter()
        about = resources.Resource.create({"service.name": "burnish", "burnish.run": run})
        self._provider = sdk.TracerProvider(resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter, max_queue_size=QUEUED, schedule_delay_millis=EVERY_MS))
        self._tracer = self._provider.get_tracer("burnish")
        self._close_s, self._closed = close_s, False
        self._offset = time.time_ns() - time.monotonic_ns()
        self._root = self._tracer.start_span(f"burnish {run}")
        self._open: dict[Lane, list[tuple[span, Any]]] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Begin and end spans as these events say; never waits for the collector."""
        for time_ns, kind, what in events:
            if kind == "begin":
                self._begin(what, time_ns + self._offset)
            elif kind == "end":
                self._end(what, time_ns + self._offset)

    def _begin(self, one: span, time_ns: int) -> None:
        assert one.lane is not None, "it has begun"
        stack = self._open.setdefault(one.lane, [])
        context = self._otel.set_span_in_context(stack[-1][1] if stack else self._root)
        known = {"burnish.lane": one.lane.name, "burnish.lane.group": one.lane.group, **_attributes(one.ids)}
        if flows := [*one.flows, *one.ends]:
            known["burnish.flows"] = flows
        stack.append((one, self._tracer.start_span(one.name, context=context, attributes=known, start_time=time_ns)))

    def _end(self, one: span, time_ns: int) -> None:
        assert one.lane is not None, "it has begun"
        stack = self._open.get(one.lane, [])
        if all(begun is not one for begun, _ in stack):
            return
        while stack:  # those that nobody stopped end with what they are in
            begun, sent = stack.pop()
            if begun is one:
                sent.set_attributes(_attributes(one.notes or {}))
                if one.error is not None:
                    sent.set_status(self._otel.StatusCode.ERROR, one.error)
            sent.end(time_ns)
            if begun is one:
                return

    def step(self, report: StepReport) -> None:
        """Metrics go elsewhere."""

    def evaluation(self, report: EvalReport) -> None:
        """Evaluations are spans already."""

    def close(self) -> None:
        """End what is open, and wait for the collector, but not for long."""
        if self._closed:
            return
        self._closed = True
        for _, sent in (entry for stack in self._open.values() for entry in reversed(stack)):
            sent.end()
        self._root.end()
        leaving = threading.Thread(target=self._provider.shutdown, name="telemetry", daemon=True)
        leaving.start()
        leaving.join(self._close_s)
        if leaving.is_alive():
            print("burnish: the OpenTelemetry collector was too slow: the last spans are lost", file=sys.stderr)


def _attributes(values: Mapping[str, object]) -> dict[str, Any]:
    plain = {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()}
    return {f"burnish.{name}": value for name, value in plain.items()}


__all__ = ["SpanExport"]
