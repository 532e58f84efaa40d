"""The connection to one peer: its waiting, posted and failed reads.

Facts about NIXL 1.5.1, read (src/core/nixl_agent.cpp) and measured: when one read finds the peer
dead, NIXL forgets the peer and reports an error for every other read of it at once, ended or not.
Of a read's many descriptors it reports the first error. So a failed read has not necessarily
ended. Its memory is released when NIXL has accepted the release of every handle, which it refuses
while UCX works on one, and the connection has been closed.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from hetero_connector.errors import TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import batches
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.ucx_agent import Descriptors, UcxAgent

_DESCRIPTOR_BYTES = 2 << 20
_POST_BYTES = 4 << 20
_POST_DESCRIPTORS = 512
"""Many small descriptors keep the I/O thread as busy as large ones."""
_WINDOW_BYTES = 16 << 20
"""Bytes posted at a time. A peer that stops can keep at most so many in quarantine."""


class PeerRead:
    """One read, posted batch by batch."""

    def __init__(self, local: Descriptors, remote: Descriptors) -> None:
        self.local = local
        self.remote = remote
        self.waiting = deque(batches(local[:, 1].tolist(), _POST_BYTES, _POST_DESCRIPTORS))
        self.posted = 0
        self.sides: tuple[int, int] | None = None
        self._failure: TransferError | None = None
        self._over = False

    @property
    def terminal(self) -> bool:
        """True if its memory is no longer touched."""
        return self._over

    @property
    def error(self) -> TransferError | None:
        """The reason if it is terminal and has failed."""
        return self._failure if self._over else None

    def fail(self, error: TransferError) -> None:
        """Drop the batches not posted yet; those posted must still end."""
        self._failure = self._failure or error
        self.waiting.clear()

    def end_if_finished(self) -> bool:
        """Make it terminal if nothing is waiting or posted; return whether it is."""
        self._over = not self.waiting and not self.posted
        return self._over


class _Post:
    __slots__ = ("has_failed", "read", "request", "size")

    def __init__(self, read: PeerRead, request: int, size: int) -> None:
        self.read = read
        self.request = request
        self.size = size
        self.has_failed = False


class PeerConnection:
    """Drives the reads of one peer."""

    def __init__(self, agent: UcxAgent, metadata: AgentMetadata) -> None:
        self.metadata = metadata
        self._agent = agent
        self._reads: deque[PeerRead] = deque()
        """The reads with batches to post, oldest first."""
        self._posts: list[_Post] = []
        self._posted_bytes = 0
        self._loaded = False
        self._broken = False
        """True: reads wait until all posts have ended, then the connection is opened again."""
        self._released: list[PeerRead] = []
        """Reads of which a post was released while the connection was broken."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to drive."""
        return not self._reads and not self._posts

    def add(self, read: PeerRead) -> None:
        """Queue a read."""
        self._reads.append(read)

    def drive(self) -> bool:
        """Release the posts that have ended and post what fits; return whether anything changed."""
        remaining = [post for post in self._posts if not self._release_if_ended(post)]
        changed = len(remaining) < len(self._posts)
        self._posts = remaining
        if self._broken and not self._posts:
            self.unload()
        return self._post_waiting() or changed

    def cancel(self, error: TransferError) -> None:
        """Fail all reads; their posts must still end."""
        reads = list(self._reads)
        self._reads.clear()
        for read in reads:
            read.fail(error)
            self._end(read)

    def unload(self) -> None:
        """Close the connection. Nothing may be posted. The next read opens it again."""
        if self._loaded:
            self._loaded = False
            self._agent.unload(self.metadata.agent)
        self._broken = False
        released, self._released = self._released, []
        for read in released:
            self._end(read)

    def _post_waiting(self) -> bool:
        changed = False
        while self._reads and not self._broken and self._posted_bytes < _WINDOW_BYTES:
            read = self._reads[0]
            try:
                self._post(read)
            except TransferError as e:
                self._broken = True
                self.cancel(e)
            else:
                if not read.waiting:
                    self._reads.popleft()
            changed = True
        return changed

    def _post(self, read: PeerRead) -> None:
        if not self._loaded:
            self._load()
        if read.sides is None:
            read.sides = self._prepare(read)
        batch = read.waiting[0]
        index = np.arange(batch.start, batch.stop, dtype=np.int32)
        size = int(read.local[batch.start : batch.stop, 1].sum())
        post = _Post(read, self._agent.make_read(*read.sides, index), size)
        read.waiting.popleft()
        read.posted += 1
        self._posted_bytes += size
        self._posts.append(post)
        try:
            self._agent.post(post.request)
        except TransferError:
            post.has_failed = True
            raise

    def _prepare(self, read: PeerRead) -> tuple[int, int]:
        local = self._agent.prepare(None, read.local)
        try:
            return local, self._agent.prepare(self.metadata.agent, read.remote)
        except TransferError:
            self._agent.drop(local)
            raise

    def _load(self) -> None:
        name = self._agent.load(self.metadata.nixl)
        self._loaded = True
        if name != self.metadata.agent:
            self._agent.unload(name)
            self._loaded = False
            raise TransferError(
                errno.ECONNREFUSED, f"the metadata of {self.metadata.agent} is that of {name}"
            )

    def _release_if_ended(self, post: _Post) -> bool:
        """Release the post if it has ended; return whether it is released."""
        if not post.has_failed:
            try:
                if not self._agent.has_ended(post.request):
                    return False
            except TransferError as e:
                post.has_failed = True
                post.read.fail(e)
                self._broken = True
                self.cancel(e)
        if not self._agent.release(post.request):
            return False
        post.read.posted -= 1
        self._posted_bytes -= post.size
        if self._broken:
            self._released.append(post.read)
        else:
            self._end(post.read)
        return True

    def _end(self, read: PeerRead) -> None:
        if read.end_if_finished() and read.sides is not None:
            for side in read.sides:
                self._agent.drop(side)
            read.sides = None


def describe(
    extents: Sequence[PeerExtent],
    regions: Sequence[tuple[int, int]],
    remote_regions: Sequence[tuple[int, int]],
) -> tuple[Descriptors, Descriptors]:
    """Return the descriptors of both sides. `regions` are (address, bytes).

    Contiguous extents are merged, then cut to the size of a descriptor.
    """
    local: list[tuple[int, int, int]] = []
    remote: list[tuple[int, int, int]] = []
    for at, remote_at, size in _merged(extents, regions, remote_regions):
        for done in range(0, size, _DESCRIPTOR_BYTES):
            part = min(_DESCRIPTOR_BYTES, size - done)
            local.append((at + done, part, 0))
            remote.append((remote_at + done, part, 0))
    return np.array(local, np.uint64), np.array(remote, np.uint64)


def _merged(
    extents: Sequence[PeerExtent],
    regions: Sequence[tuple[int, int]],
    remote_regions: Sequence[tuple[int, int]],
) -> Iterator[tuple[int, int, int]]:
    """Yield (our address, the peer's, bytes) of the extents, contiguous ones merged.

    Each descriptor costs microseconds, and slots filled one after another are contiguous.
    """
    at, remote_at, size = 0, 0, 0
    for e in extents:
        next_at = regions[e.region][0] + e.offset
        next_remote = remote_regions[e.remote_region][0] + e.remote_offset
        if size and (next_at, next_remote) == (at + size, remote_at + size):
            size += e.size
            continue
        if size:
            yield at, remote_at, size
        at, remote_at, size = next_at, next_remote, e.size
    yield at, remote_at, size
