"""Prefetch: staging a session's chain in DRAM shortly before the session is due back.

Only while no restore has anything queued or under way. One small batch of reads is in flight at a
time, and only that protects slots: a restore that comes meanwhile reads the rest itself and shares
what is under way, so nothing is read twice and a restore waits for that batch at most.

A slot is taken from the next victim of eviction, and only if the expected gain is larger, see
`PrefetchWorth`. A staged artifact is as evictable as one that was just used. When its session is
not expected any more it leaves first.

A private part of `Catalog`, which holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.base import Failure, StoreConfig, Wanted
from hetero_connector.store.catalog.loads import Load, Loads, Source
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.pins import ChainPin
from hetero_connector.store.catalog.prefetch_schedule import (
    BATCH_BYTES,
    ExpectedReturn,
    PrefetchCosts,
    PrefetchSchedule,
    PrefetchWorth,
)
from hetero_connector.store.catalog.tick_times import TickTimes
from hetero_connector.store.catalog.tiers import Tiers

_MAX_LOOKED_AT = 256
"""Artifacts looked at in one call."""
_MAX_DEMOTED = 64
"""Declined chunks that are demoted in one call."""
_MAX_STAGED = 256
"""Staged sessions; beyond, those whose state was used or evicted are forgotten."""
_MAX_RETURNED = 4096


@dataclass
class _Job:
    """One session's chain, being staged or waiting for the session."""

    prefetcher: Prefetcher
    expected: ExpectedReturn
    expires_s: float
    artifacts: deque[Artifact]
    """Not looked at yet, in chain order."""
    pin: ChainPin
    """Over the whole chain: its own state makes no room for it."""
    worth_s: Mapping[StateType, float]
    """Seconds that a restore saves by an artifact of the type, on average over the chain: it
    waits for the short end as for any other."""
    num_loading: int = 0
    """Reads that have begun and not ended: what they bring is still to expire."""
    staged: list[Artifact] = field(default_factory=list)
    outcome: str | None = None
    """Why the rest is not staged; None while it goes on."""

    def on_loaded(self, artifact: Artifact, failure: Failure | None) -> None:
        """See `loads.Waiter`."""
        self.num_loading -= 1
        if failure is not None:
            self.outcome = "failed"
            return
        self.prefetcher.on_staged(artifact, self.expected)
        self.staged.append(artifact)


class Prefetcher:
    """Stages the sessions that the schedule says are due, one after the other."""

    def __init__(
        self,
        tiers: Tiers,
        loads: Loads,
        tick_times: TickTimes,
        config: StoreConfig,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self.schedule = PrefetchSchedule()
        self.declined: deque[Sequence[StoredChunk]] = deque(maxlen=64)
        """Runs of chunks that the planner did not load; to be demoted. Needs no lock."""
        self.peers_may_fill = False
        """True if missing ranges of a chain can be read from peers."""
        self.tick: Callable[[], int] = tiers.tick
        self._tiers = tiers
        self._loads = loads
        self._tick_times = tick_times
        self._load_deadline_s = config.load_deadline_s
        self._recorder = recorder
        self._clock = clock
        self._worth = PrefetchWorth(PrefetchCosts(), tiers.seconds_saved)
        types = tiers.dram.geometry.stride_bytes
        self._prefix_types = [t for t in types if t.family is Family.PREFIX]
        self._boundary_types = [t for t in types if t.family is Family.BOUNDARY]
        self._returned: set[Hashable] = set()
        """Sessions that returned since the last step."""
        self._job: _Job | None = None
        self._waiting: list[_Job] = []
        """Jobs that are done and whose sessions are still expected."""

    def set_costs(self, costs: PrefetchCosts) -> None:
        """Use an engine's figures in place of the defaults."""
        self._worth = PrefetchWorth(costs, self._tiers.seconds_saved)

    @property
    def is_due(self) -> bool:
        """Return whether there is anything to do now. The I/O thread needs no lock for it."""
        if self.declined or self._returned or self._job is not None:
            return True
        return self.wake_s <= self._clock()

    @property
    def wake_s(self) -> float:
        """Clock time of the next thing to do."""
        expiries = (job.expires_s for job in self._waiting if not job.num_loading)
        return min(self.schedule.next_s, *expiries, float("inf"))

    def session_returned(self, session: Hashable) -> None:
        """Expect the session no longer: its restore reads the rest, and uses what is staged."""
        self.schedule.cancel(session)
        if len(self._returned) < _MAX_RETURNED:
            self._returned.add(session)

    def cancel_where(self, is_meant: Callable[[Hashable, bytes], bool]) -> None:
        """Expect those no longer whose session and tenant are meant; let staged state leave."""
        self.schedule.cancel_where(is_meant)
        for job in self._jobs():
            if is_meant(job.expected.session, job.expected.tenant):
                job.expires_s = self._clock()

    def clear(self) -> None:
        """Expect no session: everything stored was forgotten."""
        self.schedule.clear()
        self.declined.clear()

    def tend(self) -> bool:
        """Look after declined and staged state; return whether anything changed."""
        has_demoted = self._demote_declined()
        now_s = self._clock()
        self._end_returned(now_s)
        self._expire(now_s)
        return has_demoted

    @property
    def has_job(self) -> bool:
        """Return whether a session is being staged."""
        return self._job is not None

    @property
    def is_ending(self) -> bool:
        """Return whether the present job only has to be closed."""
        return self._job is not None and self._job.outcome is not None

    def take_due(self) -> ExpectedReturn | None:
        """Return the next session that is due, if none is being staged."""
        return self.schedule.take_due(self._clock()) if self._job is None else None

    def open(self, expected: ExpectedReturn) -> _Job | None:
        """Find the session's chain, from the deepest leaf that is stored. Needs no lock."""
        nodes = self._tiers.index.nodes
        leaf = next(filter(None, map(nodes.get, expected.leaves)), None)
        if leaf is None:
            self._count("gone")
            return None
        path = _path_to(leaf, self.peers_may_fill)
        boundary = next((n for n in reversed(path) if self._has_boundary(n)), None)
        if boundary is not None:
            path = path[: path.index(boundary) + 1]
        artifacts = deque(_present(path, self._prefix_types))
        if boundary is not None:
            artifacts.extend(_present([boundary], self._boundary_types))
        worth_s = self._worth_by_type(artifacts)
        pin = _pin_of(artifacts)
        return _Job(self, expected, expected.latest_s, artifacts, pin, worth_s)

    def start(self, job: _Job | None) -> None:
        """Stage what `open` found."""
        self._job = job

    def advance(self) -> list[Load]:
        """Begin the next reads of the present job, or end it."""
        job = self._job
        assert job is not None
        if job.outcome is None and self._clock() >= job.expires_s:
            job.outcome = "late"
        loads = self._next_batch(job) if job.outcome is None else []
        if not loads and (job.outcome is not None or not job.artifacts):
            self._close(job)
        return loads

    def on_staged(self, artifact: Artifact, expected: ExpectedReturn) -> None:
        """Note an artifact that arrived: as recent as if used, but not counted as a use."""
        artifact.last_used = self.tick()
        self._tiers.prefetched.add(artifact, expected)

    def _worth_by_type(self, artifacts: Iterable[Artifact]) -> dict[StateType, float]:
        at_stake_s: dict[StateType, list[float]] = {}
        for artifact in artifacts:
            seconds = self._worth.at_stake_s(artifact)
            at_stake_s.setdefault(artifact.state_type, []).append(seconds)
        return {kind: fmean(seconds) for kind, seconds in at_stake_s.items()}

    def _has_boundary(self, node: Node) -> bool:
        return all(
            (found := node.artifacts.get(t)) is not None and found.sealed
            for t in self._boundary_types
        )

    def _next_batch(self, job: _Job) -> list[Load]:
        """Take slots for the next artifacts that are on SSD alone."""
        loads, size_bytes = list[Load](), 0
        self._tiers.pin_chain(job.pin)
        for _ in range(min(_MAX_LOOKED_AT, len(job.artifacts))):
            artifact = job.artifacts[0]
            if artifact.forgotten:
                job.outcome = "gone"
                break
            on_ssd_alone = artifact.ssd is not None and artifact.dram is None
            if on_ssd_alone and artifact not in self._loads.by_artifact:
                if loads and size_bytes + artifact.size_bytes > BATCH_BYTES:
                    break
                load = self._begin(job, artifact)
                if load is None:
                    job.outcome = "partly" if job.staged or loads else "refused"
                    break
                loads.append(load)
                size_bytes += artifact.size_bytes
            job.artifacts.popleft()
        self._tiers.unpin_chain(job.pin)
        return loads

    def _begin(self, job: _Job, artifact: Artifact) -> Load | None:
        """Begin a read into a slot of less worth; None if there is none.

        An ordered one takes the slot of whatever eviction gives it, as a restore does.
        """
        artifact.pins += 1
        gain_s = job.expected.probability * job.worth_s[artifact.state_type]
        within_s = job.expected.latest_s - self._clock()
        target = self._tiers.take_dram(
            artifact,
            None
            if job.expected.is_ordered
            else lambda victim: self._loss_s(victim, within_s) >= gain_s,
        )
        if target is None:
            self._tiers.unpin(artifact)
            return None
        load = self._loads.begin(artifact, Source.SSD, target)
        load.waiters.append(job)
        job.num_loading += 1
        self._loads.protect_slots(load)
        return load

    def _loss_s(self, victim: Artifact, within_s: float) -> float:
        """Return the seconds that are lost, on average, if the artifact leaves DRAM."""
        expected = self._tiers.prefetched.expected(victim)
        if expected is not None:
            return expected.probability * self._worth.at_stake_s(victim)
        idle_s = self._clock() - self._tick_times.time_s(victim.last_used)
        return self._worth.loss_s(victim, idle_s, within_s)

    def _close(self, job: _Job) -> None:
        """Stage nothing more for this session."""
        self._job = None
        job.artifacts.clear()
        if job.staged or job.num_loading:
            self._waiting.append(job)
        if len(self._waiting) > _MAX_STAGED:
            self._waiting = [j for j in self._waiting if self._is_awaited(j)]
        self._count(job.outcome or ("staged" if job.staged else "in_dram"))

    def _end_returned(self, now_s: float) -> None:
        """Leave the rest of returned sessions to their restores."""
        if not self._returned:
            return
        if self._job is not None and self._job.expected.session in self._returned:
            self._job.outcome = "early"
        for job in self._jobs():
            if job.expected.session in self._returned:
                # A restore counts as a use when it ends, which may be later than expected.
                job.expires_s = max(job.expires_s, now_s + self._load_deadline_s)
        self._returned.clear()

    def _expire(self, now_s: float) -> None:
        """Let staged state leave first whose session is not expected any more."""
        tiers = self._tiers
        for job in [j for j in self._waiting if j.expires_s <= now_s and not j.num_loading]:
            self._waiting.remove(job)
            for artifact in job.staged:
                if tiers.prefetched.expected(artifact) is job.expected:
                    tiers.prefetched.discard(artifact)
                    tiers.evict_first.add(artifact, Tier.DRAM)

    def _demote_declined(self) -> bool:
        """Let some of the declined chunks leave first from the tier they are in."""
        if not self.declined:
            return False
        chunks = self.declined.popleft()
        if len(chunks) > _MAX_DEMOTED:
            self.declined.appendleft(chunks[_MAX_DEMOTED:])
        self._tiers.demote(chunks[:_MAX_DEMOTED])
        return True

    def _is_awaited(self, job: _Job) -> bool:
        expected = self._tiers.prefetched.expected
        is_kept = any(expected(artifact) is job.expected for artifact in job.staged)
        return is_kept or job.num_loading > 0

    def _jobs(self) -> Iterator[_Job]:
        yield from self._waiting
        if self._job is not None:
            yield self._job

    def _count(self, outcome: str) -> None:
        self._recorder.add("heterocache_prefetches", outcome=outcome)


def _path_to(leaf: Node, peers_may_fill: bool) -> list[Node]:
    """Return the chunks from the first to `leaf`, or from after a range that peers may have."""
    path = []
    node: Node | None = leaf
    while node is not None and node.parent is not None and (node.artifacts or not peers_may_fill):
        path.append(node)
        node = node.parent
    return path[::-1]


def _present(path: Sequence[Node], state_types: Sequence[StateType]) -> Iterator[Artifact]:
    """Yield sealed artifacts in chain order, up to the first chunk that lacks one."""
    for node in path:
        found = [node.artifacts.get(t) for t in state_types]
        artifacts = [a for a in found if a is not None and a.sealed]
        if len(artifacts) < len(state_types):
            return
        yield from artifacts


def _pin_of(artifacts: Sequence[Artifact]) -> ChainPin:
    columns: dict[StateType, list[StoredChunk]] = {}
    for artifact in artifacts:
        stored = artifact.node.stored
        if stored is not None:
            columns.setdefault(artifact.state_type, []).append(stored)
    return ChainPin([Wanted(kind, chunks) for kind, chunks in columns.items()])
