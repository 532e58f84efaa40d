"""The catalog: what is stored where, and what the I/O thread has to do next.

The one lock of the store, and the only code that changes an artifact; `retention` and `fleet_side`
share it. A public method holds the lock from its beginning to its end and waits for nothing but the
lock. Those that hold it for a part, or need none, say so; `flush`, `wait` and `wait_rows_gone` let
go of it while they wait. What is read without it is one length, or one attribute, which is replaced
as a whole, and last: the thread that changes it may lose the interpreter after any bytecode. These
threads call it: the scheduler's and those of commands (`missing` to `decline`, and what concerns
the whole store), the fleet's (`set_joined` and `fleet_side`), the scrubber's and the I/O thread
(the rest). No files and no threads here; the clock is a parameter.

The life of an artifact: *reserved* with its DRAM slot (`reserve`), *sealed* and so visible
(`seal`), *stored* once it is on SSD too (`finish_writes`), *forgotten* when its last copy leaves.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from random import Random
from typing import Concatenate, ParamSpec, TypeVar

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkKey,
    ChunkRange,
    StoredChunk,
    Tier,
    distinct_tiers,
)
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import ChunkCopies, Failure, Save, StoreConfig, Wanted
from hetero_connector.store.catalog import scrubbing
from hetero_connector.store.catalog.chain_users import ChainUsers
from hetero_connector.store.catalog.exports import sealed_copies
from hetero_connector.store.catalog.fleet_side import FleetSide
from hetero_connector.store.catalog.hit_samples import ONE_IN, HitSamples
from hetero_connector.store.catalog.loads import Load, Loads, Source
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.prefetch import Prefetcher
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.store.catalog.regrets import Regrets
from hetero_connector.store.catalog.replicas import Replicas
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.retention import Retention
from hetero_connector.store.catalog.scrubbing import ScrubbedCopy
from hetero_connector.store.catalog.tick_times import TickTimes
from hetero_connector.store.catalog.tiers import Health, Occupancy, Tiers
from hetero_connector.store.catalog.write_budget import WriteBudget
from hetero_connector.store.catalog.writes import Write, Writes, unwritten_of

GAUGE_INTERVAL_S = 1.0
_OFFERED_AT_ONCE = 512
"""Artifacts that are queued for their write while the lock is held: about a millisecond."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ReservedSave(Save):
    """A save with the artifacts that wait for its bytes."""

    artifacts: list[Artifact]
    """Pinned once each; emptied when the save ends."""


@dataclass(frozen=True)
class RowsToForget:
    """Journal rows to delete before anything is written."""

    ids: Sequence[ArtifactId]
    cleared_for: bytes | None
    """The tag of the generation for which the whole journal is cleared instead; None: it is not."""


def _locked(
    method: Callable[Concatenate[Catalog, P], R],
) -> Callable[Concatenate[Catalog, P], R]:
    """Run a method with the lock held."""

    @wraps(method)
    def call(catalog: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with catalog._lock:
            return method(catalog, *args, **kwargs)

    return call


class Catalog:
    """See the module.

    `tiers`, `loads` and `writes` are its parts. They change only with the lock held; without it
    other modules read no more of them than geometry, flags and single counts.
    """

    def __init__(
        self,
        tiers: Tiers,
        config: StoreConfig,
        recorder: Recorder,
        clock: Callable[[], float],
        generation: Generation,
    ) -> None:
        self.config = config
        self.clock = clock
        self.generation = generation
        """Everything stored belongs to this one."""
        self.on_generation: Callable[[Generation], None] = lambda generation: None
        """Called with the lock held when everything was forgotten for another generation."""
        self.reads_peers = False
        """True if loads from peers and orphaned storage will be served."""
        self.ssd_readable = True
        """False while no read from SSD is begun."""
        self.late_bytes = 0
        """Bytes of SSD reads that were given up and may still fill their DRAM slots."""
        self.io_alive = True
        """False once the I/O thread has ended."""
        self.step_began_s = math.inf
        """The clock when the I/O thread's present step began; infinite between steps."""
        self.closing = False
        self.tiers = tiers
        self.loads = Loads(tiers, config, recorder, clock)
        sums = config.verify == "all" or tiers.feed is not None
        self.writes = Writes(tiers, recorder, clock, sums=sums)
        self.tick_times = TickTimes(clock())
        self.users = ChainUsers(clock, tiers.on_unused)
        self.replicas = Replicas(
            config.replica_ttl_s, clock, self.tick_times, tiers.evict_first, recorder
        )
        self.prefetcher = Prefetcher(tiers, self.loads, self.tick_times, config, recorder, clock)
        self.prefetcher.tick = self._tick
        self.samples = HitSamples(ONE_IN, Random())
        """Artifacts that were served from DRAM and are to be checked."""
        self._samples_hits = config.verify == "sample" and self.writes.is_active
        """True if there are checksums, and an I/O thread that checks them."""
        self.write_again_s = math.inf
        """The clock when a pause of writing ends; infinite without one, or if it is not known."""
        self.regrets = Regrets(clock, recorder)
        tiers.on_forgotten = self._on_forgotten
        tiers.on_evicted = self.regrets.on_evicted
        self._lock = threading.Condition()
        self.retention = Retention(
            self._lock, tiers, self.loads, self.users, self.prefetcher, clock
        )
        self.fleet_side = FleetSide(
            self._lock, tiers, self.writes, self.replicas, self.users, clock, self._tick
        )
        self._recorder = recorder
        self._used: dict[Artifact, None] = {}
        """Artifacts that restores used, for the order of use in the journal."""
        self._is_forgetting_rows = False
        """True while rows are taken to be deleted from the journal."""
        self._gauges_due_s = 0.0

    # --- the scheduler's thread: finding ----------------------------------------------------------

    def missing(self, chunk: ChunkRange, state_types: Sequence[StateType]) -> list[StateType]:
        """See `ArtifactStore.missing`. Needs no lock."""
        node = self.tiers.index.nodes.get(chunk.key)
        return [t for t in state_types if node is None or t not in node.artifacts]

    # --- restores and saves -----------------------------------------------------------------------

    @_locked
    def begin_restore(
        self,
        wanted: Sequence[Wanted],
        copies: Mapping[ArtifactId, PeerCopy],
        within_s: float | None = None,
    ) -> Restore:
        """Pin what is in DRAM, and begin loads of the rest; see `ArtifactStore.begin_restore`."""
        limit_s = self.config.load_deadline_s if within_s is None else within_s
        restore = Restore(self, wanted, copies, self.clock(), limit_s)
        if restore.start():
            self._lock.notify_all()
        return restore

    def bytes_ahead_of(self, chunks: Sequence[StoredChunk]) -> dict[Tier, int]:
        """See `ArtifactStore.bytes_ahead_of`. Takes the lock if any of the chunks may be read."""
        ahead = self.loads.ahead_bytes
        slow = [x for x in distinct_tiers(chunks) if not {Tier.DRAM}.issuperset(x.values())]
        if not slow or not any(ahead.values()):
            return ahead
        types = {x.chunk.key: x.tiers.keys() for x in chunks if x.tiers in slow}
        with self._lock:
            return self.loads.ahead_of(types)

    @_locked
    def poll_restore(self, restore: Restore) -> bool:
        """Fail what a restore waits for at its deadline; return whether it waits for nothing."""
        return restore.check_deadline(self.clock())

    @_locked
    def abandon_restore(self, restore: Restore) -> None:
        """Drop the pins of a restore that is not copied."""
        restore.end()

    @_locked
    def end_restore(self, restore: Restore) -> None:
        """Count the uses of a restore and drop its pins."""
        used = restore.count_uses(self._tick())
        restore.end()
        if self._samples_hits and self.io_alive:
            self.samples.hit(used)
        if self.config.ssd_dir is not None and self.io_alive:
            self._used.update(dict.fromkeys(used))

    @_locked
    def reserve(
        self, chunk: ChunkRange, sizes: Mapping[StateType, int], *, is_again: bool = False
    ) -> ReservedSave | Failure:
        """Reserve DRAM slots for a chunk's artifacts: all or none.

        A failure is counted. `is_again`: it was when this was tried before, in an earlier step.
        ValueError for a type that is sealed or reserved already.
        """
        if set(self.missing(chunk, list(sizes))) != set(sizes) or not sizes:
            raise ValueError(f"nothing to save, or already saved: {list(sizes)} of {chunk}")
        if not self.tiers.index.has_place_for(chunk):
            if not is_again:
                self.loads.count_failure(Failure.GONE, Tier.DRAM)
            return Failure.GONE
        # The artifacts enter the index first: that keeps their parents.
        artifacts = [self.tiers.index.add(chunk, kind, size) for kind, size in sizes.items()]
        for artifact in artifacts:
            artifact.pins = 1
        for artifact in artifacts:
            ref = self.tiers.take_dram(artifact)
            if ref is None:
                if not is_again:
                    self.loads.count_failure(Failure.NO_SLOT, Tier.DRAM)
                self._undo(artifacts)
                return Failure.NO_SLOT
            self.tiers.attach(artifact, ref)
        offsets = {a.state_type: a.dram_offset for a in artifacts}
        return ReservedSave(chunk, offsets, dict(sizes), artifacts)

    @_locked
    def seal(self, save: Save) -> None:
        """Make a save's artifacts visible, and queue their writes."""
        now, due_s = self._tick(), self.clock() + self.config.spill_delay_s
        was_idle = self.writes.next_due_s == math.inf
        for artifact in _end_save(save):
            if not artifact.forgotten:
                artifact.last_used = now
                self.tiers.index.seal(artifact)
                self.regrets.on_saved(artifact)
                self._recorder.add(
                    "heterocache_saved_bytes",
                    artifact.size_bytes,
                    state_type=artifact.state_type.value,
                )
                if self.writes.is_active:
                    self.writes.queue(artifact, due_s)
            self.tiers.unpin(artifact)
        if was_idle and self.writes.next_due_s < math.inf:
            self._lock.notify_all()
        self._refresh_gauges()

    @_locked
    def abandon(self, save: Save) -> None:
        """Free a save's slots; nothing becomes visible."""
        self._undo(_end_save(save))

    @_locked
    def forget_all(self, generation: Generation) -> None:
        """Forget every artifact. What is stored from now belongs to `generation`."""
        self.generation = generation
        self.on_generation(generation)
        loads = list(self.loads.by_artifact.values())
        for load in loads:
            self.loads.disown(load, Failure.GONE)
        self.tiers.clear()
        for load in loads:
            self.loads.withdraw(load)
        self.replicas.clear()
        self.users.clear()
        self.retention.clear()
        self.prefetcher.clear()
        self._lock.notify_all()

    # --- block events -----------------------------------------------------------------------------

    @_locked
    def take_changed(self, limit: int) -> list[ChunkKey]:
        """Return chunks that have changed; see `ArtifactStore.take_changed`."""
        changed = self.tiers.index.changed or OrderedDict()
        return [changed.popitem(last=False)[0] for _ in range(min(limit, len(changed)))]

    @_locked
    def copies_of(self, chunks: Iterable[ChunkKey]) -> list[ChunkCopies | None]:
        """Return the copies of each chunk; see `ArtifactStore.copies_of`."""
        nodes = map(self.tiers.index.nodes.get, chunks)
        return [None if node is None else sealed_copies(node) for node in nodes]

    # --- sessions ---------------------------------------------------------------------------------

    @_locked
    def expect(self, expected: ExpectedReturn) -> None:
        """Expect a session; see `ArtifactStore.expect`."""
        if self.config.ssd_dir is not None and self.io_alive:
            self.prefetcher.schedule.expect(expected)
            if self.prefetcher.schedule.next_s >= expected.start_s:  # the I/O thread sleeps longer
                self._lock.notify_all()

    @_locked
    def session_returned(self, session: Hashable) -> None:
        """See `ArtifactStore.session_returned`."""
        if self.config.ssd_dir is not None and self.io_alive:
            self.prefetcher.session_returned(session)

    @_locked
    def demote(self, chunks: Sequence[StoredChunk]) -> None:
        """Let chunks leave first, at once; see `ArtifactStore.decline`."""
        self.tiers.demote(chunks)

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        """Have the I/O thread demote chunks later. Needs no lock."""
        self.prefetcher.declined.append(chunks)

    # --- the fleet's thread -----------------------------------------------------------------------

    @_locked
    def set_joined(self, *, is_joined: bool) -> None:
        """Say whether the fleet answers claims; peers are shown the generation anew."""
        self.writes.claims.joined = is_joined
        self.on_generation(self.generation)

    # --- the I/O thread: loads --------------------------------------------------------------------

    @property
    def serves_loads(self) -> bool:
        """Return whether the I/O thread neither ended nor hangs in the kernel. Needs no lock."""
        return self.io_alive and self.clock() - self.step_began_s < self.config.load_deadline_s

    @property
    def has_loads(self) -> bool:
        """Return whether a load waits for its device. Needs no lock."""
        return self.loads.any_queued

    def next_loads(self, source: Source, limit_bytes: int) -> list[Load]:
        """Take the next loads of a source; see `Loads.take`. Takes the lock if there are any."""
        if not self.loads.num_queued(source):
            return []
        with self._lock:
            if source is Source.SSD and not self.ssd_readable:
                self.loads.fail_all(source, Failure.IO_ERROR)
            return self.loads.take(source, limit_bytes)

    @_locked
    def finish_load(self, load: Load, failure: Failure | None, *, is_lost: bool = False) -> None:
        """End a load. `failure` is None if the verified bytes are in its target.

        `is_lost`: its own SSD copy cannot be read any more.
        """
        artifact = load.artifact
        if load.source is Source.SSD:
            self.loads.finish_read(load, failure, is_lost=is_lost)
        elif load.source is Source.DRAM:
            self.loads.finish_check(load, failure)
        elif self.loads.finish_fetch(load, failure):
            if load.source is Source.PEER:
                self.replicas.add(artifact)
                return
            self._recorder.add(
                "heterocache_adopted_bytes",
                artifact.size_bytes,
                state_type=artifact.state_type.value,
            )
            self.writes.offer(artifact)

    def on_ssd_read(self, size_bytes: int, began_s: float) -> None:
        """Learn from a batch that was read from SSD. Needs no lock."""
        now_s = self.clock()
        self._recorder.observe("heterocache_ssd_read_seconds", now_s - began_s)
        self.loads.read_pace.add_batch(size_bytes, began_s, now_s)

    @_locked
    def give_up_load(self, load: Load) -> None:
        """Fail a load at its deadline; its slots stay protected until `finish_load`."""
        self.loads.give_up(load)

    def take_sample(self) -> Artifact | None:
        """Return an artifact in DRAM to be checked, pinned until `finish_sample`.

        Takes the lock if there is one.
        """
        if not self.samples:
            return None
        with self._lock:
            while (artifact := self.samples.take()) is not None:
                if not artifact.forgotten and artifact.dram is not None and artifact.checksum:
                    artifact.pins += 1
                    return artifact
        return None

    @_locked
    def finish_sample(self, artifact: Artifact, *, is_intact: bool) -> None:
        """End a check of bytes that were served from DRAM."""
        if not is_intact:
            self.loads.lose_from_dram(artifact, Failure.CHECKSUM)
        self.tiers.unpin(artifact)

    def next_prefetch(self, *, may_start: bool) -> tuple[bool, list[Load]]:
        """Look after staged sessions and, if `may_start`, begin reads for the next one.

        Returns whether anything changed, and the reads. Takes the lock if there is anything to do,
        but not while it searches a chain.
        """
        prefetcher = self.prefetcher
        if not prefetcher.is_due:
            return False, []
        with self._lock:
            moved = prefetcher.tend()
            if not (may_start or prefetcher.is_ending):
                return moved, []
            if prefetcher.has_job:
                return True, prefetcher.advance()
            expected = prefetcher.take_due()
        if expected is None:
            return moved, []
        prefetcher.start(prefetcher.open(expected))
        return True, []

    # --- the scrubber's thread --------------------------------------------------------------------

    @_locked
    def begin_scrub(self, chunk: ChunkKey) -> list[ScrubbedCopy]:
        """Return the copies of a chunk's artifacts, kept in place until `finish_scrub`."""
        return scrubbing.begin(self.tiers, chunk)

    @_locked
    def finish_scrub(self, copy: ScrubbedCopy, failure: Failure | None) -> bool:
        """End the check of a copy; return whether it was damaged, and is forgotten."""
        return scrubbing.finish(self.tiers, self.loads, copy, failure)

    # --- the I/O thread: checksums and writes -----------------------------------------------------

    def next_sums(self, *, reading: bool) -> list[Artifact]:
        """Return sealed artifacts without a checksum, pinned until `finish_sums`.

        Takes the lock if there are any.
        """
        if not self.writes.num_unsummed:
            return []
        with self._lock:
            return self.writes.take_unsummed(reading=reading)

    @_locked
    def finish_sums(self, artifacts: Sequence[Artifact], checksums: Sequence[bytes]) -> None:
        """Note checksums; peers may read the artifacts from now."""
        self.writes.finish_sums(artifacts, checksums)

    def has_overdue_write(self) -> bool:
        """Return whether the next write has waited for reads for long enough.

        Takes the lock only if a write waits.
        """
        if not len(self.writes):
            return False
        with self._lock:
            return self.writes.waits_too_long

    def admit_writes(self) -> list[Write]:
        """Return the next writes, which begin once the journal allows it; see `Writes.admit`.

        Takes the lock if anything waits for its write or for `flush`.
        """
        writes = self.writes
        if not (len(writes) or len(writes.claims) or writes.flushing):
            return []
        with self._lock:
            admitted = writes.admit()
            if not admitted:
                self._lock.notify_all()  # for `flush`
            return admitted

    @_locked
    def begin_writes(self, admitted: Sequence[Write]) -> list[Write]:
        """Return what is still to be written, and protect its slots; see `Writes.begin`."""
        return self.writes.begin(admitted)

    @_locked
    def put_off_writes(self, admitted: Sequence[Write]) -> None:
        """Queue admitted artifacts again, for a moment later."""
        self.writes.put_off(admitted)
        self._lock.notify_all()

    @_locked
    def give_up_writes(self, writes: Sequence[Write]) -> None:
        """Treat writes that do not end as if they had not begun."""
        self.writes.give_up(writes)
        self._lock.notify_all()

    @_locked
    def release_write_sources(self, writes: Sequence[Write]) -> None:
        """Note that the device has read the DRAM slots of these writes."""
        self.writes.release_sources(writes)

    @_locked
    def finish_writes(
        self, writes: Sequence[Write], *, is_stored: bool, is_late: bool, may_be_bad: bool = False
    ) -> None:
        """End writes; see `Writes.finish`."""
        self.writes.finish(writes, is_stored=is_stored, is_late=is_late, may_be_bad=may_be_bad)
        self._lock.notify_all()

    def queue_used_writes(self) -> None:
        """Queue what restores used and only DRAM has: it is worth more than when it was refused.

        Takes the lock if there is a budget, for one batch at a time.
        """
        if self.writes.admission.budget is not None:
            with self._lock:
                used = list(self._used)
            self._offer_all(unwritten_of(used))

    @_locked
    def pause_writing(self, again_s: float) -> None:
        """Write nothing until then by the clock; infinite: until `resume_writing`."""
        self.write_again_s = again_s
        self.writes.stop()
        self._lock.notify_all()

    def resume_writing(self) -> None:
        """Write again. What was sealed meanwhile is queued: chunks below depend on it.

        Searches the index without the lock, and takes it for one batch at a time.
        """
        with self._lock:
            self.write_again_s = math.inf
            self.writes.is_resuming = self.writes.is_writable = True
        self._offer_all(self.writes.unwritten())
        with self._lock:
            self.writes.is_resuming = False
            self._lock.notify_all()

    def set_write_budget(self, budget: WriteBudget) -> None:
        """Limit what is written. Call it before the I/O thread starts."""
        self.writes.admission.budget = budget

    # --- the I/O thread: the journal --------------------------------------------------------------

    @property
    def has_rows_to_forget(self) -> bool:
        """Return whether the journal still lists what was forgotten. Needs no lock."""
        tiers = self.tiers
        return bool(tiers.forgotten) or tiers.journal_stale or self._is_forgetting_rows

    @_locked
    def wait_rows_gone(self, deadline_s: float) -> bool:
        """Wait until no row of what was forgotten is in the journal or to come; False if not."""

        def are_gone() -> bool:
            return not (self.has_rows_to_forget or self.writes.may_list_forgotten)

        return self._lock.wait_for(are_gone, timeout=deadline_s)

    @_locked
    def take_rows_to_forget(self) -> RowsToForget:
        """Return the journal rows to delete, to be handed to `finish_rows`."""
        tiers = self.tiers
        gone, tiers.forgotten = tiers.forgotten, []
        is_stale, tiers.journal_stale = tiers.journal_stale, False
        self._is_forgetting_rows = True
        return RowsToForget(gone, self.generation.tag if is_stale else None)

    @_locked
    def finish_rows(self, rows: RowsToForget, *, are_gone: bool) -> None:
        """Go on with writing, or take the rows back to be deleted later."""
        self._is_forgetting_rows = False
        if are_gone:
            self._lock.notify_all()
        else:
            self.tiers.forgotten[:0] = rows.ids
            self.tiers.journal_stale |= rows.cleared_for is not None

    def take_used(self) -> list[tuple[ArtifactId, int]]:
        """Return (artifact, uses) of what restores used since the last call, least recent first.

        Nothing while the SSD is not written to. Sorts without the lock.
        """
        with self._lock:
            used, self._used = self._used, {}
        stored = sorted((a for a in used if a.ssd), key=lambda a: a.last_used)
        return [(a.id, a.uses) for a in stored] if self.writes.is_writable else []

    # --- the I/O thread itself --------------------------------------------------------------------

    def expire(self) -> bool:
        """End some of what has a time that is over; return whether more is due.

        Takes the lock for each part of it that is due.
        """
        is_left = False
        if self.replicas.look_s <= self.clock():
            with self._lock:
                is_left = self.replicas.expire()
        return self.retention.expire_due() or is_left

    @_locked
    def wait(self, timeout_s: float, rows_due: Callable[[], float]) -> None:
        """Sleep until there is something to do, at most `timeout_s`.

        `rows_due`: when journal rows can be deleted again; writes wait for that. Infinite if
        there are none. Called with the lock held.
        """
        self._refresh_gauges()
        if self.has_loads or self.closing:
            return
        due_s = rows_due_s = rows_due()
        if self.ssd_readable:
            due_s = min(due_s, self.prefetcher.wake_s)
        if rows_due_s == math.inf or not self.writes.is_writable:
            due_s = min(due_s, self.writes.next_due_s)
        timeout_s = min(timeout_s, due_s - self.clock())
        if timeout_s > 0:
            self._lock.wait(timeout_s)

    @_locked
    def begin_close(self) -> None:
        """Fail every restore; the I/O thread ends once its transfers have."""
        self.closing = True
        self.loads.disown_all(Failure.CLOSED)
        self._lock.notify_all()

    @_locked
    def on_io_death(self) -> None:
        """Go on with DRAM alone: the I/O thread has ended by a bug."""
        self.io_alive = self.ssd_readable = False
        self.writes.end()
        self.loads.count_failure(Failure.IO_ERROR, Tier.SSD)
        self.loads.disown_all(Failure.IO_ERROR)
        self.publish_health()
        self._lock.notify_all()

    # --- the whole store --------------------------------------------------------------------------

    @_locked
    def flush(self, deadline_s: float) -> bool:
        """Write everything that is queued; False if `deadline_s` seconds passed before."""
        self.writes.flushing = True
        self._lock.notify_all()
        if self.write_again_s < math.inf:
            self.write_again_s = 0.0  # a pause ends early: one more attempt decides
        self._lock.wait_for(
            lambda: self.writes.is_drained or not self._may_write, timeout=deadline_s
        )
        self.writes.flushing = False
        return self.writes.is_drained

    @_locked
    def leave_to_ssd(self) -> None:
        """Drop every DRAM copy that is on SSD too and not pinned: to measure the SSD."""
        self.tiers.leave_to_ssd()

    @_locked
    def publish_gauges(self) -> None:
        """Write occupancy and health into the recorder now."""
        self.tiers.publish_gauges()
        self.publish_health()

    @_locked
    def check_integrity(self) -> None:
        """Raise AssertionError if index, slots and accounts disagree."""
        self.tiers.check_integrity()

    @_locked
    def occupancy(self) -> list[Occupancy]:
        """Return the contents of each tier."""
        return self.tiers.occupancy()

    def health(self) -> Health:
        """Return what works. Takes no lock."""
        if self.config.ssd_dir is None:
            return Health(self.serves_loads)
        ssd = self.writes.is_writable, self.ssd_readable, self.late_bytes
        return Health(self.serves_loads, *ssd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, for what must look at or change several parts at one moment."""
        with self._lock:
            yield

    # --- private ----------------------------------------------------------------------------------

    @property
    def _may_write(self) -> bool:
        """Return whether the SSD is written to, or will be tried again at once."""
        is_due = self.write_again_s <= self.clock()
        return self.io_alive and (self.writes.is_writable or is_due)

    def _tick(self) -> int:
        """Advance the logical clock, and note its time."""
        tick = self.tiers.tick()
        self.tick_times.note(tick, self.clock())
        return tick

    def _offer_all(self, unwritten: Sequence[Artifact]) -> None:
        """Queue what is to be written, parents first; takes the lock for one batch at a time."""
        for first in range(0, len(unwritten), _OFFERED_AT_ONCE):
            with self._lock:
                self.writes.offer_all(unwritten[first : first + _OFFERED_AT_ONCE])

    def _undo(self, artifacts: Iterable[Artifact]) -> None:
        """Forget artifacts that are not sealed."""
        for artifact in artifacts:
            if not artifact.forgotten:
                self.tiers.forget(artifact)
            self.tiers.unpin(artifact)

    def _on_forgotten(self, artifact: Artifact) -> None:
        self.retention.on_forgotten(artifact.node)
        self.writes.discard(artifact)
        self._used.pop(artifact, None)

    def _refresh_gauges(self) -> None:
        """Publish gauges, at most once a second."""
        now_s = self.clock()
        if now_s >= self._gauges_due_s:
            self._gauges_due_s = now_s + GAUGE_INTERVAL_S
            self.publish_gauges()

    def publish_health(self) -> None:
        """Write what works into the recorder now. Takes no lock of the catalog."""
        io_alive, ssd_writable, ssd_readable, quarantined_bytes = self.health()
        self._recorder.set("heterocache_io_alive", float(io_alive))
        if self.config.ssd_dir is not None:
            self._recorder.set("heterocache_ssd_writable", float(ssd_writable))
            self._recorder.set("heterocache_ssd_readable", float(ssd_readable))
            self._recorder.set("heterocache_ssd_quarantined_bytes", quarantined_bytes)


def _end_save(save: Save) -> list[Artifact]:
    """End a running save and return its artifacts. ValueError if it has ended before."""
    assert isinstance(save, ReservedSave), "a save that this catalog did not begin"
    if not save.artifacts:
        raise ValueError(f"the save of {save.chunk} has ended before")
    artifacts = list(save.artifacts)
    save.artifacts.clear()
    return artifacts
