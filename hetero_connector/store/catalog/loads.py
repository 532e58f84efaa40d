"""Loads: artifacts on their way to DRAM, and the restores and prefetches that wait for them.

A private part of `Catalog`, which holds the lock. An artifact has one load at a time; whoever else
wants it waits for the same load. The life of a load:

    begin, queue    a restore or a prefetch wants it and has pinned the artifact
    take            its device reads; its slots are in quarantine until the transfer has ended
    finish_...      the device is done, with or without success
    give_up         its deadline passes before that: the waiters are told, `finish_...` comes later
    withdraw        no waiter is left, and no device has taken it
    fail_all        its device cannot read at present

All but `give_up` end in `_settle`, which tells the waiters and unpins the artifact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ChunkKey, SlotRef, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, ReadTiming, StoreConfig
from hetero_connector.store.catalog.artifact_queue import ArtifactQueue
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.tiers import Tiers

_KEPT = 0.9
"""The weight of earlier batches, at each further one: about ten of them count."""
_USABLE = 0.5
"""The usable share of the deadline: reads that are queued beyond it would come too late."""


class Source(Enum):
    """The place that the bytes of a load come from."""

    SSD = "ssd"
    PEER = "peer"
    ORPHANED = "orphaned"
    """The SSD of an engine that has died."""
    DRAM = "dram"
    """They are in place; only their checksum is checked."""

    @property
    def tier(self) -> Tier:
        """The tier that metrics and timings count the load under."""
        return _TIERS[self]


_TIERS = {
    Source.SSD: Tier.SSD,
    Source.PEER: Tier.PEER,
    Source.ORPHANED: Tier.SSD,
    Source.DRAM: Tier.DRAM,
}

_QUEUED = {Source.SSD: Tier.SSD, Source.PEER: Tier.PEER}
"""The sources whose queue delays a tier's next load."""


class Waiter(Protocol):
    """A restore or a prefetch that waits for a load."""

    def on_loaded(self, artifact: Artifact, failure: Failure | None) -> None:
        """The load has ended. Called once, with the catalog's lock held."""
        ...


@dataclass(eq=False)
class Load:
    """One artifact to bring to DRAM. Pins the artifact until it is settled."""

    artifact: Artifact
    source: Source
    target: SlotRef | None
    """The DRAM slot to read into; None if the bytes are in place."""
    copy: PeerCopy | None = None
    """The copy at another engine, for `PEER` and `ORPHANED`."""
    waiters: list[Waiter] = field(default_factory=list)
    origin: SlotRef | None = None
    """The SSD slot that is read, from the moment the read begins."""
    is_counted: bool = False
    """True while its bytes are in `Loads.waiting_bytes`."""
    is_late: bool = False
    """True if it was given up while the device still writes into `target`."""

    @property
    def tier(self) -> Tier:
        """The tier that metrics and timings count it under."""
        return self.source.tier

    @property
    def size_bytes(self) -> int:
        """Useful bytes."""
        return self.artifact.size_bytes


class Loads:
    """The queue of every source, the loads under way, and what the SSD can still take."""

    def __init__(
        self, tiers: Tiers, config: StoreConfig, recorder: Recorder, clock: Callable[[], float]
    ) -> None:
        self.by_artifact: dict[Artifact, Load] = {}
        """Every load that is not settled."""
        self.waiting_bytes = dict.fromkeys((Source.SSD, Source.PEER, Source.ORPHANED), 0)
        """Bytes that restores or prefetches wait for. Our own SSD does not read the orphaned."""
        self.read_pace = ReadPace(config.load_deadline_s)
        self.timings: deque[ReadTiming] = deque(maxlen=256)
        """For the cost model. Appended and taken without the lock."""
        self._tiers = tiers
        self._recorder = recorder
        self._clock = clock
        self._queues = {source: ArtifactQueue[Load]() for source in Source}
        self._gave_up_s: dict[Tier, float] = {}
        """By tier, when the last timing of a load that was given up was appended."""

    def __len__(self) -> int:
        return len(self.by_artifact)

    @property
    def is_congested(self) -> bool:
        """Return whether the SSD could not read more than is queued by the load deadline."""
        return self.waiting_bytes[Source.SSD] > self.read_pace.most_bytes

    @property
    def ahead_bytes(self) -> dict[Tier, int]:
        """Return the bytes that our own SSD and the peers will read before a further load."""
        return {tier: self.waiting_bytes[source] for source, tier in _QUEUED.items()}

    def ahead_of(self, types: Mapping[ChunkKey, Collection[StateType]]) -> dict[Tier, int]:
        """Return `ahead_bytes` without the loads of these types of these chunks."""
        ahead = self.ahead_bytes
        for artifact, load in self.by_artifact.items():
            is_queued = load.is_counted and load.source in _QUEUED
            if is_queued and artifact.state_type in types.get(artifact.node.chunk.key, ()):
                ahead[load.tier] -= load.size_bytes
        return ahead

    @property
    def any_queued(self) -> bool:
        """Return whether a load waits for its device. Needs no lock."""
        return any(self._queues.values())

    def num_queued(self, source: Source) -> int:
        """Return how many loads wait for this device. Needs no lock."""
        return len(self._queues[source])

    def begin(
        self,
        artifact: Artifact,
        source: Source,
        target: SlotRef | None,
        copy: PeerCopy | None = None,
    ) -> Load:
        """Begin the load of an artifact that the caller has pinned for it."""
        load = self.by_artifact[artifact] = Load(artifact, source, target, copy)
        if target is not None:
            self.waiting_bytes[load.source] += load.size_bytes
            load.is_counted = True
        return load

    def queue(self, load: Load) -> None:
        """Have the load's device take it when its turn comes."""
        self._queues[load.source].append(load.artifact, load)

    def take(self, source: Source, limit_bytes: int) -> list[Load]:
        """Take the next loads of a source, up to about `limit_bytes`, their slots protected.

        A load without waiters is settled here. Orphaned storage is read directory by directory:
        all loads that are returned name the same one.
        """
        queue, taken, size_bytes = self._queues[source], list[Load](), 0
        while queue and size_bytes < limit_bytes:
            if source is Source.ORPHANED and taken and _storage(queue.first) != _storage(taken[0]):
                break
            load = queue.popleft()
            if load.artifact.forgotten or not load.waiters:
                self._fail_queued(load, Failure.GONE)
                continue
            self.protect_slots(load)
            taken.append(load)
            size_bytes += load.size_bytes
        return taken

    def protect_slots(self, load: Load) -> None:
        """Quarantine the load's slots until it ends, also if the artifact is forgotten."""
        if load.target is not None:
            self._tiers.dram.begin_transfer(load.target)
        if load.source is Source.SSD:
            assert self._tiers.ssd is not None
            load.origin = load.artifact.ssd
            assert load.origin is not None
            self._tiers.ssd.begin_transfer(load.origin)

    def fail_all(self, source: Source, failure: Failure) -> None:
        """Fail every queued load of a source."""
        queue = self._queues[source]
        while queue:
            load = queue.popleft()
            if load.waiters and not load.artifact.forgotten:
                self.count_failure(failure, load.tier, len(load.waiters))
                self._fail_queued(load, failure)
            else:
                self._fail_queued(load, Failure.GONE)

    def finish_read(self, load: Load, failure: Failure | None, *, is_lost: bool) -> None:
        """End a read from our own SSD.

        `is_lost`: the artifact cannot be read from its slot any more; it is forgotten.
        """
        artifact, tiers = load.artifact, self._tiers
        assert tiers.ssd is not None
        assert load.target is not None
        assert load.origin is not None
        tiers.dram.end_transfer(load.target)
        tiers.ssd.end_transfer(load.origin)
        if failure is not None:
            self.count_failure(failure, Tier.SSD)
        elif artifact.forgotten:
            failure = Failure.GONE
        if failure is None:
            tiers.attach(artifact, load.target)
            self.count_read(Tier.SSD, artifact.state_type, artifact.size_bytes)
        else:
            tiers.dram.release(load.target)
            if is_lost and not artifact.forgotten:
                if failure is Failure.IO_ERROR and artifact.ssd == load.origin:
                    tiers.ssd.retire(load.origin)
                tiers.lose(artifact)
        self._settle(load, failure)

    def finish_check(self, load: Load, failure: Failure | None) -> None:
        """End a check of bytes that were in DRAM already."""
        artifact = load.artifact
        if failure is None:
            self.count_read(Tier.DRAM, artifact.state_type, artifact.size_bytes)
            self._settle(load, Failure.GONE if artifact.forgotten else None)
            return
        self.lose_from_dram(artifact, failure)
        self._settle(load, failure)

    def finish_fetch(self, load: Load, failure: Failure | None) -> bool:
        """End a load from another engine; return whether the artifact is stored here now.

        `failure` is None if the verified bytes are in the load's target.
        """
        assert load.target is not None
        self._tiers.dram.end_transfer(load.target)
        return self._end_fetch(load, failure)

    def _end_fetch(self, load: Load, failure: Failure | None) -> bool:
        artifact, copy, target, tiers = load.artifact, load.copy, load.target, self._tiers
        assert copy is not None
        assert target is not None
        if artifact.forgotten:
            failure = failure or Failure.GONE
        if failure is None:
            artifact.checksum = copy.checksum
            artifact.last_used = tiers.tick()
            tiers.attach(artifact, target)
            tiers.index.seal(artifact)
            self.count_read(load.tier, artifact.state_type, artifact.size_bytes)
        else:
            tiers.dram.release(target)
            if not artifact.forgotten:
                tiers.forget(artifact)
                # A restore that gave up has counted it; a bad peer is counted in any case.
                is_counted = load.source is Source.ORPHANED or failure is Failure.GONE
                if load.waiters or not is_counted:
                    self.count_failure(failure, load.tier)
        if all(other.sealed for other in artifact.node.artifacts.values()):
            tiers.forget_remains(artifact.node)  # nothing more of the chunk is on its way
        self._settle(load, failure)
        return not artifact.forgotten

    def give_up(self, load: Load) -> None:
        """Fail a load at its deadline; its device may still write into its slots."""
        load.is_late = True
        if load.source is not Source.SSD:
            self.count_failure(Failure.DEADLINE, load.tier)
        elif load.waiters:
            self.count_failure(Failure.DEADLINE, load.tier, len(load.waiters))
        self.disown(load, Failure.DEADLINE)
        if load.copy is not None and not load.artifact.forgotten:
            self._tiers.forget(load.artifact)  # else a save of the chunk would wait for its bytes

    def disown(self, load: Load, failure: Failure) -> None:
        """Fail the load for all who wait, though its transfer goes on."""
        for waiter in load.waiters:
            waiter.on_loaded(load.artifact, failure)
        load.waiters.clear()
        self._uncount(load)

    def withdraw(self, load: Load) -> None:
        """End a load without waiters that no device has taken: its slot is free at once."""
        if not load.waiters and self._queues[load.source].discard(load.artifact):
            self._fail_queued(load, Failure.GONE)

    def disown_all(self, failure: Failure) -> None:
        """Fail every load; those that no device has taken end."""
        for load in list(self.by_artifact.values()):
            self.disown(load, failure)
            self.withdraw(load)

    def lose_from_dram(self, artifact: Artifact, failure: Failure) -> None:
        """Forget an artifact whose bytes in DRAM are wrong.

        Its SSD copy goes too: it may have been written from these bytes.
        """
        self.count_failure(failure, Tier.DRAM)
        if not artifact.forgotten:
            self._tiers.lose(artifact)

    def add_timing(self, timing: ReadTiming, began_s: float, *, is_given_up: bool) -> None:
        """Append a timing of a restore that began then.

        Of several restores that were given up for one and the same stall only the first counts.
        """
        if is_given_up:
            if began_s < self._gave_up_s.get(timing.tier, -math.inf):
                return
            self._gave_up_s[timing.tier] = self._clock()
        self.timings.append(timing)

    def count_failure(self, cause: Failure, tier: Tier, count: int = 1) -> None:
        """Count failed artifacts in the metrics."""
        self._recorder.add("heterocache_failures", count, cause=cause.value, tier=tier.value)

    def count_read(self, tier: Tier, state_type: StateType, size_bytes: int) -> None:
        """Count bytes served from a tier in the metrics."""
        self._recorder.add(
            "heterocache_read_bytes", size_bytes, tier=tier.value, state_type=state_type.value
        )

    def _fail_queued(self, load: Load, failure: Failure) -> None:
        """End a load that no device has taken."""
        if load.copy is not None:
            self._end_fetch(load, failure)
            return
        if load.target is not None:
            self._tiers.dram.release(load.target)
        self._settle(load, failure)

    def _settle(self, load: Load, failure: Failure | None) -> None:
        """Report the outcome to all who wait, and drop the load's pin."""
        artifact = load.artifact
        del self.by_artifact[artifact]
        self._uncount(load)
        for waiter in load.waiters:
            waiter.on_loaded(artifact, failure)
        load.waiters.clear()
        self._tiers.unpin(artifact)

    def _uncount(self, load: Load) -> None:
        if load.is_counted:
            self.waiting_bytes[load.source] -= load.size_bytes
            load.is_counted = False


def _storage(load: Load) -> str:
    assert load.copy is not None
    return load.copy.storage


class ReadPace:
    """The pace of the SSD, and so how many bytes may be queued for it. Pure: time comes in.

    Bytes per second over the last batches, while there was something to read.
    """

    def __init__(self, deadline_s: float) -> None:
        self._usable_s = _USABLE * deadline_s
        self._bytes = 0.0
        self._seconds = 0.0
        self._ended_s = -math.inf
        self.most_bytes = math.inf
        """Bytes that may be queued: more would come after the deadline. Infinite until known."""

    def add_batch(self, size_bytes: int, began_s: float, now_s: float) -> None:
        """Learn from a batch of so many bytes that was read, after those before it."""
        self._bytes = _KEPT * self._bytes + size_bytes
        self._seconds = _KEPT * self._seconds + now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if self._seconds > 0:
            self.most_bytes = self._usable_s * self._bytes / self._seconds
