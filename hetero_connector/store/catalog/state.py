"""What the scheduler's thread and the I/O thread share: tiers, queues, and the lock over them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from random import Random

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ChunkKey, SlotRef, StoredChunk, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, ReadTiming, StoreConfig
from hetero_connector.store.catalog.artifact_queue import ArtifactQueue
from hetero_connector.store.catalog.chain_users import Readers
from hetero_connector.store.catalog.hit_samples import ONE_IN, HitSamples
from hetero_connector.store.catalog.jobs import Load, Spill
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.pending_claims import Unjudged
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, PrefetchSchedule
from hetero_connector.store.catalog.replicas import Replicas
from hetero_connector.store.catalog.tick_times import Moments
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.ssd.generation_file import GenerationKeeper
from hetero_connector.store.ssd.read_pace import ReadPace

GAUGE_INTERVAL_S = 1.0
_MAX_BACK = 4096
"""Sessions that came back and that the I/O thread has not seen; others are not told apart."""


class StoreState:
    """Guarded by `lock` (a condition that wakes the I/O thread); never held during I/O."""

    def __init__(
        self,
        tiers: Tiers,
        config: StoreConfig,
        recorder: Recorder,
        clock: Callable[[], float],
        generations: GenerationKeeper | None = None,
    ) -> None:
        self.lock = threading.Condition()
        self.tiers = tiers
        self.generations = generations or GenerationKeeper()
        self.generation = self.generations.latest
        """What is stored is of this one."""
        self.show_generation: Callable[[], None] = lambda: None
        """Tells peers of another one, if there are any. Called with the lock held."""
        self.config = config
        self.recorder = recorder
        self.clock = clock
        self.loads = ArtifactQueue[Load]()
        """Not yet taken by the I/O thread, oldest first."""
        self.loading: dict[Artifact, Load] = {}
        """Every load that is not settled."""
        self.peer_loads = ArtifactQueue[Load]()
        """The same for what comes from peers."""
        self.orphan_loads = ArtifactQueue[Load]()
        """The same for what dead engines left on SSDs that this one can read."""
        self.reading_bytes = dict.fromkeys((Tier.SSD, Tier.PEER), 0)
        """Of the loads that somebody waits for and that have to be read."""
        self.unsummed = ArtifactQueue[Spill]()
        """Sealed artifacts that wait for their checksum; all of them are in `spills`, too."""
        self.spills = ArtifactQueue[Spill]()
        """Sealed artifacts that wait for their write, parents first."""
        self.spilling = 0
        """Artifacts the I/O thread is writing."""
        self.unjudged = Unjudged(clock, self.offer)
        """Artifacts whose write waits for the fleet's word."""
        self.returns = PrefetchSchedule()
        """Sessions expected back."""
        self.back: set[Hashable] = set()
        """Sessions that came back since the I/O thread last looked."""
        self.declined: deque[Sequence[StoredChunk]] = deque(maxlen=64)
        """Runs of chunks that the planner left alone: to be demoted."""
        tiers.on_forgotten = self._forgotten
        self.moments = Moments(clock())
        self.replicas = Replicas(config.replica_ttl_s, clock, self.moments, tiers.demoted, recorder)
        """What other workers own."""
        self.readers = Readers(clock, tiers.unread)
        """Whose chains leave last."""
        self.used: dict[Artifact, None] = {}
        """What released restores had pinned, for the journal's recency."""
        self.samples = HitSamples(ONE_IN, Random())
        """What was served from DRAM and is to be checked."""
        self.timings: deque[ReadTiming] = deque(maxlen=256)
        """Appended by both threads, taken by the scheduler's; needs no lock."""
        self._given_up_s: dict[Tier, float] = {}
        """By tier, when the last timing of reads that were given up was appended."""
        self.flushing = False
        """Spills are due at once."""
        self.closing = False
        self.reads_peers = False
        """Whether peer loads will be served."""
        self.io_alive = True
        """True if the I/O thread has not ended."""
        self.step_began_s = math.inf
        """When the I/O thread's present step began; infinite between steps."""
        self.ssd_writable = config.ssd_dir is not None
        self.write_again_s = math.inf
        """When a pause of writing ends; infinite without one, and where nobody can say."""
        self.ssd_readable = True
        """True if reads from SSD are begun."""
        self.read_pace = ReadPace(config.load_deadline_s)
        """Of the SSD."""
        self.late_bytes = 0
        """Of SSD reads that were given up: DRAM that they may still fill."""
        self._gauges_due_s = 0.0

    @property
    def wants_spills(self) -> bool:
        """Whether the I/O thread has anything to do with a newly sealed artifact."""
        return self.ssd_writable or (self.wants_checksums and self.io_alive)

    def forget_all(self, generation: Generation) -> None:
        """Forget every artifact: those to come are of `generation`. Takes the lock."""
        with self.lock:
            self.generation = generation
            self.show_generation()
            for load in list(self.loading.values()):
                self.disown(load, Failure.GONE)
            self.tiers.clear()
            for load in list(self.loading.values()):
                self.withdraw(load)
            self.replicas.clear()
            self.readers.clear()
            self.returns.clear()
            self.declined.clear()
            self.lock.notify_all()

    @property
    def serves_loads(self) -> bool:
        """Whether the I/O thread looks after loads: it neither ended nor hangs in the kernel."""
        return self.io_alive and self.clock() - self.step_began_s < self.config.load_deadline_s

    @property
    def is_congested(self) -> bool:
        """Return whether what is queued for the SSD is all that it can read by the deadline."""
        return self.reading_bytes[Tier.SSD] > self.read_pace.most_bytes

    @property
    def has_loads(self) -> bool:
        """Whether any are queued. Needs no lock."""
        return bool(self.loads or self.peer_loads or self.orphan_loads)

    @property
    def drained(self) -> bool:
        """Return whether everything sealed is written that will be."""
        return self.ssd_writable and not (self.spills or self.spilling or self.unjudged)

    @property
    def may_write(self) -> bool:
        """Return whether the SSD is written to, or will be tried again at once."""
        return self.io_alive and (self.ssd_writable or self.write_again_s <= self.clock())

    @property
    def wants_checksums(self) -> bool:
        """Whether what is sealed is summed, although it is not written anywhere."""
        return self.config.verify == "all" or self.tiers.feed is not None

    def offer(self, artifact: Artifact) -> None:
        """Have it written to SSD, unless there is a reason not to; needs the lock."""
        if self.wants_spills:
            self.queue_write(artifact, self.clock())

    def queue_write(self, artifact: Artifact, due_s: float) -> None:
        """Have a sealed artifact summed, and written, from `due_s` on; needs the lock."""
        spill = Spill(artifact, due_s)
        self.spills.append(artifact, spill)
        if artifact.checksum is None:
            self.unsummed.append(artifact, spill)

    def stop_writing(self) -> None:
        """Nothing that is queued will be written; needs the lock."""
        self.unjudged.clear()
        if not self.wants_spills:
            self.spills.clear()
            self.unsummed.clear()

    def _forgotten(self, artifact: Artifact) -> None:
        """Nothing waits for an artifact that is gone."""
        self.spills.discard(artifact)
        self.unsummed.discard(artifact)
        self.unjudged.is_not_ours(artifact)
        self.used.pop(artifact, None)

    def tick(self) -> int:
        """The next moment of the logical clock, its time noted; needs the lock."""
        tick = self.tiers.tick()
        self.moments.note(tick, self.clock())
        return tick

    def expect(self, expected: ExpectedReturn) -> None:
        """A session is due; takes the lock."""
        if self.config.ssd_dir is None or not self.io_alive:
            return
        with self.lock:
            self.returns.expect(expected)
            if self.returns.next_s >= expected.start_s:  # the I/O thread sleeps longer
                self.lock.notify_all()

    def came_back(self, session: Hashable) -> None:
        """It is not expected any more; takes the lock."""
        if self.config.ssd_dir is None or not self.io_alive:
            return
        with self.lock:
            self.returns.cancel(session)
            if len(self.back) < _MAX_BACK:
                self.back.add(session)

    def reads(
        self,
        session: Hashable,
        leaves: Sequence[ChunkKey],
        until_s: float,
        tenant: bytes,
        *,
        expire: bool,
    ) -> None:
        """The session reads the deepest of these chunks that is here; takes the lock.

        `expire`: no I/O thread lets readers go whose time is over.
        """
        with self.lock:
            node = next(filter(None, map(self.tiers.index.nodes.get, leaves)), None)
            if expire:
                self.readers.expire(1)
            if node is None:
                self.readers.leaves(session)
            else:
                self.readers.reads(session, node, until_s, tenant)

    def begin(
        self, artifact: Artifact, target: SlotRef | None, copy: PeerCopy | None = None
    ) -> Load:
        """A load of an artifact that has been pinned for it; needs the lock."""
        load = self.loading[artifact] = Load(artifact, target, copy=copy)
        if target is not None:
            self.reading_bytes[load.tier] += artifact.size_bytes
            load.counts = True
        return load

    def fail(self, cause: Failure, tier: Tier, count: int = 1) -> None:
        """Count failures."""
        self.recorder.add("heterocache_failures", count, cause=cause.value, tier=tier.value)

    def learn_given_up(self, timing: ReadTiming, began_s: float) -> None:
        """Append one of a restore that began then, unless it is of a stall that is known already.

        A restore that began before another was given up waited for the same stall, and however
        many wait for it say no more than one. Needs the lock.
        """
        if began_s >= self._given_up_s.get(timing.tier, -math.inf):
            self._given_up_s[timing.tier] = self.clock()
            self.timings.append(timing)

    def count_read(self, tier: Tier, state_type: StateType, size_bytes: int) -> None:
        """Count bytes served from a tier."""
        self.recorder.add(
            "heterocache_read_bytes", size_bytes, tier=tier.value, state_type=state_type.value
        )

    def disown(self, load: Load, failure: Failure) -> None:
        """Tell those who wait that it failed, though its transfer goes on; needs the lock."""
        for waiting in load.waiting:
            waiting.arrived(load.artifact, failure)
        load.waiting.clear()
        self._uncount(load)

    def settle(self, load: Load, failure: Failure | None) -> None:
        """End a load, with the lock held: tell those who wait, and drop the load's pin."""
        artifact = load.artifact
        del self.loading[artifact]
        self._uncount(load)
        for waiting in load.waiting:
            waiting.arrived(artifact, failure)
        load.waiting.clear()
        self.tiers.unpin(artifact)

    def withdraw(self, load: Load) -> None:
        """End a load that nobody waits for, if it has not begun; needs the lock.

        Its slot is free at once, whatever the I/O thread is doing.
        """
        queues = (self.loads, self.peer_loads, self.orphan_loads)
        if load.waiting or not any(queue.discard(load.artifact) for queue in queues):
            return
        if load.copy is not None:
            assert load.target is not None
            self.tiers.dram.hold(load.target)
            self.settle_fetched(load, Failure.GONE)
            return
        if load.target is not None:
            self.tiers.dram.give_back(load.target)
        self.settle(load, Failure.GONE)

    def _uncount(self, load: Load) -> None:
        if load.counts:
            self.reading_bytes[load.tier] -= load.artifact.size_bytes
            load.counts = False

    def settle_fetched(self, load: Load, failure: Failure | None) -> bool:
        """End a load from another engine, with the lock held; whether its artifact is here now.

        Its target is held until then. `failure`: None if the bytes are in the target, verified.
        """
        artifact, copy, target, tiers = load.artifact, load.copy, load.target, self.tiers
        assert copy is not None
        assert target is not None
        tiers.dram.unhold(target)
        if artifact.forgotten:
            failure = failure or Failure.GONE
        if failure is None:
            artifact.checksum = copy.checksum
            artifact.last_used = tiers.tick()
            tiers.attach(artifact, target)
            tiers.index.seal(artifact)
            self.count_read(load.tier, artifact.state_type, artifact.size_bytes)
        else:
            tiers.dram.give_back(target)
            if not artifact.forgotten:
                tiers.forget(artifact)
                # Whoever gave up waiting for files has counted it; a bad peer is counted anyway.
                if load.waiting or not (load.adopts or failure is Failure.GONE):
                    self.fail(failure, load.tier)
        if all(other.sealed for other in artifact.node.artifacts.values()):
            tiers.forget_remains(artifact.node)  # nothing more of the chunk is on its way
        self.settle(load, failure)
        return not artifact.forgotten

    def refresh_gauges(self) -> None:
        """Publish occupancy, at most once a second; needs the lock."""
        now = self.clock()
        if now >= self._gauges_due_s:
            self._gauges_due_s = now + GAUGE_INTERVAL_S
            self.tiers.publish_gauges()
            self.publish_health()

    def publish_health(self) -> None:
        """Publish what works."""
        self.recorder.set("heterocache_io_alive", float(self.serves_loads))
        if self.config.ssd_dir is not None:
            self.recorder.set("heterocache_ssd_writable", float(self.ssd_writable))
            self.recorder.set("heterocache_ssd_readable", float(self.ssd_readable))
            self.recorder.set("heterocache_ssd_quarantined_bytes", self.late_bytes)
