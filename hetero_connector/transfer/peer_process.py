"""The process that peers can reach: it has the exported memory, and a NIXL UCX agent over it.

`peer_child` starts it: `python -m hetero_connector.transfer.peer_process PARENT SOCKET FD:BYTES
...`. The agent serves peers by itself; this loop performs the engine's reads from them, on one
thread. Over CMA a post copies its bytes before it returns; there is nothing else to do meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import resource
import select
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from hetero_connector.errors import StoreError, TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.peer_connection import PeerConnection, PeerRead, describe
from hetero_connector.transfer.peer_frames import (
    Frame,
    FrameReader,
    Kind,
    error_payload,
    parse_read,
)
from hetero_connector.transfer.shared_memory import map_whole
from hetero_connector.transfer.ucx_agent import UcxAgent

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_IDLE_S = 1.0
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 5e-3
_RECEIVE_BYTES = 1 << 16


class PeerServer:
    """Performs the engine's reads until the engine closes the socket."""

    def __init__(
        self, engine: socket.socket, agent: UcxAgent, regions: Sequence[tuple[int, int]]
    ) -> None:
        """`regions`: (address, bytes) of the exported memory."""
        self._engine = engine
        self._agent = agent
        self._regions = regions
        self._frames = FrameReader()
        self._connections: dict[str, PeerConnection] = {}
        """By the digest of the peer's metadata. Retired ones stay until they are idle."""
        self._retired: set[str] = set()
        self._reads: dict[int, PeerRead] = {}

    def run(self, parent: int) -> None:
        """Serve until the engine has closed its end of the socket, or is gone."""
        pause_s = _MIN_POLL_S
        while True:
            is_busy = bool(self._reads or self._retired)
            readable, _, _ = select.select([self._engine], [], [], pause_s if is_busy else _IDLE_S)
            if readable and not self._receive():
                return
            if os.getppid() != parent:
                return
            changed = [connection.drive() for connection in self._connections.values()]
            self._report_ended()
            self._drop_retired()
            if any(changed) or readable:
                pause_s = 0.0
            else:
                pause_s = min(max(2 * pause_s, _MIN_POLL_S), _MAX_POLL_S)

    def _receive(self) -> bool:
        """Handle the engine's messages; return False if it has closed the socket."""
        data = self._engine.recv(_RECEIVE_BYTES)
        for frame in self._frames.feed(data):
            if frame.kind is Kind.CONNECT:
                self._connect(AgentMetadata.decode(frame.payload))
            elif frame.kind is Kind.READ:
                self._read(frame)
            elif frame.kind is Kind.PING:
                self._engine.sendall(Frame(Kind.ALIVE, 0, b"").encode())
            else:
                self._retired.add(frame.payload.decode())
        return bool(data)

    def _connect(self, metadata: AgentMetadata) -> None:
        self._retired.discard(metadata.digest)
        if metadata.digest not in self._connections:
            self._connections[metadata.digest] = PeerConnection(self._agent, metadata)

    def _read(self, frame: Frame) -> None:
        name, extents = parse_read(frame.payload)
        connection = self._connections[name]
        read = PeerRead(*describe(extents, self._regions, connection.metadata.regions))
        self._reads[frame.read] = read
        connection.add(read)

    def _report_ended(self) -> None:
        """Tell the engine which reads have ended."""
        for number, read in [item for item in self._reads.items() if item[1].terminal]:
            del self._reads[number]
            payload = b"" if read.error is None else error_payload(read.error)
            self._engine.sendall(Frame(Kind.ENDED, number, payload).encode())

    def _drop_retired(self) -> None:
        for name in list(self._retired):
            connection = self._connections[name]
            connection.cancel(TransferError(errno.ENOTCONN, "the peer was disconnected"))
            if connection.idle:
                connection.unload()
                del self._connections[name]
                self._retired.remove(name)


def confine(parent: int) -> None:
    """Confine this process: it ends with the engine, gains no privileges and dumps no core.

    Signals to the engine's process group are ignored: the engine decides when to end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    if os.getppid() != parent:
        raise SystemExit("the engine has ended")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def leave_torch_out() -> None:
    """Replace the module `torch` by an empty one.

    NIXL looks at torch's files to choose a library, and imports a torch built for CPUs, which
    takes seconds and hundreds of MiB for nothing. The files can still be looked at.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None:
        stub = ModuleType("torch")
        stub.__spec__ = spec
        sys.modules["torch"] = stub


def main() -> None:
    parent = int(sys.argv[1])
    confine(parent)
    leave_torch_out()
    with socket.socket(fileno=int(sys.argv[2])) as inherited:
        # An engine with many clients has descriptors above 1,023, which `select` does not accept.
        # Few are in use here, and a copy gets the lowest free number.
        connection = inherited.dup()
    with connection as engine:
        described = [
            (int(fd), int(size)) for fd, _, size in (a.partition(":") for a in sys.argv[3:])
        ]
        memory = [map_whole(fd, size) for fd, size in described]
        for fd, _ in described:
            os.close(fd)
        regions = [(int(view.ctypes.data), len(view)) for view in memory]
        try:
            agent = UcxAgent(f"heterocache-{uuid.uuid4().hex}", regions)
        except StoreError as e:
            engine.sendall(Frame(Kind.FAILED, 0, str(e).encode()).encode())
            return
        metadata = AgentMetadata(agent.name, tuple(regions), agent.metadata).encode()
        engine.sendall(Frame(Kind.READY, 0, metadata).encode())
        with suppress(ConnectionError):  # the engine was killed
            PeerServer(engine, agent, regions).run(parent)
        # Exit without cleanup: everything UCX still does ends with the process.
        os._exit(0)


if __name__ == "__main__":
    main()
