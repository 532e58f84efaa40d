"""The store's contract: what the engine's scheduler side may ask of it.

Threads: every method is called from the scheduler's thread and returns without
waiting for I/O, except `flush`, `reset` and `close`. The store's own I/O thread moves bytes
between DRAM and SSD; a lock inside the store guards what they share and is never
held during I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, Tier
from hetero_connector.artifacts.record import StoredChunk as StoredChunk
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn

EvictionName = Literal["leaf_lru", "lru", "value"]


class Failure(StrEnum):
    """Why an artifact could not be had. Every one of them is a counted miss."""

    IO_ERROR = "io_error"
    CHECKSUM = "checksum"
    DEADLINE = "deadline"
    NO_SLOT = "no_slot"
    """No DRAM slot could be freed: everything in the tier is pinned."""
    GONE = "gone"
    """Evicted between the match and the restore."""
    UNREACHABLE = "unreachable"
    """The peer's lease has ended, it cannot be connected to, or it has just failed."""
    FENCED = "fenced"
    """The peer does not serve under the record's epoch any more, or was taken over."""
    REUSED = "reused"
    """The peer's slot holds something else by now."""
    BAD_RECORD = "bad_record"
    """The record points outside the peer's slots, or is of another size than the artifact."""
    CONGESTED = "congested"
    """More is queued to be read from SSD than could be read by the deadline."""
    CLOSED = "closed"


@dataclass(frozen=True)
class StoreConfig:
    """Capacities and places of the tiers."""

    dram_bytes: int
    ssd_dir: Path | None = None
    """Directory for this model's slab files and journal; None for no SSD tier."""
    ssd_bytes: int = 0
    verify: Literal["ssd", "sample", "all"] = "ssd"
    """`ssd`: checksum what comes from SSD. `sample`: also some of what was served from DRAM, see
    `hit_samples`. `all`: also what is served from DRAM, before it is."""
    load_deadline_s: float = 10.0
    """A restore that has not finished reading by then keeps what it has; the rest is a miss."""
    peer_deadline_s: float = 2.0
    """A read from a peer that has not ended by then is a miss, and the peer is left alone."""
    adopt_from: Path | None = None
    """Orphaned storage is read only below this folder; None: nowhere."""
    spill_delay_s: float = 0.2
    """Seconds that a sealed artifact waits in DRAM before its write to SSD."""
    replica_ttl_s: float = 300.0
    """A replica that no restore has used for so long is the first to leave DRAM."""
    eviction: EvictionName = "leaf_lru"
    """The order in which artifacts leave a full tier."""
    ssd_write_bytes_per_day: int | None = None
    """Most that is written to SSD in any 24 hours, see `write_budget`; None: no limit."""
    shared: bool = True
    """True if other processes (tensor-parallel workers) map the DRAM tier too."""


class Wanted(NamedTuple):
    """Artifacts of one state type over successive chunks of a chain, as `match` told them."""

    state_type: StateType
    chunks: Sequence[StoredChunk]


class ReadTiming(NamedTuple):
    """One restore's reads from one tier."""

    tier: Tier
    """The tier that the bytes came from."""
    bytes_by_type: Mapping[StateType, int]
    ahead_bytes: int
    """Bytes of the same tier that others waited for when it began."""
    seconds: float
    """From then to the last verified byte."""
    whole: bool = True
    """False if reads failed or were given up at the deadline: `seconds` is then the least that all
    of them would have taken, extrapolated from those that arrived."""


class Restore(Protocol):
    """Artifacts being brought into DRAM and held there. Always `release()` it."""

    @property
    def done(self) -> bool:
        """Return whether every artifact has arrived or failed. Never blocks."""
        ...

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """For each `Wanted`, the arena byte offset of each chunk's artifact; -1 if it failed.

        Final once `done`, valid until `release()`.
        """
        ...

    @property
    def offsets(self) -> Mapping[ArtifactId, int]:
        """The same by artifact, only those that arrived. Built anew at each call."""
        ...

    @property
    def failed(self) -> Mapping[ArtifactId, Failure]:
        """Artifacts that did not arrive, and why."""
        ...

    def release(self) -> None:
        """Let go. A read still under way keeps its slot until it ends. Idempotent."""
        ...


@dataclass(frozen=True)
class Save:
    """DRAM slots reserved for one chunk's artifacts; invisible until completed."""

    chunk: ChunkRange
    offsets: Mapping[StateType, int]
    """Arena byte offset at which each artifact must be written."""
    sizes: Mapping[StateType, int]
    """Bytes of each artifact."""


class Store(Protocol):
    """A content-addressed store of artifacts over DRAM and SSD."""

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """The longest prefix of `chain` of which each chunk has at least one sealed artifact.

        No side effect: no pin, no recency. Stops at the first chunk that is unknown, so a
        lazily hashed chain is consumed only as far as it matches.
        """
        ...

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return what is stored of the chain, also after missing ranges, up to its last chunk.

        Chunks in between that are not stored hold nothing.
        """
        ...

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Return the token lengths of the newest few short chunks after `parent`."""
        ...

    def missing(self, chunk: ChunkRange, state_types: Sequence[StateType]) -> list[StateType]:
        """Return those of `state_types` that are neither sealed nor being saved for this chunk."""
        ...

    def begin_restore(
        self, wanted: Sequence[Wanted], copies: Mapping[ArtifactId, PeerCopy] | None = None
    ) -> Restore:
        """Hold what is in DRAM, start reading the rest, in order. Marks them as used.

        What is not stored here is read from the peer that `copies` names, and then is stored
        here; anything else is read from SSD.
        """
        ...

    def begin_save(self, chunk: ChunkRange, sizes: Mapping[StateType, int]) -> Save | None:
        """Reserve DRAM slots, evicting leaves if needed; None (counted) if all is pinned.

        A type already sealed or being saved must not be asked for (see `missing`).
        """
        ...

    def complete_save(self, save: Save) -> None:
        """Seal: the bytes are in the arena. Visible to `match` from now; queued for SSD."""
        ...

    def abandon_save(self, save: Save) -> None:
        """Give the slots back; nothing becomes visible."""
        ...

    @property
    def generation(self) -> Generation:
        """Return the root of chains from now on: another one after `reset`, or after the fleet's.

        Never blocks; may change at any moment. Where its `tag` is new, call `catch_up` before
        anything is looked for or saved under it.
        """
        ...

    def reset(self) -> bool:
        """Forget every artifact in every tier, for good: no later process finds one either.

        Running restores and saves end harmlessly. Waits for the disk, a few seconds at most.
        False, with one line in the log, where the SSD could not be told: it is not used any more
        by this process, but the next would find what it holds.
        """
        ...

    def catch_up(self) -> Generation:
        """Forget what was stored before the latest generation, which it returns, at once."""
        ...

    def expect(self, expected: ExpectedReturn) -> None:
        """A session is expected back: stage its chain in DRAM, if that pays. Replaces earlier ones.

        Never at the expense of a restore; see `prefetching`.
        """
        ...

    def session_returned(self, session: Hashable) -> None:
        """Expect the session no longer: its restore reads what is not staged yet."""
        ...

    def protect_chain(
        self, session: Hashable, leaves: Sequence[ChunkKey], until_s: float, tenant: bytes = b""
    ) -> None:
        """Let the session's chain leave the tiers last, until then by the store's clock.

        `leaves`: where the chain may end, deepest first; the first of them that is stored counts.
        Forks share their common chunks. Replaces the session's earlier chain. `tenant`: of more
        sessions than the store remembers each tenant has its share.
        """
        ...

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        """Computing is cheaper than loading these: let them leave first when room is needed."""
        ...

    @property
    def reading_bytes(self) -> Mapping[Tier, int]:
        """Bytes that restores wait for, by the tier they come from."""
        ...

    def take_timings(self) -> list[ReadTiming]:
        """Reads that ended, or were given up, since the last call; the newest 256 at most."""
        ...

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything sealed is on SSD; False if the deadline passed first.

        What is refused for the write budget's sake is not waited for.
        """
        ...

    def close(self, deadline_s: float = 30.0) -> None:
        """Flush, stop the I/O thread, release files and memory. Idempotent."""
        ...
