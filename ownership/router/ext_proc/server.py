"""The gRPC server of the endpoint picker, on the router's own event loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from hetero_connector.errors import RouterConfigError
from hetero_connector.units import MIB
from ownership.router.ext_proc.messages import (
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from ownership.router.ext_proc.stream import Parts, Stream

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
_LIVENESS = ("", "liveness")
_READINESS = ("readiness", PROCESSOR)

_log = logging.getLogger(__name__)


@asynccontextmanager
async def endpoint_picker(
    parts: Parts, port: int, is_ready: Callable[[], bool], grace_s: Callable[[], float]
) -> AsyncIterator[int]:
    """Serve inside; yields the port. Raises RouterConfigError.

    `is_ready`: returns True if a worker serves, and the router does not end. `grace_s`: asked at
    the end for the seconds that requests under way may take.
    """
    config = parts.config
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", config.max_body_bytes + MIB),
        ]
    )
    server.add_generic_rpc_handlers((_processor(parts), _health(is_ready)))
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        if config.ext_proc_tls is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", _credentials(config.ext_proc_tls))
    except (OSError, RuntimeError) as error:
        problem = f"ext_proc_port: cannot listen at {config.host}, port {port}: {error}"
        raise RouterConfigError("the router", [problem]) from error
    await server.start()
    _log.info("endpoint picker listening at %s:%d", host, bound)
    try:
        yield bound
    finally:
        await server.stop(grace_s())


def _credentials(folder: Path) -> Any:
    """Return the certificate as it is at each handshake: its issuer replaces the files."""

    def read() -> Any:
        pair = (folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(read(), read)


def _processor(parts: Parts) -> Any:
    async def process(messages: AsyncIterator[Any], context: Any) -> None:
        await Stream(parts, context).run()

    handler = grpc.stream_stream_rpc_method_handler(
        process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(PROCESSOR, {"Process": handler})


def _health(is_ready: Callable[[], bool]) -> Any:
    async def check(request: Any, context: Any) -> Any:
        if request.service in _LIVENESS:
            return HealthCheckResponse(status=SERVING)
        if request.service in _READINESS:
            return HealthCheckResponse(status=SERVING if is_ready() else NOT_SERVING)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")

    handler = grpc.unary_unary_rpc_method_handler(
        check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(HEALTH, {"Check": handler})
