"""OpenTelemetry spans of requests: placing one, and each sending of it to a worker.

The trace is the client's, if it sends a `traceparent`. Workers get the context of the span of their
sending, so that the spans of an engine are below it. OpenTelemetry is imported only where the
configuration names a collector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from hetero_connector.errors import RouterConfigError
from ownership.router.doors import DOORS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from ownership.router.placer import Placed
    from ownership.router.requests import Headers

_CONTEXT = (b"traceparent", b"tracestate")
_SERVICE = "heterocache-router"


class Sending:
    """One sending of a request to a worker. This class makes no span."""

    def headers(self, headers: Headers) -> Headers:
        """Return the headers for the worker."""
        return headers

    def on_status(self, status: int) -> None:
        """The worker has sent the head of its answer."""


class RequestSpans:
    """The spans of one request. This class makes none: no collector is configured."""

    @property
    def trace_id(self) -> str:
        """The id of their trace; "" without one."""
        return ""

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Wait for room and choose a worker, inside."""
        yield

    def on_placed(self, placed: Placed) -> None:
        """A worker was chosen."""

    @contextmanager
    def sending(self, worker: str, leg: str) -> Iterator[Sending]:
        """Send the request to a worker, inside. `leg`: `upstream`, or `prefill`."""
        yield Sending()

    def on_end(self, status: int, reason: str = "") -> None:
        """The answer is complete. `reason`: why the router itself answered, or `client_left`."""


NO_SPANS = RequestSpans()


class RouterSpans:
    """Makes spans, if there is a collector for them. A thread exports them."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: OTLP over HTTP; "" makes no spans. Raises RouterConfigError."""
        self._provider: TracerProvider | None = None
        if endpoint:
            self._provider = _provider(endpoint)
            self._tracer = self._provider.get_tracer("heterocache")

    def begin(self, scope: Scope) -> RequestSpans:
        """Begin the span of a request, if it is one for a model."""
        if self._provider is None or scope["path"] not in DOORS or scope["method"] != "POST":
            return NO_SPANS
        return _RequestSpans(self._tracer, scope)

    def close(self) -> None:
        """Export what is left. Slow."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        problem = f"otlp_traces_endpoint: {error.name} is missing: install 'heterocache[traces]'"
        raise RouterConfigError("the router", [problem]) from error
    # `OTEL_SERVICE_NAME` and other variables of OpenTelemetry come first.
    own = Resource({"service.name": _SERVICE})
    named = Resource.create()
    is_named = not str(named.attributes["service.name"]).startswith("unknown_service")
    provider = TracerProvider(resource=named if is_named else named.merge(own))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class _RequestSpans(RequestSpans):
    """The span of a request in the router, and those below it."""

    def __init__(self, tracer: Tracer, scope: Scope) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _CONTEXT}
        caller = TraceContextTextMapPropagator().extract(carrier, Context())
        attributes = {"http.request.method": "POST", "http.route": scope["path"]}
        self._tracer = tracer
        self._span = tracer.start_span(f"POST {scope['path']}", caller, SpanKind.SERVER, attributes)
        self._inside = set_span_in_context(self._span, caller)
        self._placing: Span | None = None

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @contextmanager
    def placing(self) -> Iterator[None]:
        with _below(self._tracer, "heterocache.place", self._inside) as span:
            self._placing = span
            yield

    def on_placed(self, placed: Placed) -> None:
        assert self._placing is not None  # it is placed inside `placing`
        self._placing.set_attributes(_attributes(placed))

    @contextmanager
    def sending(self, worker: str, leg: str) -> Iterator[Sending]:
        with _below(self._tracer, f"heterocache.{leg}", self._inside, is_client=True) as span:
            span.set_attribute("heterocache.worker", worker)
            yield _Sending(span, self._inside)

    def on_end(self, status: int, reason: str = "") -> None:
        from opentelemetry.trace import StatusCode

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if reason:
            self._span.set_attribute("heterocache.reason", reason)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class _Sending(Sending):
    def __init__(self, span: Span, inside: Context) -> None:
        self._span, self._inside = span, inside

    def headers(self, headers: Headers) -> Headers:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = dict[str, str]()
        context = set_span_in_context(self._span, self._inside)
        TraceContextTextMapPropagator().inject(carrier, context)
        own = [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]
        return [*(x for x in headers if x[0] not in _CONTEXT), *own]

    def on_status(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)


@contextmanager
def _below(
    tracer: Tracer, name: str, inside: Context, *, is_client: bool = False
) -> Iterator[Span]:
    """Make a span that an exception marks as an error, except the client's leaving."""
    from opentelemetry.trace import SpanKind, StatusCode

    span = tracer.start_span(name, inside, SpanKind.CLIENT if is_client else SpanKind.INTERNAL)
    try:
        yield span
    except Exception as error:
        span.set_status(StatusCode.ERROR, str(error) or type(error).__name__)
        raise
    finally:
        span.end()


def _attributes(placed: Placed) -> dict[str, Any]:
    """Return what a span says of a placement, without what is not known."""
    found = {
        "heterocache.worker": placed.worker.name,
        "heterocache.certainty": placed.certainty,
        "heterocache.reasons": list(placed.reasons),
        "heterocache.action": placed.action,
        "heterocache.predicted_s": placed.predicted_ttft_s,
    }
    return {name: value for name, value in found.items() if value not in ("", [], None)}
