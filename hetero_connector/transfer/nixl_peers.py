"""`PeerTransfers` over NIXL's UCX backend, in a process of its own.

A process, because whoever can connect to a UCX port over TCP can write any address of the process
behind it: UCX emulates one-sided access there and checks no key. What peers reach is a child that
has the exported memory mapped and nothing else of the engine: no heap, no password, no other
descriptor. The engine tells it what to read over a socket (`peer_frames`), sees the bytes arrive
in the shared memory, and survives its end: reads under way have then ended for certain, and
another child is started.

NIXL 1.5.1 and UCX 1.23, as measured: a peer killed with -9 shows as an error after 4-18 ms
(CMA) or 124-221 ms (TCP); a stopped one stays in progress for as long as it is stopped over
TCP and while connecting, and is read without its knowing over CMA. A read in progress cannot be
cancelled, hence the quarantine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from hetero_connector.errors import PeerError, StoreClosedError, StoreError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.listening import listening_addresses, only_this_host
from hetero_connector.transfer.peer_base import PeerExtent, check_destination, check_source
from hetero_connector.transfer.peer_child import PeerChild, PeerTransfer
from hetero_connector.transfer.shared_memory import SharedMemory

logger = logging.getLogger("vllm.heterocache")

_START_S = 60.0
_KILL_S = 5.0
_POLL_S = 1e-3
_MAX_TIMES_ASKED = 30
"""Calls of `tend`, seconds apart, after which a process that does not answer is ended. Counted, not
timed: a machine that was suspended has asked once."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before another process is started in place of one that ended."""


class NixlPeers:
    """Exports `regions` and reads those of peers.

    Raises StoreError if NIXL or its UCX backend is not to be had. Only `metadata` may be read by
    other threads than the one that uses it.
    """

    name = "nixl-ucx"

    def __init__(
        self,
        regions: Sequence[SharedMemory],
        interface: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interface`: the network interface through which peers reach us; "" for those that
        `UCX_NET_DEVICES` names, else for this host's own.
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
        self._say_who_can_connect()

    @property
    def process_id(self) -> int:
        """Of the process that peers can reach."""
        return self._child.process_id

    @property
    def in_flight(self) -> int:
        self._child.drive()
        return len(self._child.reads)

    def connect(self, peer: str, metadata: bytes) -> None:
        wanted = AgentMetadata.decode(metadata)
        if wanted.agent == self._child.agent:
            raise PeerError(f"the metadata of {peer} is this engine's own")
        if any(m.agent == wanted.agent and m != wanted for m in self._known.values()):
            raise PeerError(f"{peer} says to be {wanted.agent}, which is known with others")
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

    def tend(self) -> bool:
        if self._closed:
            return False
        child = self._child
        child.drive()
        if child.ended and self._start_at_s == float("inf"):
            now_s = self._clock()
            if now_s - self._started_s > _LONGEST_PAUSE_S:
                self._pause_s = _FIRST_PAUSE_S
            self._start_at_s = now_s + self._pause_s
            logger.warning(
                "the process through which peers are read has ended (%s): another one is started "
                "in %.0f s",
                child.how_it_ended,
                self._pause_s,
            )
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return True
        if child.ended and self._clock() >= self._start_at_s:
            self._start_at_s = float("inf")
            self._started_s = self._clock()
            try:
                self._child = PeerChild(self._regions, self._interface)
            except (StoreError, OSError) as e:  # no process or descriptor to be had: later
                logger.warning("peers are not read yet: %s", e)
        elif not child.metadata and self._clock() - self._started_s > _START_S:
            child.give_up("it did not start")
        elif child.metadata and child.metadata != self.metadata:
            self.metadata = child.metadata
            logger.info("peers are read again, and can read this engine's DRAM tier")
        elif child.metadata and not child.ended:
            child.ask()
            if child.times_asked > _MAX_TIMES_ASKED:
                child.give_up("it did not answer any more")
        return False

    def close(self, timeout_s: float = 10.0) -> bool:
        """A transfer that does not end in time ends with the process."""
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return self._child.kill(_KILL_S)

    def _retire(self, remote: AgentMetadata) -> None:
        """Drop the connection unless another peer's name stands for it, too."""
        if all(known.agent != remote.agent for known in self._known.values()):
            self._child.disconnect(remote)

    def _say_who_can_connect(self) -> None:
        try:
            addresses = listening_addresses(self.process_id)
        except OSError as e:
            logger.warning("who can connect to the DRAM tier cannot be seen: %s", e)
            return
        if only_this_host(addresses):
            logger.info("peers on this host can read the DRAM tier; for others set peer_host")
        else:
            logger.warning(
                "whoever can connect to %s can read AND WRITE the DRAM tier: UCX checks no key "
                "over TCP. Keep these addresses in a network of the fleet's own (SECURITY.md)",
                ", ".join(addresses),
            )
