"""OpenTelemetry spans of a request: what it waited for, and what was restored.

They are below the span that the request's trace headers name: the client's, or that of the server
(`engine.api.server_spans`). vLLM's own span `llm_request` is on the same level, since vLLM makes
it only when the request has ended. OpenTelemetry is imported only if there is an
`--otlp-traces-endpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero_connector.engine.scheduler.request_report import RequestReport

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

SPAN = "heterocache.request"
TRACER = "heterocache"


class SpanWriter:
    """Makes the spans of ended requests. The provider's own thread exports them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @classmethod
    def open(cls, endpoint: str) -> SpanWriter:
        """Return a writer to vLLM's exporter in this process.

        With several API servers vLLM starts the engine's process without one; then it is made here.
        """
        from opentelemetry import trace
        from vllm.tracing import init_tracer

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            init_tracer("vllm.engine_core", endpoint)
        return cls(trace.get_tracer(TRACER))

    def write(self, report: RequestReport, trace_headers: Mapping[str, str] | None) -> None:
        """Make a span of the request, and one below it for each of its phases."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        phases = report.phases()
        begin_s = min((x.begin_s for x in phases), default=0.0)
        end_s = max((x.end_s for x in phases), default=0.0)
        caller = TraceContextTextMapPropagator().extract(dict(trace_headers or {}), Context())
        span = self._tracer.start_span(
            SPAN, caller, attributes=attributes_of(report), start_time=_ns(report.time + begin_s)
        )
        inside = set_span_in_context(span, caller)
        parents = dict[str | None, Context]()
        for phase in phases:
            part = self._tracer.start_span(
                f"heterocache.{phase.name.replace(' ', '_')}",
                parents.get(phase.within, inside),
                start_time=_ns(report.time + phase.begin_s),
            )
            parents[phase.name] = set_span_in_context(part, caller)
            part.end(_ns(report.time + phase.end_s))
        span.end(_ns(report.time + end_s))


def attributes_of(report: RequestReport) -> dict[str, AttributeValue]:
    """Return what a span says of the request, without what is not known."""
    restored = sum(report.restored_tokens.values())
    cached = None if report.local_tokens is None else report.local_tokens + restored
    found = {
        "gen_ai.request.id": report.request_id,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached,
        **{f"heterocache.{name}": getattr(report, name) for name in _SHOWN},
        **{f"heterocache.restored_tokens.{t}": n for t, n in report.restored_tokens.items()},
    }
    return {name: value for name, value in found.items() if value is not None}


_SHOWN = (
    *("boundary", "choice", "reason", "stored_tokens", "local_tokens", "computed_tokens"),
    *("replayed_tokens", "is_parked", "predicted_s", "computing_s", "observed_s", "preemptions"),
    *("session", "finish"),
)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
