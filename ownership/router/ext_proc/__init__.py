"""The router as an endpoint picker: Envoy asks it over gRPC where to send each request.

It speaks the endpoint picker protocol of the Kubernetes Gateway API Inference Extension, which is
Envoy's external processing with a header that names the worker.

- `server` is the gRPC server with its health service.
- `stream` is one HTTP request, from its headers to the end of its answer.
- `addresses` are those of workers that are given by a name.
- `messages` are the parts of Envoy's messages that are read and written here.

Imported only where the configuration has an `ext_proc_port`: it needs the extra `ext-proc`.
"""

from hetero_connector.errors import RouterConfigError

try:
    from ownership.router.ext_proc.addresses import Addresses
    from ownership.router.ext_proc.server import endpoint_picker
    from ownership.router.ext_proc.stream import Parts
except ImportError as error:
    problem = f"ext_proc_port: {error.name} is missing: install 'heterocache[ext-proc]'"
    raise RouterConfigError("the router", [problem]) from error

__all__ = ["Addresses", "Parts", "endpoint_picker"]
