"""Discovery: the workers of the configuration, of a file that changes, of a DNS name, and of a
Service of Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import aiohttp

from hetero_connector.errors import RouterConfigError
from ownership.router.config import RouterConfig, WorkerAddress, read_workers
from ownership.router.kubernetes import EndpointSlices
from ownership.router.workers import WorkerSet

_log = logging.getLogger(__name__)


class Discovery:
    """Keeps the set of workers as its sources say.

    A source that cannot be read keeps what it said last: nothing is taken out by an error.
    """

    def __init__(
        self, config: RouterConfig, workers: WorkerSet, session: aiohttp.ClientSession
    ) -> None:
        self._config, self._workers = config, workers
        self._slices: EndpointSlices | None = None
        if config.workers_kubernetes is not None:
            self._slices = EndpointSlices(config.workers_kubernetes, session)
        self._pods: list[WorkerAddress] = []
        self._problems: dict[str, str] = {}
        """By source; "" if its last answer was right."""
        self._in_file: tuple[WorkerAddress, ...] = ()
        self._file_version: tuple[int, int, int] | None = None
        self._in_dns: tuple[WorkerAddress, ...] = ()
        self._found: dict[str, WorkerAddress] = {}

    async def run(self) -> None:
        """Look again every `probe_s`, for ever."""
        while True:
            try:
                await self.look()
            except Exception:  # a bug: what was found stays
                _log.exception("the workers stay as they are")
            await asyncio.sleep(self._config.probe_s)

    async def look(self) -> None:
        """Ask all sources once. The first that names a worker counts."""
        if self._config.workers_file is not None:
            self._look_at_file(self._config.workers_file)
        if self._config.workers_dns:
            await self._ask_dns(self._config.workers_dns)
        if self._slices is not None:
            await self._ask_kubernetes(self._slices)
        found: dict[str, WorkerAddress] = {}
        for address in (*self._config.workers, *self._in_file, *self._in_dns, *self._pods):
            found.setdefault(address.name, address)
        if found != self._found:
            self._found = found
            _log.info("workers: %s", ", ".join(found) or "none")
            self._workers.set_addresses(found.values())

    def _look_at_file(self, path: Path) -> None:
        problem = ""
        try:
            about = os.stat(path)
            version = (about.st_mtime_ns, about.st_size, about.st_ino)
            if version != self._file_version:
                if about.st_size == 0 and self._in_file:  # it may be about to be written
                    raise RouterConfigError(str(path), ["it is empty; [] means no workers"])
                self._in_file = read_workers(path)
                self._file_version = version
        except (OSError, RouterConfigError) as error:
            problem = str(error)
        self._tell("workers_file", problem)

    async def _ask_dns(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            self._tell("workers_dns", f"{host}: {error}")
            return
        self._tell("workers_dns", "")
        hosts = sorted({str(x[4][0]) for x in answers})
        named = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)
        self._in_dns = tuple(WorkerAddress(x, f"http://{x}") for x in named)

    async def _ask_kubernetes(self, slices: EndpointSlices) -> None:
        problem = ""
        try:
            self._pods = await slices.workers()
        except (OSError, ValueError) as error:
            problem = str(error)
        self._tell("workers_kubernetes", problem)

    def _tell(self, source: str, problem: str) -> None:
        """Log a problem once."""
        if problem and problem != self._problems.get(source):
            _log.warning("the workers stay as they are: %s: %s", source, problem)
        self._problems[source] = problem
