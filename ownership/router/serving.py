"""Serving: uvicorn in one process or several, all on one port by SO_REUSEPORT."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from prometheus_client import disable_created_metrics
from prometheus_client.multiprocess import mark_process_dead

from hetero_connector.errors import RouterConfigError
from ownership.router import open_files
from ownership.router.app import make_app
from ownership.router.config import RouterConfig, read_config
from ownership.router.http_protocol import BoundedHttpProtocol
from ownership.router.opening import open_identity
from ownership.router.placer import Placer
from ownership.router.siblings import Siblings, make_siblings

_RESTART_S = 1.0
"""A process that has ended is started again after so long."""
_KEEP_ALIVE_S = 75
_BACKLOG = 2048

_log = logging.getLogger(__name__)


def serve(path: Path, processes: int = 1) -> None:
    """Serve until SIGTERM or SIGINT. Raises RouterConfigError."""
    config = read_config(path)
    if processes > 1 and config.ext_proc_port == 0:
        problem = "ext_proc_port: 0 would be another port in each process: give it a number"
        raise RouterConfigError(str(path), [problem])
    open_files.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    open_identity(config)  # a model that cannot be opened ends it here, with a clear error
    for given in (config.port, config.ext_proc_port or 0):
        if given:  # another router at this port would get a share of the connections
            open_listener(config, given, is_shared=False).close()
    listener = open_listener(config)
    host, port = listener.getsockname()[:2]
    _log.info("listening at http://%s:%d with %d processes", host, port, processes)
    if processes == 1:
        _run(config, listener)
    else:
        _Processes(config, port, processes, listener).run()


def open_listener(
    config: RouterConfig, port: int | None = None, *, is_shared: bool = True
) -> socket.socket:
    """Open a socket of the router's port, of which each process has one.

    The kernel ends connections whose client reads nothing for `client_s`. Raises RouterConfigError,
    with `is_shared` False also if any process listens at the port.
    """
    port = config.port if port is None else port
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        unread_ms = math.ceil(1e3 * config.client_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        listener.bind((config.host, port))
    except OSError as error:
        listener.close()
        problem = f"cannot listen at {config.host}, port {port}: {error.strerror}"
        raise RouterConfigError("the router", [problem]) from error
    return listener


class Server(uvicorn.Server):
    """A server of the router: when it ends, all requests under way have one deadline."""

    def __init__(
        self,
        settings: uvicorn.Config,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings)
        self._drain_s, self._clock = drain_s, clock
        self._until_s = math.inf
        """The deadline, once it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._until_s = self._clock() + self._drain_s
        await super().shutdown(sockets)

    def grace_s(self) -> float:
        """Return the seconds that requests under way may still take."""
        return min(self._drain_s, max(0.0, self._until_s - self._clock()))


def make_server(
    config: RouterConfig, placer: Placer | None = None, siblings: Siblings | None = None
) -> Server:
    """Return a server of the application, which knows it as `app.state.server`.

    Workers' headers are passed on as they are. `siblings`: None if this router has one process.
    """
    app = make_app(config, placer, siblings)
    protocol = partial(
        BoundedHttpProtocol,
        config.client_s,
        config.max_connections or open_files.default_connections(),
        app.state.metrics,
    )
    settings = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s),
    )
    app.state.server = server = Server(settings, config.drain_s)
    return server


def _run(config: RouterConfig, listener: socket.socket, siblings: Siblings | None = None) -> None:
    """Serve in this process."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    make_server(config, siblings=siblings).run(sockets=[listener])


class _Processes:
    """The parent of several serving processes: it starts them, again if one ends, and ends them."""

    def __init__(
        self, config: RouterConfig, port: int, count: int, listener: socket.socket
    ) -> None:
        """`listener`: keeps the port; it never listens."""
        self._config, self._port, self._listener = config, port, listener
        self._context = multiprocessing.get_context("spawn")
        self._siblings = make_siblings(count)
        self._children: dict[int, BaseProcess] = {}
        """By their place in `_siblings`."""
        self._is_ending = False

    def run(self) -> None:
        folder = tempfile.mkdtemp(prefix="heterocache-router-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        try:
            while not self._is_ending:
                for place in range(len(self._siblings)):
                    if place not in self._children and not self._is_ending:
                        self._start(place)
                self._reap(_RESTART_S)
            self._end_children()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, place: int) -> None:
        # The configuration, not its file, which may have been changed since.
        given = self._config, self._port, self._siblings[place]
        child = self._context.Process(target=_run_child, args=given)
        child.start()
        self._children[place] = child

    def _reap(self, timeout_s: float) -> None:
        wait([child.sentinel for child in self._children.values()], timeout_s)
        for place, child in list(self._children.items()):
            if child.is_alive():
                continue
            del self._children[place]
            mark_process_dead(child.pid)  # type: ignore[no-untyped-call]  # its gauges
            if not self._is_ending:
                _log.error("process %s ended with status %s", child.pid, child.exitcode)
                time.sleep(_RESTART_S)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        for child in self._children.values():
            child.terminate()

    def _end_children(self) -> None:
        deadline_s = time.monotonic() + self._config.drain_s + 5.0
        for child in self._children.values():  # one may have been started when the signal came
            child.terminate()
        for child in self._children.values():
            child.join(max(0.0, deadline_s - time.monotonic()))
            child.kill()


def _run_child(config: RouterConfig, port: int, siblings: Siblings) -> None:
    """Serve in a child process, which ends when its parent has ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True, name="heterocache-router-parent").start()
    _run(config, open_listener(config, port), siblings)
