"""The process that peers can reach, as its engine sees it. `peer_process` is the other side."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from hetero_connector.errors import PeerError, StoreError, TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import TransferState
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.peer_frames import (
    Frame,
    FrameReader,
    Kind,
    parse_error,
    read_payload,
)
from hetero_connector.transfer.shared_memory import SharedMemory

_POLL_S = 1e-3
_RECEIVE_BYTES = 1 << 16
_KEPT = {"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"}
_KEPT_PREFIXES = ("UCX_", "NIXL_")
_LOOPBACK = "lo"
_MODULE = "hetero_connector.transfer.peer_process"


class PeerTransfer:
    """Implements `base.Transfer`. Ends with a message of the process, or with the process."""

    def __init__(self, drive: Callable[[], object]) -> None:
        self._drive = drive
        self._failure: TransferError | None = None
        self._over = False

    @property
    def terminal(self) -> bool:
        return self._over

    @property
    def error(self) -> TransferError | None:
        return self._failure

    def poll(self) -> TransferState:
        if not self._over:
            self._drive()
        if not self._over:
            return TransferState.PENDING
        return TransferState.DONE if self._failure is None else TransferState.FAILED

    def end(self, failure: TransferError | None) -> None:
        """Mark it as terminal: nothing touches its memory any more."""
        self._failure, self._over = failure, True


class PeerChild:
    """One child process and the socket to it. No method waits unless it says so."""

    def __init__(self, regions: Sequence[SharedMemory], interface: str) -> None:
        """Start the process without waiting for it. Raises StoreError if that fails."""
        self.metadata = b""
        """The bytes with which peers can connect to it; empty until it is ready."""
        self.agent = ""
        self.reads: dict[int, PeerTransfer] = {}
        """The reads that have not ended, by number."""
        self.ended = False
        """True if the process is gone for certain."""
        self.unanswered_pings = 0
        self._problem = ""
        self._numbers = 0
        self._connected: set[str] = set()
        self._outbox = bytearray()
        self._frames = FrameReader()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            fds = [region.fd for region in regions]
            described = [f"{r.fd}:{len(r.view)}" for r in regions]
            ends = [str(os.getpid()), str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, *ends, *described],
                    pass_fds=[theirs.fileno(), *fds],
                    env=_environment(os.environ, interface),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError as e:
                self._socket.close()
                raise StoreError(f"the process for peers cannot be started: {e}") from e

    @property
    def process_id(self) -> int:
        """The operating system's number of the process."""
        return self._process.pid

    @property
    def exit_reason(self) -> str:
        """The reason of its end, for the log."""
        code = self._process.returncode
        return self._problem or (f"signal {-code}" if code < 0 else f"exit status {code}")

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it is ready. Raises StoreError with the reason if it is not."""
        deadline_s = time.monotonic() + timeout_s
        while not self.metadata:
            self.drive()
            if self.ended:
                raise StoreError(self.exit_reason)
            if time.monotonic() > deadline_s:
                raise StoreError(f"the process for peers did not start in {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def read(self, remote: AgentMetadata, extents: Sequence[PeerExtent]) -> PeerTransfer:
        """Let it read extents, which are inside the regions of both sides."""
        read = PeerTransfer(self.drive)
        if self.ended or not self.metadata:
            read.end(TransferError(errno.ECONNREFUSED, "peers cannot be read at the moment"))
            return read
        self._numbers += 1
        number, connection = self._numbers, remote.digest
        self.reads[number] = read  # before sending, which may find that the process has ended
        if connection not in self._connected:
            self._connected.add(connection)
            self._send(Frame(Kind.CONNECT, 0, remote.encode()))
        self._send(Frame(Kind.READ, number, read_payload(connection, extents)))
        return read

    def disconnect(self, remote: AgentMetadata) -> None:
        """Let it close the connection; waiting reads on it fail."""
        if remote.digest in self._connected:
            self._connected.remove(remote.digest)
            self._send(Frame(Kind.DISCONNECT, 0, remote.digest.encode()))

    def drive(self) -> None:
        """Handle its messages, and notice its end."""
        if self.ended:
            return
        try:
            self._flush()
            while data := self._socket.recv(_RECEIVE_BYTES):
                for frame in self._frames.feed(data):
                    self._on_frame(frame)
        except BlockingIOError:
            return
        except OSError:
            pass  # it has ended
        except (ValueError, PeerError) as e:
            self.give_up(f"it sent a malformed message: {e}")
        self._process.kill()
        if self._process.poll() is not None:
            self._end()

    def kill(self, timeout_s: float) -> bool:
        """Kill it and so end every read. Returns False if it still runs after `timeout_s`."""
        self._process.kill()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._end()
        return True

    def ping(self) -> None:
        """Send a ping unless one is unanswered, and count it."""
        self.unanswered_pings += 1
        if self.unanswered_pings == 1:
            self._send(Frame(Kind.PING, 0, b""))

    def give_up(self, problem: str) -> None:
        """Kill it without waiting for its end."""
        self._problem = self._problem or problem
        self._process.kill()

    def _on_frame(self, frame: Frame) -> None:
        """Handle a message. Raises ValueError or PeerError for one that is malformed or not due.

        Else a flood of them would hold the engine's thread for ever.
        """
        is_starting = not (self.metadata or self._problem)
        if frame.kind is Kind.ENDED:
            failure = parse_error(frame.payload) if frame.payload else None
            read = self.reads.pop(frame.read, None)
            if read is None:
                raise ValueError(f"the end of an unknown read: {frame.read}")
            read.end(failure)
        elif frame.kind is Kind.ALIVE and self.unanswered_pings:
            self.unanswered_pings = 0
        elif frame.kind is Kind.READY and is_starting:
            self.agent = AgentMetadata.decode(frame.payload).agent
            self.metadata = frame.payload
        elif frame.kind is Kind.FAILED and is_starting:
            self._problem = frame.payload.decode(errors="replace") or "no reason was given"
        else:
            raise ValueError(f"an unexpected message of kind {frame.kind.name}")

    def _send(self, frame: Frame) -> None:
        self._outbox += frame.encode()
        self.drive()

    def _flush(self) -> None:
        if self._outbox:
            try:
                del self._outbox[: self._socket.send(self._outbox)]
            except BlockingIOError:
                return

    def _end(self) -> None:
        self.ended = True
        self._socket.close()
        reads, self.reads = self.reads, {}
        for read in reads.values():
            read.end(TransferError(errno.ECONNRESET, "the process that read from peers has ended"))


def _environment(own: Mapping[str, str], interface: str) -> dict[str, str]:
    """The few variables that the process needs: an engine's environment may contain passwords."""
    kept = {k: v for k, v in own.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    if interface or "UCX_NET_DEVICES" not in kept:
        kept["UCX_NET_DEVICES"] = interface or _LOOPBACK
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return kept | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
