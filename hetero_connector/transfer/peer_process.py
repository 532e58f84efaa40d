"""The process that peers can reach: it has the exported memory, and a NIXL UCX agent over it.

`python -m hetero_connector.transfer.peer_process PARENT SOCKET FD:BYTES ...`, started by
`nixl_peers`. The agent serves peers by itself; this loop reads from them as the engine says. One
thread: over CMA a post copies its bytes before it returns, and nothing else has to be done
meanwhile.
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
    """Does what the engine says, until it says no more."""

    def __init__(
        self, engine: socket.socket, agent: UcxAgent, regions: Sequence[tuple[int, int]]
    ) -> None:
        """`regions`: (address, bytes) of what is exported."""
        self._engine = engine
        self._agent = agent
        self._regions = regions
        self._frames = FrameReader()
        self._connections: dict[str, PeerConnection] = {}
        """By the digest of a peer's metadata; also retired ones, until they are idle."""
        self._retired: set[str] = set()
        self._reads: dict[int, PeerRead] = {}

    def run(self, parent: int) -> None:
        """Return when the engine has closed its end of the socket, or is gone."""
        pause_s = _MIN_POLL_S
        while True:
            is_busy = bool(self._reads or self._retired)
            readable, _, _ = select.select([self._engine], [], [], pause_s if is_busy else _IDLE_S)
            if readable and not self._hear():
                return
            if os.getppid() != parent:
                return
            moved = [connection.drive() for connection in self._connections.values()]
            self._tell()
            self._forget_retired()
            if any(moved) or readable:
                pause_s = 0.0
            else:
                pause_s = min(max(2 * pause_s, _MIN_POLL_S), _MAX_POLL_S)

    def _hear(self) -> bool:
        """Take in what the engine says; False if that was the last."""
        data = self._engine.recv(_RECEIVE_BYTES)
        for frame in self._frames.feed(data):
            if frame.kind is Kind.CONNECT:
                self._connect(AgentMetadata.decode(frame.payload))
            elif frame.kind is Kind.READ:
                self._read(frame)
            elif frame.kind is Kind.ASK:
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

    def _tell(self) -> None:
        """Of reads that have ended."""
        for number, read in [item for item in self._reads.items() if item[1].terminal]:
            del self._reads[number]
            payload = b"" if read.error is None else error_payload(read.error)
            self._engine.sendall(Frame(Kind.ENDED, number, payload).encode())

    def _forget_retired(self) -> None:
        for name in list(self._retired):
            connection = self._connections[name]
            connection.cancel(TransferError(errno.ENOTCONN, "the peer was disconnected"))
            if connection.idle:
                connection.unload()
                del self._connections[name]
                self._retired.remove(name)


def confine(parent: int) -> None:
    """Die with the engine, whatever state this is in; gain no rights by what is run; leave no core.

    Signals for the engine's process group are the engine's to answer.
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
    """NIXL reads torch's files to choose a library, and imports a torch that was built for CPUs.

    That takes seconds and hundreds of MiB for nothing. The files stay there to be read.
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
        # An engine with many clients has descriptors above 1,023, which `select` does not take.
        # Here hardly any is in use, and a copy has the lowest that is free.
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
        PeerServer(engine, agent, regions).run(parent)
        # Without unwinding: whatever UCX still does ends with the process.
        os._exit(0)


if __name__ == "__main__":
    main()
