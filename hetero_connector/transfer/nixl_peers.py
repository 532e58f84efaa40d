"""`PeerTransfers` over NIXL's UCX backend, in a process of its own.

The process is a security boundary. Anyone who can connect to a UCX port over TCP can write any
address of the process behind it, because UCX emulates one-sided access there and checks no key.
Peers reach a child process that has the exported memory mapped and nothing else of the engine: no
heap, no password, no other descriptor. The engine sends it reads over a socket (`peer_frames`) and
finds the bytes in the shared memory. It survives the child's end: all its reads have then ended
for certain, and another child is started.

Measured with NIXL 1.5.1 and UCX 1.23: a peer killed with -9 shows as an error after 4-18 ms (CMA)
or 124-221 ms (TCP). A read of a stopped peer stays in progress over TCP and while connecting; over
CMA it succeeds. A read in progress cannot be cancelled, hence the quarantine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hetero_connector.errors import PeerError, StoreClosedError, StoreError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.peer_base import PeerExtent, check_destination, check_source
from hetero_connector.transfer.peer_child import PeerChild, PeerTransfer
from hetero_connector.transfer.shared_memory import SharedMemory

logger = logging.getLogger("vllm.heterocache")

_LISTENING = "0A"
_PROC = Path("/proc")
_START_S = 60.0
_KILL_S = 5.0
_MAX_UNANSWERED_PINGS = 30
"""Calls of `maintain`, seconds apart, after which a process that does not answer is ended. They
are counted, not timed, because a suspended machine makes no calls."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before a process that has ended is replaced; it doubles each time."""


class NixlPeers:
    """Exports `regions` and reads those of peers.

    Raises StoreError if NIXL or its UCX backend does not work. One thread uses it; others may read
    `metadata` only.
    """

    name = "nixl-ucx"

    def __init__(
        self,
        regions: Sequence[SharedMemory],
        interface: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interface`: the network interface through which peers reach us. "": those that
        `UCX_NET_DEVICES` names, or only this host's own if it is not set.
        """
        self._regions = tuple(regions)
        self._sizes = [len(region.view) for region in regions]
        self._interface = interface
        self._clock = clock
        self._known: dict[str, AgentMetadata] = {}
        """By peer."""
        self._closed = False
        self._pause_s = _FIRST_PAUSE_S
        self._start_at_s = float("inf")
        self._child = PeerChild(self._regions, interface)
        try:
            self._child.wait_until_ready(_START_S)
        except BaseException:
            self._child.kill(_KILL_S)
            raise
        self._started_s = clock()
        self.metadata = self._child.metadata
        self._log_who_can_connect()

    @property
    def process_id(self) -> int:
        """The number of the process that peers can reach."""
        return self._child.process_id

    def connect(self, peer: str, metadata: bytes) -> None:
        wanted = AgentMetadata.decode(metadata)
        if wanted.agent == self._child.agent:
            raise PeerError(f"the metadata of {peer} is this engine's own")
        if any(m.agent == wanted.agent and m != wanted for m in self._known.values()):
            raise PeerError(f"{peer} claims to be {wanted.agent}, which has other metadata")
        before = self._known.get(peer)
        self._known[peer] = wanted
        if before is not None and before != wanted:
            self._retire(before)

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> PeerTransfer:
        if self._closed:
            raise StoreClosedError("submit after close")
        remote = self._known.get(peer)
        if remote is None:
            raise PeerError(f"{peer} was never connected")
        check_destination(extents, self._sizes)
        check_source(extents, [size for _, size in remote.regions])
        return self._child.read(remote, extents)

    def disconnect(self, peer: str) -> None:
        known = self._known.pop(peer, None)
        if known is not None:
            self._retire(known)

    def maintain(self) -> bool:
        if self._closed:
            return False
        child = self._child
        child.drive()
        if child.ended and self._start_at_s == float("inf"):
            if self._clock() - self._started_s > _LONGEST_PAUSE_S:
                self._pause_s = _FIRST_PAUSE_S
            logger.warning(
                "the process through which peers are read has ended (%s); it is restarted in "
                "%.0f s",
                child.exit_reason,
                self._start_later(),
            )
            return True
        if child.ended and self._clock() >= self._start_at_s:
            self._start_at_s = float("inf")
            self._started_s = self._clock()
            try:
                self._child = PeerChild(self._regions, self._interface)
            except (StoreError, OSError) as e:  # out of processes or descriptors: try later
                self._start_later()
                logger.warning("peers cannot be read yet: %s", e)
        elif not child.metadata and self._clock() - self._started_s > _START_S:
            child.give_up("it did not start")
        elif not child.ended and child.metadata and child.metadata != self.metadata:
            self.metadata = child.metadata
            logger.info("peers can be read again, and can read this engine's DRAM tier")
            self._log_who_can_connect()
        elif not child.ended and child.metadata:
            child.ping()
            if child.unanswered_pings > _MAX_UNANSWERED_PINGS:
                child.give_up("it stopped answering")
        return False

    def close(self, timeout_s: float = 10.0) -> bool:
        """See `PeerTransfers.close`. Ends the process at once, and with it every transfer."""
        self._closed = True
        return self._child.kill(min(timeout_s, _KILL_S))

    def _start_later(self) -> float:
        """Schedule a start of the process; return the seconds until then, twice as long each time.

        Only the end of a process counts as an exit, not a start that fails.
        """
        pause_s = self._pause_s
        self._start_at_s = self._clock() + pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _retire(self, remote: AgentMetadata) -> None:
        """Drop the connection unless another name refers to the same peer."""
        if all(known.agent != remote.agent for known in self._known.values()):
            self._child.disconnect(remote)

    def _log_who_can_connect(self) -> None:
        try:
            addresses = listening_addresses(self.process_id)
        except OSError as e:
            logger.warning("cannot find out who can connect to the DRAM tier: %s", e)
            return
        if only_this_host(addresses):
            logger.info("peers on this host can read the DRAM tier; for other hosts set peer_host")
        else:
            logger.warning(
                "anyone who can connect to %s can read AND WRITE the DRAM tier: UCX checks no key "
                "over TCP. Keep these addresses in a network of the fleet only (SECURITY.md)",
                ", ".join(addresses),
            )


def listening_addresses(process_id: int, proc: Path = _PROC) -> list[str]:
    """Return `address:port` of each listening TCP socket of a process of this user, sorted.

    As the kernel lists them. Raises OSError if there is no such process or it is another user's.
    """
    process = proc / str(process_id)
    inodes, found = set(), []
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(fd).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.append(_parse(fields[1]))
    return sorted(f"[{a}]:{port}" if a.version == 6 else f"{a}:{port}" for a, port in found)


def only_this_host(addresses: Iterable[str]) -> bool:
    """True if none of the addresses can be reached from another host."""
    hosts = (address.rpartition(":")[0].strip("[]") for address in addresses)
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _parse(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Parse `0100007F:1F90`: 32-bit words in the machine's byte order (little-endian)."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return ipaddress.ip_address(b"".join(words)), int(port, 16)
