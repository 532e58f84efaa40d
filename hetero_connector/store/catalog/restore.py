"""A restore: artifacts that are brought to DRAM and pinned there until they are copied.

The catalog calls `start` and what follows it, with its lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, ReadTiming, Wanted
from hetero_connector.store.catalog.loads import Load, Source
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.pins import ChainPin

if TYPE_CHECKING:
    from hetero_connector.store.catalog.catalog import Catalog

_NOWHERE = np.full(len(StateType), -1, np.int64).tobytes()


class Restore:
    """Made by `Catalog.begin_restore`; used by the scheduler's thread.

    Ends with `release` once its artifacts have been copied, or with `abandon`.
    """

    def __init__(
        self,
        catalog: Catalog,
        wanted: Sequence[Wanted],
        copies: Mapping[ArtifactId, PeerCopy],
        now_s: float,
        limit_s: float,
    ) -> None:
        self._catalog = catalog
        self._wanted = wanted
        self._copies = copies
        self._pin = ChainPin(wanted)
        self._columns: list[list[int]] = []
        self._places: dict[ArtifactId, list[tuple[int, int]]] = {}
        """(column, position) of each artifact that was not ready in DRAM."""
        self._failed: dict[ArtifactId, Failure] = {}
        self._pending: dict[ArtifactId, Load] = {}
        self._timer = StagingTimer(now_s, catalog.loads.ahead_bytes)
        self._started_s = now_s
        self._deadline_s = now_s + limit_s
        self._congested = catalog.loads.is_congested
        self._ended = False

    def poll(self) -> bool:
        """Return whether every artifact has arrived or failed. Never blocks.

        Fails what is missing once the deadline has passed.
        """
        assert not self._ended, "its artifacts may have been evicted"
        if not self._pending:
            return True
        is_overdue = self._catalog.clock() >= self._deadline_s
        return is_overdue and self._catalog.poll_restore(self)

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """For each `Wanted`, the arena byte offset of each chunk's artifact; -1 if it failed.

        Final once `poll` returns True, valid until `release` or `abandon`.
        """
        assert not self._ended, "its artifacts may have been evicted"
        return self._columns

    @property
    def offsets(self) -> Mapping[ArtifactId, int]:
        """Return the same by artifact, only those that arrived. Built anew at each call."""
        return {
            ArtifactId(stored.chunk.key, kind): at
            for (kind, chunks), column in zip(self._wanted, self._columns, strict=True)
            for stored, at in zip(chunks, column, strict=True)
            if at >= 0
        }

    @property
    def failed(self) -> Mapping[ArtifactId, Failure]:
        """Artifacts that did not arrive, and why."""
        return self._failed

    def tier_reads(self) -> Mapping[Tier, tuple[float, float]]:
        """Return when the reads from each tier began and ended, as far as they have ended."""
        return {
            tier: (self._timer.started_s, ended_s) for tier, ended_s in self._timer.ended_s.items()
        }

    def release(self) -> None:
        """Count the uses and drop the pins: the artifacts have been copied. Idempotent."""
        if not self._ended:
            self._ended = True
            self._catalog.end_restore(self)

    def abandon(self) -> None:
        """Drop the pins without a copy. Reads under way go on, and their artifacts stay stored."""
        if not self._ended:
            self._ended = True
            self._catalog.abandon_restore(self)

    # --- called by the catalog --------------------------------------------------------------------

    def on_loaded(self, artifact: Artifact, failure: Failure | None) -> None:
        """See `loads.Waiter`."""
        artifact_id = artifact.id
        load = self._pending[artifact_id]
        now_s = self._catalog.clock()
        timing = self._timer.end(load.tier, artifact.size_bytes, now_s, failed=failure is not None)
        if timing is not None:
            is_given_up = failure is Failure.DEADLINE
            self._catalog.loads.add_timing(timing, self._started_s, is_given_up=is_given_up)
        if failure is not None:
            self._failed[artifact_id] = failure
        else:
            for column, position in self._places[artifact_id]:
                self._columns[column][position] = artifact.dram_offset
        del self._pending[artifact_id]  # last: `poll` looks at it without the lock

    def start(self) -> bool:
        """Pin what is in DRAM, and begin loads of the rest; return whether there are any.

        The pin comes first, so that no slot for a load evicts what is in DRAM.
        """
        self._catalog.tiers.pin_chain(self._pin)
        self._columns = self._in_dram()
        for place in sorted(self._not_ready(), key=self._begins_at):  # parents first
            column, position = place
            kind, chunks = self._wanted[column]
            self._load(chunks[position].chunk, kind, place)
        return bool(self._pending)

    def check_deadline(self, now_s: float) -> bool:
        """Give up what is missing at the deadline; return whether nothing is missing."""
        if self._pending and now_s >= self._deadline_s:
            self._give_up(now_s)
        return not self._pending

    def count_uses(self, tick: int) -> list[Artifact]:
        """Count one use of each artifact that arrived or was there; return them."""
        used: list[Artifact] = []
        for kind, artifacts in self._used():
            self._count_dram_hits(kind, artifacts)
            used += artifacts
        self._catalog.tiers.mark_used(used, tick)
        return used

    def end(self) -> None:
        """Wait for nothing more, and drop the pin."""
        self._abandon_pending()
        self._catalog.tiers.unpin_chain(self._pin)

    def _in_dram(self) -> list[list[int]]:
        """Return the columns as far as the artifacts are ready in DRAM.

        A long prompt has thousands of artifacts, as a rule all in DRAM and where the match of a
        moment ago said. Then no artifact is looked at.
        """
        if self._catalog.config.verify == "all":
            return [[-1] * len(chunks) for _, chunks in self._wanted]
        tables: dict[int, npt.NDArray[np.int64]] = {}
        columns: list[list[int]] = []
        for kind, chunks in self._wanted:
            if id(chunks) not in tables:  # columns over the same list share its table
                packed = b"".join(self._offsets(chunks))
                tables[id(chunks)] = np.frombuffer(packed, np.int64).reshape(-1, len(StateType))
            columns.append(tables[id(chunks)][:, kind.position].tolist())
        return columns

    def _offsets(self, chunks: Sequence[StoredChunk]) -> Sequence[bytes]:
        """Return the `StoredChunk.offsets` that `match` would return for the chunks by now."""
        offsets = [stored.offsets for stored in chunks if not stored.stale]
        if len(offsets) == len(chunks):
            return offsets
        nodes = self._catalog.tiers.index.nodes
        found = (nodes.get(stored.chunk.key) for stored in chunks)
        return [_NOWHERE if x is None or x.stored is None else x.stored.offsets for x in found]

    def _not_ready(self) -> Iterator[tuple[int, int]]:
        """Yield (column, position) of artifacts that have no place in DRAM yet."""
        for column, offsets in enumerate(self._columns):
            if -1 in offsets:
                yield from ((column, at) for at, offset in enumerate(offsets) if offset == -1)

    def _begins_at(self, place: tuple[int, int]) -> int:
        """Return the first token of the artifact of a place."""
        column, position = place
        return self._wanted[column].chunks[position].chunk.start

    def _load(self, chunk: ChunkRange, kind: StateType, place: tuple[int, int]) -> None:
        """Begin or join the load of an artifact, or note why it cannot be had."""
        catalog, artifact_id = self._catalog, ArtifactId(chunk.key, kind)
        self._places.setdefault(artifact_id, []).append(place)
        if artifact_id in self._pending:
            return  # wanted twice
        artifact = catalog.tiers.index.find(artifact_id)
        load = None if artifact is None else catalog.loads.by_artifact.get(artifact)
        is_joined = load is not None
        found: Load | tuple[Failure, Tier]
        if not catalog.serves_loads:
            found = Failure.IO_ERROR, Tier.PEER if artifact is None else Tier.SSD
        elif artifact is None:
            found = self._fetch(chunk, kind)
        elif load is not None:
            # The slot of a late load is all there is, until an unknown time.
            found = (Failure.DEADLINE, Tier.SSD) if load.is_late else load
        else:
            found = self._read(artifact)
        if isinstance(found, tuple):
            failure, tier = found
            self._failed[artifact_id] = failure
            catalog.loads.count_failure(failure, tier)
            return
        if is_joined or found.source is Source.ORPHANED:  # its time is not that of the tier
            self._timer.add_foreign(found.tier)
        else:
            self._timer.add(found.tier, kind, found.size_bytes)
        found.waiters.append(self)
        self._pending[artifact_id] = found

    def _fetch(self, chunk: ChunkRange, kind: StateType) -> Load | tuple[Failure, Tier]:
        """Queue a read of another engine's copy, or say why there is none."""
        tiers, loads = self._catalog.tiers, self._catalog.loads
        copy = self._copies.get(ArtifactId(chunk.key, kind))
        if copy is None or not self._catalog.reads_peers:
            return Failure.GONE, Tier.DRAM
        if not 0 < copy.size_bytes <= tiers.dram.geometry.stride_bytes.get(kind, 0):
            return Failure.BAD_RECORD, Tier.PEER
        if not tiers.index.has_place_for(chunk):
            return Failure.GONE, Tier.DRAM  # the chunk could not be reached
        # The artifact enters the index first: that keeps its parents.
        artifact = tiers.index.add(chunk, kind, copy.size_bytes)
        artifact.replica = not copy.storage  # what a dead engine left becomes ours
        artifact.pins = 1
        target = tiers.take_dram(artifact)
        if target is None:
            tiers.forget(artifact)
            tiers.unpin(artifact)
            return Failure.NO_SLOT, Tier.DRAM
        source = Source.ORPHANED if copy.storage else Source.PEER
        load = loads.begin(artifact, source, target, copy)
        loads.queue(load)
        return load

    def _read(self, artifact: Artifact) -> Load | tuple[Failure, Tier]:
        """Queue a read from SSD, or a check of what is in DRAM, or say why there is none."""
        tiers, loads = self._catalog.tiers, self._catalog.loads
        if not artifact.sealed:
            return Failure.GONE, Tier.DRAM
        is_on_ssd_alone = artifact.dram is None
        if is_on_ssd_alone and not self._catalog.ssd_readable:
            return Failure.IO_ERROR, Tier.SSD
        if is_on_ssd_alone and self._congested:
            return Failure.CONGESTED, Tier.SSD
        artifact.pins += 1
        target = None
        if is_on_ssd_alone:
            target = tiers.take_dram(artifact)
            if target is None:
                tiers.unpin(artifact)
                return Failure.NO_SLOT, Tier.DRAM
        load = loads.begin(artifact, Source.SSD if target else Source.DRAM, target)
        loads.queue(load)
        return load

    def _used(self) -> Iterator[tuple[StateType, list[Artifact]]]:
        """Yield what arrived or was there of each `Wanted`, as far as the index still knows it.

        A long prompt has thousands of artifacts, most in columns over the same list of chunks.
        """
        nodes = self._catalog.tiers.index.nodes
        known: dict[int, list[Mapping[StateType, Artifact]]] = {}
        for (kind, chunks), offsets in zip(self._wanted, self._columns, strict=True):
            if id(chunks) not in known:
                found = (nodes.get(stored.chunk.key) for stored in chunks)
                known[id(chunks)] = [{} if node is None else node.artifacts for node in found]
            held = [artifacts.get(kind) for artifacts in known[id(chunks)]]
            pairs = zip(held, offsets, strict=True)
            yield kind, [artifact for artifact, at in pairs if artifact is not None and at >= 0]

    def _count_dram_hits(self, kind: StateType, used: Sequence[Artifact]) -> None:
        """Count as hits in DRAM what was there when the restore began."""
        if self._places:
            used = [artifact for artifact in used if artifact.id not in self._places]
        if used:
            size_bytes = sum(artifact.size_bytes for artifact in used)
            self._catalog.loads.count_read(Tier.DRAM, kind, size_bytes)

    def _give_up(self, now_s: float) -> None:
        loads = self._catalog.loads
        for load in self._pending.values():
            loads.count_failure(Failure.DEADLINE, load.tier)
        self._failed.update(dict.fromkeys(self._pending, Failure.DEADLINE))
        for timing in self._timer.give_up(now_s):
            loads.add_timing(timing, self._started_s, is_given_up=True)
        self._abandon_pending()

    def _abandon_pending(self) -> None:
        """Wait for nothing more; loads that have begun go on, and their artifacts stay cached."""
        for load in self._pending.values():
            load.waiters.remove(self)
            self._catalog.loads.withdraw(load)
        self._pending.clear()


@dataclass
class _Reads:
    bytes_by_type: Counter[StateType] = field(default_factory=Counter)
    arrived_bytes: int = 0
    left: int = 0
    is_representative: bool = True
    """False if the time is not that of these bytes."""


class StagingTimer:
    """Times a restore's reads, tier by tier, for the cost model to learn from.

    From when the restore begins to its last verified byte: queue, transfers, checksums and the
    I/O thread's own pauses. That is what a request waits for; the transfers alone are less.

    A restore that is given up at its deadline teaches the most: without it the planner would choose
    a tier that became slow again and again. Its time is extrapolated from the bytes that arrived,
    to twice the time at most.
    """

    def __init__(self, started_s: float, ahead_bytes: Mapping[Tier, int]) -> None:
        """`ahead_bytes`: bytes that others wait for when it begins, by tier."""
        self.started_s = started_s
        self._ahead_bytes = ahead_bytes
        self._reads: dict[Tier, _Reads] = {}
        self.ended_s: dict[Tier, float] = {}
        """The time at which the last read from each tier ended."""

    def add(self, tier: Tier, state_type: StateType, size_bytes: int) -> None:
        """Add a read that the restore began."""
        reads = self._reads.setdefault(tier, _Reads())
        reads.bytes_by_type[state_type] += size_bytes
        reads.left += 1

    def add_foreign(self, tier: Tier) -> None:
        """Add a read whose time is not that of the tier: it began earlier, or is from elsewhere."""
        reads = self._reads.setdefault(tier, _Reads())
        reads.left += 1
        reads.is_representative = False

    def end(self, tier: Tier, size_bytes: int, now_s: float, *, failed: bool) -> ReadTiming | None:
        """Note that a read has ended; return a timing if it was the tier's last."""
        reads = self._reads[tier]
        reads.left -= 1
        if not failed:
            reads.arrived_bytes += size_bytes
        elif tier is Tier.PEER:  # it has its own deadline, and the other peers are not it
            reads.is_representative = False
        if reads.left:
            return None
        self.ended_s[tier] = now_s
        return self._timing(tier, now_s)

    def give_up(self, now_s: float) -> list[ReadTiming]:
        """Wait no longer; return a timing of each tier that has not ended."""
        timings = [self._timing(tier, now_s) for tier, reads in self._reads.items() if reads.left]
        return [timing for timing in timings if timing is not None]

    def _timing(self, tier: Tier, now_s: float) -> ReadTiming | None:
        reads = self._reads[tier]
        if not reads.is_representative or tier is Tier.DRAM:
            return None
        asked_bytes = reads.bytes_by_type.total()
        part = max(reads.arrived_bytes / asked_bytes, 0.5)
        return ReadTiming(
            tier,
            reads.bytes_by_type,
            self._ahead_bytes.get(tier, 0),
            (now_s - self.started_s) / part,
            whole=reads.arrived_bytes == asked_bytes,
        )
