"""`PeerTransfers` over NIXL's UCX backend, on a thread of its own.

A thread, because over CMA a post copies its bytes before it returns, and because connecting
takes tens of milliseconds: whoever submits has other devices to look after meanwhile.

NIXL 1.5.1 and UCX 1.23, as measured: a peer killed with -9 shows as an error after 4-18 ms
(CMA) or 124-221 ms (TCP); a stopped one stays in progress for as long as it is stopped over
TCP and while connecting, and is read without its knowing over CMA. A read in progress cannot be
cancelled, hence the quarantine.
"""

from __future__ import annotations

import atexit
import errno
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import PeerError, StoreClosedError, TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.peer_base import PeerExtent, check_destination, check_source
from hetero_connector.transfer.peer_connection import PeerConnection, PeerRead, describe
from hetero_connector.transfer.ucx_agent import UcxAgent

logger = logging.getLogger("vllm.heterocache")

Bytes = npt.NDArray[np.uint8]
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 5e-3
_leaked: list[object] = []
"""Kept for the life of the process: what was under way when `close` gave up on it."""
_EXIT_S = 2.0


class NixlPeers:
    """Exports `regions` ([n] uint8 each, registered once) and reads those of peers.

    Raises StoreError if NIXL or its UCX backend is not to be had. `name` is unique among all
    agents that may ever meet; made up if None.
    """

    name = "nixl-ucx"

    def __init__(
        self,
        regions: Sequence[Bytes],
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        interface: str = "",
    ) -> None:
        """`interface`: the network interface through which peers reach us; "" for any."""
        self._memory = tuple(regions)
        self._regions = tuple((int(r.ctypes.data), len(r)) for r in regions)
        self._agent = UcxAgent(name or f"heterocache-{uuid.uuid4().hex}", self._regions, interface)
        self._clock = clock
        self.metadata = AgentMetadata(
            self._agent.name, self._regions, self._agent.metadata
        ).encode()
        self._wake = threading.Condition()
        self._peers: dict[str, PeerConnection] = {}
        self._connections: dict[str, PeerConnection] = {}
        """By the agent's name; also those that no peer uses any more, until they are idle."""
        self._new: deque[tuple[PeerConnection, PeerRead | None]] = deque()
        """For the peer thread, in order: reads; None cancels those before it."""
        self._reads: list[PeerRead] = []
        self._closed = False
        self._dead: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="heterocache-peers", daemon=True)
        self._exiting = False
        self._thread.start()
        # A thread that Python ends inside a call of NIXL takes the process down with an abort.
        atexit.register(self._stop_driving)

    @property
    def in_flight(self) -> int:
        """See `PeerTransfers`."""
        self._reads = [read for read in self._reads if not read.terminal]
        return len(self._reads)

    def connect(self, peer: str, metadata: bytes) -> None:
        """See `PeerTransfers`."""
        wanted = AgentMetadata.decode(metadata)
        if wanted.agent == self._agent.name:
            raise PeerError(f"the metadata of {peer} is this engine's own")
        with self._wake:
            connection = self._connections.get(wanted.agent)
            if connection is None:
                connection = PeerConnection(self._agent, wanted)
                self._connections[wanted.agent] = connection
            elif connection.metadata != wanted:
                raise PeerError(f"{peer} says to be {wanted.agent}, which is known with others")
            before = self._peers.get(peer)
            self._peers[peer] = connection
            if before is not None and before is not connection:
                self._retire(before)

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> PeerRead:
        """See `PeerTransfers`."""
        if self._closed:
            raise StoreClosedError("submit after close")
        connection = self._peers.get(peer)
        if connection is None:
            raise PeerError(f"{peer} was never connected")
        remote = connection.metadata.regions
        check_destination(extents, [size for _, size in self._regions])
        check_source(extents, [size for _, size in remote])
        read = PeerRead(*describe(extents, self._regions, remote))
        with self._wake:
            if self._dead is not None:
                read.fail(self._dead)
                read.end_if_over()
                return read
            self._reads = [r for r in self._reads if not r.terminal]
            self._reads.append(read)
            self._new.append((connection, read))
            self._wake.notify()
        return read

    def disconnect(self, peer: str) -> None:
        """See `PeerTransfers`."""
        with self._wake:
            connection = self._peers.pop(peer, None)
            if connection is not None:
                self._retire(connection)

    def close(self, timeout_s: float = 10.0) -> bool:
        """See `PeerTransfers`."""
        with self._wake:
            self._closed = True
            for peer in list(self._peers):
                self._retire(self._peers.pop(peer))
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self.in_flight:
            _leaked.append(self)
            return False
        self._agent.close()
        atexit.unregister(self._stop_driving)
        return True

    def _stop_driving(self) -> None:
        """The process ends: what is under way is left as it is."""
        with self._wake:
            self._exiting = True
            self._wake.notify()
        self._thread.join(_EXIT_S)

    def _retire(self, connection: PeerConnection) -> None:
        """Needs the lock. Drop the connection unless another peer's name stands for it, too."""
        if connection not in self._peers.values():
            self._new.append((connection, None))
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as e:
            # A bug: say so, and let the engine go on without its peers.
            logger.exception("The peer thread ended; peers are not read any more")
            with self._wake:
                self._dead = TransferError(f"the peer thread ended: {e!r}")
                for read in self._reads:
                    read.fail(self._dead)
                    read.end_if_over()

    def _serve(self) -> None:
        pause_s = _MIN_POLL_S
        while not self._exiting:
            with self._wake:
                if not self._new and not self._busy():
                    if self._closed or self._exiting:
                        return
                    self._wake.wait()
                self._take_new()
                connections = list(self._connections.values())
            now_s = self._clock()
            moved = [connection.drive(now_s) for connection in connections]
            if any(moved):
                pause_s = _MIN_POLL_S
                continue
            with self._wake:
                self._forget_retired()
                if not self._new:
                    self._wake.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _take_new(self) -> None:
        """Needs the lock."""
        for connection, read in self._new:
            if read is None:
                connection.cancel(TransferError(errno.ENOTCONN, "the peer was disconnected"))
            else:
                connection.add(read)
        self._new.clear()

    def _busy(self) -> bool:
        """Needs the lock. Whether a connection has something to do, or to be forgotten."""
        used = self._peers.values()
        return any(not x.idle or x not in used for x in self._connections.values())

    def _forget_retired(self) -> None:
        """Needs the lock."""
        used = self._peers.values()
        for name, connection in list(self._connections.items()):
            if connection.idle and connection not in used:
                connection.unload()
                del self._connections[name]
