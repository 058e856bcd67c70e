"""An OpenTelemetry collector on this machine, for tests: keeps what is posted to it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        spans, paths = self.spans, self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                sent = ExportTraceServiceRequest.FromString(body).resource_spans
                spans.extend(one for resource in sent for scope in resource.scope_spans for one in scope.spans)
                paths.add(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        super().__init__(("127.0.0.1", 0), Handler)

    def wait_for(self, *names: str) -> None:
        """Until spans of these names have come."""
        deadline = time.monotonic() + 60
        while not {*names} <= {one.name for one in self.spans} and time.monotonic() < deadline:
            time.sleep(0.02)
        assert {*names} <= {one.name for one in self.spans}


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector to which this process's exporters send while the block runs."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()
