"""Calls of the endpoint picker, with the messages that Envoy sends in each of its modes."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from ownership.router.ext_proc.messages import (
    BodyMode,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from ownership.router.ext_proc.server import HEALTH, PROCESSOR
from ownership.router.ext_proc.stream import ENDPOINT
from tests.ownership.router.bench import PATIENCE_S

DUPLEX, BUFFERED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED
EVENT = b'data: {"id": "cmpl-7", "choices": []}\n\n'


@contextmanager
def channel(port: int, root: bytes | None = None) -> Iterator[grpc.Channel]:
    """`root`: the certificate that a server with TLS is checked by."""
    address = f"127.0.0.1:{port}"
    if root is None:
        opening = grpc.insecure_channel(address)
    else:
        opening = grpc.secure_channel(address, grpc.ssl_channel_credentials(root))
    with opening as found:
        yield found


def health(channel: grpc.Channel, service: str) -> int:
    call = channel.unary_unary(
        f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return int(call(HealthCheckRequest(service=service), timeout=PATIENCE_S).status)


class EnvoyCall:
    """One HTTP request. Its methods send what Envoy sends, and return the answers' parts."""

    def __init__(
        self, channel: grpc.Channel, request_mode: int = DUPLEX, response_mode: int = DUPLEX
    ) -> None:
        self.modes = {"request_body_mode": request_mode, "response_body_mode": response_mode}
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = channel.stream_stream(
            f"/{PROCESSOR}/Process",
            ProcessingRequest.SerializeToString,
            ProcessingResponse.FromString,
        )
        self.call = call(iter(self._messages.get, None), timeout=PATIENCE_S)

    def send(self, **message: Any) -> None:
        self._messages.put(ProcessingRequest(**message))

    def close(self) -> None:
        """End the stream, and wait until the picker has ended it, too."""
        self._messages.put(None)
        assert list(self.call) == []

    def next(self, kind: str) -> Any:
        reply = next(self.call)
        assert reply.WhichOneof("kind") == kind, reply
        return reply

    def send_head(
        self,
        path: str = "/v1/completions",
        method: str = "POST",
        subset: Sequence[str] | str | None = None,
        *,
        is_last: bool = False,
        **headers: str,
    ) -> None:
        pairs = {":method": method, ":path": path, "content-type": "application/json", **headers}
        message: dict[str, Any] = {
            "request_headers": {"headers": header_map(pairs), "end_of_stream": is_last},
            "protocol_config": self.modes,
        }
        if subset is not None:
            values = [{"string_value": x} for x in subset]
            value = {"list_value": {"values": values}}
            if isinstance(subset, str):
                value = {"string_value": subset}
            fields = [{"key": "x-gateway-destination-endpoint-subset", "value": value}]
            entry = {"key": "envoy.lb.subset_hint", "value": {"fields": fields}}
            message["metadata_context"] = {"filter_metadata": [entry]}
        self.send(**message)

    def send_body(self, *parts: bytes, is_last: bool = True) -> None:
        for number, part in enumerate(parts, 1):
            end = is_last and number == len(parts)
            self.send(request_body={"body": part, "end_of_stream": end})

    def send_request(self, subset: Sequence[str] | str | None = None, **fields: Any) -> bytes:
        """Send a whole request; return its body."""
        body = json.dumps({"prompt": "x"} | fields).encode()
        self.send_head(subset=subset)
        self.send_body(body)
        return body

    def destination(self, kind: str = "request_headers") -> str:
        """Return the endpoint that the request goes to."""
        reply = self.next(kind)
        return destination_of(reply, getattr(reply, kind).response)

    def echo(self, kind: str = "request_body") -> bytes:
        """Return the parts of a body up to its end."""
        body, is_last = b"", False
        while not is_last:
            part = getattr(self.next(kind), kind).response.body_mutation.streamed_response
            body, is_last = body + part.body, part.end_of_stream
        return body

    def refusal(self) -> Any:
        return self.next("immediate_response").immediate_response

    def answer_head(self, status: int = 200, *, is_last: bool = False) -> dict[str, str]:
        """Tell of an answer's head; return the headers that the client is to get."""
        head = header_map({":status": str(status), "content-type": "text/event-stream"})
        self.send(response_headers={"headers": head, "end_of_stream": is_last})
        reply = self.next("response_headers").response_headers.response
        return headers_of(reply.header_mutation)

    def answer_body(self, *parts: bytes, is_last: bool = True) -> bytes:
        """Tell of parts of an answer; return what comes back of them."""
        back = b""
        for number, part in enumerate(parts, 1):
            end = is_last and number == len(parts)
            self.send(response_body={"body": part, "end_of_stream": end})
            mutation = self.next("response_body").response_body.response.body_mutation
            if self.modes["response_body_mode"] == DUPLEX:
                assert mutation.streamed_response.end_of_stream == end
            back += mutation.streamed_response.body
        return back

    def serve(self, events: int = 3) -> None:
        """Tell of an answer up to its end."""
        self.answer_head()
        self.answer_body(*[EVENT] * events)
        self.close()


def header_map(pairs: dict[str, str]) -> dict[str, Any]:
    return {"headers": [{"key": k, "raw_value": v.encode()} for k, v in pairs.items()]}


def headers_of(mutation: Any) -> dict[str, str]:
    assert {x.append_action for x in mutation.set_headers} <= {2}
    return {x.header.key: x.header.raw_value.decode() for x in mutation.set_headers}


def destination_of(reply: Any, response: Any) -> str:
    """Return the endpoint, which the header and the metadata must name alike."""
    [namespace] = reply.dynamic_metadata.fields
    [field] = namespace.value.struct_value.fields
    assert (namespace.key, field.key) == ("envoy.lb", ENDPOINT)
    assert headers_of(response.header_mutation)[ENDPOINT] == field.value.string_value
    return str(field.value.string_value)
