"""Envoy's external processing messages, and those of gRPC's health service.

Only the fields that the router reads or writes, with the numbers that they have in
`envoy/service/ext_proc/v3/external_processor.proto` and the files that it imports (Apache-2.0).
Names of messages are not sent, so these have a package and a pool of their own: generated code of
the same messages may be loaded, too, and any release of protobuf serves. Enumerations are int32,
and maps are lists of entries, as they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


class _Fields(NamedTuple):
    any_of: str = ""
    one_of: str = ""
    """At most one of these is set: `WhichOneof("kind")` names it."""


SCHEMA: Mapping[str, _Fields] = {
    "ProcessingRequest": _Fields(
        "Metadata metadata_context = 8, ProtocolConfiguration protocol_config = 11",
        "HttpHeaders request_headers = 2, HttpHeaders response_headers = 3, "
        "HttpBody request_body = 4, HttpBody response_body = 5, "
        "HttpTrailers request_trailers = 6, HttpTrailers response_trailers = 7",
    ),
    "ProtocolConfiguration": _Fields("int32 request_body_mode = 1, int32 response_body_mode = 2"),
    "HttpHeaders": _Fields("HeaderMap headers = 1, bool end_of_stream = 3"),
    "HttpBody": _Fields("bytes body = 1, bool end_of_stream = 2"),
    "HttpTrailers": _Fields(),
    "HeaderMap": _Fields("repeated HeaderValue headers = 1"),
    "HeaderValue": _Fields("string key = 1, string value = 2, bytes raw_value = 3"),
    "Metadata": _Fields("repeated FilterMetadataEntry filter_metadata = 1"),
    "FilterMetadataEntry": _Fields("string key = 1, Struct value = 2"),
    "ProcessingResponse": _Fields(
        "Struct dynamic_metadata = 8",
        "HeadersResponse request_headers = 1, HeadersResponse response_headers = 2, "
        "BodyResponse request_body = 3, BodyResponse response_body = 4, "
        "TrailersResponse request_trailers = 5, TrailersResponse response_trailers = 6, "
        "ImmediateResponse immediate_response = 7",
    ),
    "HeadersResponse": _Fields("CommonResponse response = 1"),
    "BodyResponse": _Fields("CommonResponse response = 1"),
    "TrailersResponse": _Fields(),
    "CommonResponse": _Fields(
        "HeaderMutation header_mutation = 2, BodyMutation body_mutation = 3, "
        "bool clear_route_cache = 5"
    ),
    "HeaderMutation": _Fields(
        "repeated HeaderValueOption set_headers = 1, repeated string remove_headers = 2"
    ),
    "HeaderValueOption": _Fields("HeaderValue header = 1, int32 append_action = 3"),
    "BodyMutation": _Fields(one_of="bytes body = 1, StreamedBodyResponse streamed_response = 3"),
    "StreamedBodyResponse": _Fields("bytes body = 1, bool end_of_stream = 2"),
    "ImmediateResponse": _Fields(
        "HttpStatus status = 1, HeaderMutation headers = 2, bytes body = 3, string details = 5"
    ),
    "HttpStatus": _Fields("int32 code = 1"),
    "Struct": _Fields("repeated FieldsEntry fields = 1"),
    "FieldsEntry": _Fields("string key = 1, Value value = 2"),
    "Value": _Fields(
        one_of="string string_value = 3, Struct struct_value = 5, ListValue list_value = 6"
    ),
    "ListValue": _Fields("repeated Value values = 1"),
    "HealthCheckRequest": _Fields("string service = 1"),
    "HealthCheckResponse": _Fields("int32 status = 1"),
}
_PACKAGE = "heterocache.router"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="heterocache/router/ext_proc.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for line in filter(None, fields.any_of.split(", ")):
            _add(message, line)
        for line in filter(None, fields.one_of.split(", ")):
            if not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            _add(message, line).oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in SCHEMA
    }


def _add(message: Any, line: str) -> Any:
    *label, kind, name, _, number = line.split()
    field = message.field.add(name=name, number=int(number))
    field.label = _Field.LABEL_REPEATED if label else _Field.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return field


_CLASSES = _classes()
ProcessingRequest = _CLASSES["ProcessingRequest"]
ProcessingResponse = _CLASSES["ProcessingResponse"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]


class BodyMode:
    """The numbers of `ProcessingMode.BodySendMode`."""

    NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)


OVERWRITE_IF_EXISTS_OR_ADD = 2
"""A number of `HeaderValueOption.HeaderAppendAction`."""
SERVING, NOT_SERVING = 1, 2
"""Numbers of `HealthCheckResponse.ServingStatus`."""
