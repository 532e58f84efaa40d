"""The addresses of workers: Envoy sends to an `ip:port`, and a worker may be given by a name."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ownership.router.doors import Reason, Refusal
from ownership.router.requests import RefusedError
from ownership.router.workers import Worker, WorkerState

_ANSWER_S = 1.0
"""A request waits for a name's addresses so long."""


class _Lookup(NamedTuple):
    """A question to the system's resolver."""

    answer: asyncio.Future[Any]
    asked_s: float

    def counts(self, since_s: float) -> bool:
        """Return False if it has failed, or has an answer and was asked before `since_s`."""
        answer = self.answer
        if not answer.done():
            return True
        has_failed = answer.cancelled() or answer.exception() is not None
        return not has_failed and self.asked_s > since_s


class Addresses:
    """Looks up workers' names, each once for all requests. Used on the event loop."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = monotonic) -> None:
        """`keep_s`: seconds for which an answer counts. An address changes when its container
        starts again. `clock`: seconds.
        """
        self._keep_s, self._clock = keep_s, clock
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    async def of(self, worker: Worker) -> list[str]:
        """Return a worker's addresses as `ip:port`.

        Raises RefusedError if its name has none, or the resolver does not answer in time.
        """
        endpoint = endpoint_of(worker)
        host, _, port = endpoint.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            found = await self._look_up(worker.name, host, int(port))
            return [f"[{x}]:{port}" if ":" in x else f"{x}:{port}" for x in found]
        return [endpoint]

    async def in_subset(self, subset: frozenset[str], workers: Iterable[Worker]) -> dict[str, str]:
        """Return the address in a subset of each worker that has one, by `endpoint_of` the worker.

        Empty if workers are configured with all addresses of the subset: then no name is looked up.
        Nor is that of a worker that does not serve.
        """
        by_endpoint = {endpoint_of(worker): worker for worker in workers}
        if subset <= by_endpoint.keys():
            return {}
        serving = {at: x for at, x in by_endpoint.items() if x.state is WorkerState.UP}

        async def found(worker: Worker) -> list[str]:
            try:
                return await self.of(worker)
            except RefusedError:
                return []

        all_found = await asyncio.gather(*map(found, serving.values()))
        matched = (next((x for x in addresses if x in subset), "") for addresses in all_found)
        return {x: address for x, address in zip(serving, matched, strict=True) if address}

    async def _look_up(self, worker: str, host: str, port: int) -> list[str]:
        since_s = self._clock() - self._keep_s
        known = self._lookups.get((host, port))
        if known is None or not known.counts(since_s):
            self._lookups = {name: x for name, x in self._lookups.items() if x.counts(since_s)}
            asked = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, port))
            known = self._lookups[host, port] = _Lookup(asked, self._clock())
        done, _ = await asyncio.wait([known.answer], timeout=_ANSWER_S)
        problem = f"no answer within {_ANSWER_S:g} s"
        if done:
            try:
                return [str(x[4][0]) for x in known.answer.result()]
            except OSError as error:
                problem = str(error.strerror)
        text = f"worker {worker} has no address: {problem}"
        raise RefusedError(Refusal(Reason.NO_WORKER, text, retry_after_s=2))


def endpoint_of(worker: Worker) -> str:
    """Return a worker's `host:port`."""
    parts = urlsplit(worker.address.url)
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
