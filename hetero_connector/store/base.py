"""The values that the store and its callers exchange."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from hetero_connector.artifacts.record import ChunkRange, StoredChunk, Tier
from hetero_connector.spec.state_types import StateType

EvictionName = Literal["leaf_lru", "value"]


class Failure(StrEnum):
    """The reason why an artifact could not be restored or saved. Each is a counted miss."""

    IO_ERROR = "io_error"
    CHECKSUM = "checksum"
    DEADLINE = "deadline"
    NO_SLOT = "no_slot"
    """No DRAM slot could be freed: everything in the tier is pinned."""
    GONE = "gone"
    """It is not stored any more: evicted or reset since the match, or no copy of it is known."""
    UNREACHABLE = "unreachable"
    """The peer's lease has ended, it cannot be connected to, or it has just failed; or orphaned
    storage is in use or busy."""
    FENCED = "fenced"
    """The peer does not serve under the record's epoch any more, or was taken over."""
    REUSED = "reused"
    """The peer's slot holds something else by now."""
    BAD_RECORD = "bad_record"
    """The record points outside the peer's slots, or is of another size than the artifact."""
    CONGESTED = "congested"
    """More is queued to be read from SSD than could be read by the deadline."""
    CLOSED = "closed"


class Pinned(NamedTuple):
    """A chain that stays where it is until its pin ends."""

    end: int
    """Its tokens."""
    size_bytes: int
    """The slots that it takes in a tier."""


class TimedPin(NamedTuple):
    """A pin under way."""

    name: Hashable
    """The session, or what else its owner has named it."""
    tokens: int
    until_s: float
    """Its end, by the store's clock."""
    tenant: bytes
    is_bounded: bool
    """True if it counts against the tenant's share: a client's, not an operator's."""


class PinUse(NamedTuple):
    """All pins under way, and how much of their bounds they use."""

    pins: Sequence[TimedPin]
    size_bytes: int
    max_bytes: int
    bytes_by_tenant: Mapping[bytes, int]
    max_bytes_by_tenant: int


class PinRefusal(StrEnum):
    """The reason why a chain was not pinned."""

    NOT_STORED = "nothing of it is stored"
    TENANT_FULL = "the pins of its cache salt already keep a quarter of a tier"
    STORE_FULL = "pins already keep half of a tier"


@dataclass(frozen=True)
class StoreConfig:
    """Capacities and places of the tiers."""

    dram_bytes: int
    ssd_dir: Path | None = None
    """Directory for this model's slab file and journal; None for no SSD tier."""
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
    """Artifacts of one state type over successive chunks of a chain, as `match` returned them."""

    state_type: StateType
    chunks: Sequence[StoredChunk]


class ChunkCopies(NamedTuple):
    """The state types of one chunk that are sealed, by the tiers that have a copy."""

    dram: frozenset[StateType]
    ssd: frozenset[StateType]
    is_held: bool
    """False if it is a missing chunk: nothing of it is stored, or being saved."""

    @property
    def state_types(self) -> frozenset[StateType]:
        """Return the state types that either tier has."""
        return self.dram | self.ssd


class ReadTiming(NamedTuple):
    """One restore's reads from one tier."""

    tier: Tier
    """The tier that the bytes came from."""
    bytes_by_type: Mapping[StateType, int]
    ahead_bytes: int
    """Bytes that others waited for from the same tier when it began."""
    seconds: float
    """From then to the last verified byte."""
    whole: bool = True
    """False if reads failed or were given up at the deadline: `seconds` is then the least that all
    of them would have taken, extrapolated from those that arrived."""


@dataclass(frozen=True)
class Save:
    """DRAM slots reserved for one chunk's artifacts; invisible until completed."""

    chunk: ChunkRange
    offsets: Mapping[StateType, int]
    """Arena byte offset at which each artifact must be written."""
    sizes: Mapping[StateType, int]
    """Bytes of each artifact."""
