"""The pods of a Kubernetes Service, by its EndpointSlices, asked with the router's own account."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import aiohttp
import msgspec

from ownership.router.config import WorkerAddress
from ownership.router.config_values import KubernetesService
from ownership.router.questions import PLAIN

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which a pod finds its token, the API server's authority and its namespace."""
_TIMEOUT_S = 10.0
_SERVICE_LABEL = "kubernetes.io/service-name"


class EndpointSlices:
    """Asks the API server for the pods of a Service."""

    def __init__(
        self,
        service: KubernetesService,
        session: aiohttp.ClientSession,
        account: Path | None = None,
    ) -> None:
        """`account`: None for `ACCOUNT`."""
        self._service, self._session, self._account = service, session, account or ACCOUNT
        self._authority: tuple[int, ssl.SSLContext] | None = None
        """The time at which `ca.crt` was written, and what trusts it. A connection is kept only
        for the same one."""

    async def workers(self) -> list[WorkerAddress]:
        """Return the pods that are ready, and as draining those that are about to end.

        Raises OSError or ValueError, with what to change.
        """
        namespace = self._service.namespace or self._read("namespace")
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        url = (
            f"https://{host}:{port}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        )
        # The token is read again each time: it is replaced every hour.
        headers = PLAIN | {"authorization": f"Bearer {self._read('token')}"}
        query = {"labelSelector": f"{_SERVICE_LABEL}={self._service.name}"}
        authority = self._trusted()
        timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
        try:
            async with self._session.get(
                url, params=query, headers=headers, ssl=authority, timeout=timeout
            ) as answer:
                if answer.status in (401, 403):
                    raise ValueError(
                        f"status {answer.status}: the pod's service account needs a Role with "
                        f"`list` on endpointslices of discovery.k8s.io in {namespace}"
                    )
                answer.raise_for_status()
                listed = msgspec.json.decode(await answer.read(), type=_Slices)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{url}: {str(error) or 'no answer in time'}") from error
        return self._named(listed.items)

    def _named(self, slices: list[_Slice]) -> list[WorkerAddress]:
        found: dict[str, WorkerAddress] = {}
        for part in sorted(slices, key=lambda x: x.address_type):  # IPv4 before IPv6
            port = self._port(part)
            for endpoint in part.endpoints or ():
                conditions = endpoint.conditions or _Conditions()
                is_ending = bool(conditions.terminating)
                serves = conditions.serving if is_ending else conditions.ready
                if port is None or serves is False or not endpoint.addresses:
                    continue
                host = endpoint.addresses[0]
                at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                name = endpoint.target.name if endpoint.target is not None else at
                found.setdefault(name, WorkerAddress(name, f"http://{at}", is_ending))
        return [found[name] for name in sorted(found)]

    def _port(self, part: _Slice) -> int | None:
        wanted = self._service.port
        for port in part.ports or ():
            if port.port is not None and wanted in ("", port.name, str(port.port)):
                return port.port
        return None

    def _trusted(self) -> ssl.SSLContext:
        file = self._account / "ca.crt"
        written_ns = file.stat().st_mtime_ns
        if self._authority is None or self._authority[0] != written_ns:
            self._authority = written_ns, ssl.create_default_context(cafile=str(file))
        return self._authority[1]

    def _read(self, name: str) -> str:
        return (self._account / name).read_text().strip()


class _Conditions(msgspec.Struct):
    """None is "unknown", which counts as true for the first two."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions | None = None
    target: _Target | None = msgspec.field(default=None, name="targetRef")


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct):
    address_type: str = msgspec.field(name="addressType")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct):
    items: list[_Slice]
