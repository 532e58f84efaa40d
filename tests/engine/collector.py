"""An OpenTelemetry collector inside the test: takes spans by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import until


class Collector:
    """Keeps every span that it gets. Use it as a context manager."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def wait_for(self, trace_id: str, is_complete: Callable[[dict[str, Any]], bool]) -> Any:
        """Return a trace's spans by name when they are complete."""

        def found() -> dict[str, Any]:
            spans = {x.name: x for x in list(self.spans) if x.trace_id.hex() == trace_id}
            return spans if is_complete(spans) else {}

        return until(found, "the trace is complete", pause_s=0.05)

    def close(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes as plain values."""
    return {x.key: getattr(x.value, x.value.WhichOneof("value")) for x in span.attributes}
