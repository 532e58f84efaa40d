"""Print the fields of Envoy's own messages: number, if repeated, type. Needs `xds-protos`."""

from __future__ import annotations

import json

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from google.protobuf.descriptor import FieldDescriptor

KINDS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "int32",
}

found: dict[str, dict[str, object]] = {}
left = [ProcessingRequest.DESCRIPTOR, ProcessingResponse.DESCRIPTOR]
while left:
    message = left.pop()
    if message.name in found:
        continue
    found[message.name] = {
        field.name: (
            field.number,
            field.is_repeated,
            field.message_type.name if field.message_type else KINDS.get(field.type, ""),
        )
        for field in message.fields
    }
    left += [field.message_type for field in message.fields if field.message_type]
print(json.dumps(found))
