"""Bringing a session's state from SSD to DRAM shortly before the session is due back.

Runs on the I/O thread, and only while no restore has anything queued or under way. One
small batch is in flight at a time, and only that holds slots: what a restore wants
meanwhile is read by the restore, what is under way is shared with it, so nothing is read
twice and a restore never waits for more than that batch.

A slot is taken from what eviction would drop next, and only if the expected gain is
larger (`prefetch_weighing`). Once staged an artifact is as evictable as one just used.
When its session is not expected any more it is the first to leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.catalog.hold import Hold
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.prefetch.weighing import BATCH_BYTES as _BATCH_BYTES
from hetero_connector.store.prefetch.weighing import PrefetchCosts, Weighing
from hetero_connector.store.ssd.reader import HeldRead, Reader

_MAX_LOOKED_AT = 256
"""Artifacts looked at in one go, with the lock held."""
_MAX_DEMOTED = 64
"""The same for chunks that the planner left alone."""
_MAX_STAGED = 256
"""Sessions waited for, from which on those whose state is used or evicted are forgotten."""


@dataclass
class _Job:
    """One session's chain, being staged or waiting for the session."""

    state: StoreState
    expected: ExpectedReturn
    expires_s: float
    artifacts: deque[Artifact]
    """Not looked at yet, in chain order."""
    hold: Hold
    """Over the whole chain: its own state makes no room for it."""
    worth_s: Mapping[StateType, float]
    """What a restore saves by an artifact of the type, on average over the chain: it waits for
    the short end as for any other."""
    staged: list[Artifact] = field(default_factory=list)
    ended: str | None = None
    """Why the rest is left, if it is."""

    def arrived(self, artifact: Artifact, failure: Failure | None) -> None:
        """See `state.Waiting`. As recent as if it had been used, but not counted as a use."""
        if failure is not None:
            self.ended = "failed"
            return
        artifact.last_used = self.state.tick()
        self.state.tiers.prefetched.add(artifact, self.expected)
        self.staged.append(artifact)


class Prefetcher:
    """Stages what `StoreState.returns` says is due, one session after the other."""

    def __init__(self, state: StoreState, reader: Reader, costs: PrefetchCosts) -> None:
        self._state = state
        self._reader = reader
        self._weighing = Weighing(costs, lambda artifact: state.tiers.seconds_saved(artifact))
        types = state.tiers.dram.geometry.stride_bytes
        self._prefix_types = [t for t in types if t.family is Family.PREFIX]
        self._boundary_types = [t for t in types if t.family is Family.BOUNDARY]
        self._job: _Job | None = None
        self._staged: list[_Job] = []
        """Jobs done whose sessions are still expected."""

    @property
    def wake_s(self) -> float:
        """Clock time of the next thing to do; needs the lock."""
        expiries = (job.expires_s for job in self._staged)
        return min(self._state.returns.next_s, *expiries, float("inf"))

    def step(self, may_start: bool) -> bool:
        """Look after what is staged and, if `may_start`, stage more; True if anything moved."""
        state = self._state
        with state.lock:
            now_s = state.clock()
            moved = self._demote_declined()
            self._welcome(now_s)
            self._expire(now_s)
            if not (may_start or (self._job is not None and self._job.ended)):
                return moved
            expected = state.returns.take_due(now_s) if self._job is None else None
        if self._job is not None:
            self._advance(self._job)
        elif expected is not None:
            self._job = self._open(expected)
        else:
            return moved
        return True

    def _advance(self, job: _Job) -> None:
        """Start the next batch, or be done."""
        with self._state.lock:
            if job.ended is None and self._state.clock() >= job.expires_s:
                job.ended = "late"
            reads = self._next_batch(job) if job.ended is None else []
            done = not reads and not (job.ended is None and job.artifacts)
            if done:
                self._close(job)
        if reads:
            self._reader.begin(reads)

    def _open(self, expected: ExpectedReturn) -> _Job | None:
        """The session's chain, from the deepest leaf that is still stored. Takes no lock."""
        nodes = self._state.tiers.index.nodes
        leaf = next(filter(None, map(nodes.get, expected.leaves)), None)
        if leaf is None:
            self._count("gone")
            return None
        path = _path_to(leaf, self._state.reads_peers)
        boundary = next((n for n in reversed(path) if self._has_boundary(n)), None)
        if boundary is not None:
            path = path[: path.index(boundary) + 1]
        artifacts = deque(_present(path, self._prefix_types))
        if boundary is not None:
            artifacts.extend(_present([boundary], self._boundary_types))
        return _Job(
            self._state,
            expected,
            expected.latest_s,
            artifacts,
            _hold_of(artifacts),
            self._worth_s(artifacts),
        )

    def _worth_s(self, artifacts: Iterable[Artifact]) -> dict[StateType, float]:
        at_stake_s: dict[StateType, list[float]] = {}
        weighed = self._weighing.at_stake_s
        for artifact in artifacts:
            at_stake_s.setdefault(artifact.state_type, []).append(weighed(artifact))
        return {kind: fmean(seconds) for kind, seconds in at_stake_s.items()}

    def _has_boundary(self, node: Node) -> bool:
        return all(
            (found := node.artifacts.get(t)) is not None and found.sealed
            for t in self._boundary_types
        )

    def _next_batch(self, job: _Job) -> list[HeldRead]:
        """Take slots for the next artifacts that are on SSD alone; needs the lock."""
        state, size_bytes = self._state, 0
        reads: list[HeldRead] = []
        state.tiers.hold(job.hold)
        for _ in range(min(_MAX_LOOKED_AT, len(job.artifacts))):
            artifact = job.artifacts[0]
            if artifact.forgotten:
                job.ended = "gone"
                break
            if artifact.ssd is not None and artifact.dram is None and artifact not in state.loading:
                if reads and size_bytes + artifact.size_bytes > _BATCH_BYTES:
                    break
                read = self._begin(job, artifact)
                if read is None:
                    job.ended = "partly" if job.staged or reads else "refused"
                    break
                reads.append(read)
                size_bytes += artifact.size_bytes
            job.artifacts.popleft()
        state.tiers.let_go(job.hold)
        return reads

    def _begin(self, job: _Job, artifact: Artifact) -> HeldRead | None:
        """A read into a slot that is worth less otherwise; None if there is none."""
        state = self._state
        artifact.pins += 1
        gain_s = job.expected.probability * job.worth_s[artifact.state_type]
        within_s = job.expected.latest_s - state.clock()
        target = state.tiers.take_dram(
            artifact.state_type, lambda victim: self._loss_s(victim, within_s) >= gain_s
        )
        if target is None:
            state.tiers.unpin(artifact)
            return None
        load = state.begin(artifact, target)
        load.waiting.append(job)
        return self._reader.hold(load)

    def _loss_s(self, victim: Artifact, within_s: float) -> float:
        """Expected seconds lost if the artifact leaves DRAM."""
        state = self._state
        expected = state.tiers.prefetched.expected(victim)
        if expected is not None:
            return expected.probability * self._weighing.at_stake_s(victim)
        idle_s = state.clock() - state.moments.when_s(victim.last_used)
        return self._weighing.loss_s(victim, idle_s, within_s)

    def _close(self, job: _Job) -> None:
        """Nothing more is staged for this session; needs the lock."""
        self._job = None
        job.artifacts.clear()
        if job.staged:
            self._staged.append(job)
        if len(self._staged) > _MAX_STAGED:
            self._staged = [j for j in self._staged if self._waits(j)]
        self._count(job.ended or ("staged" if job.staged else "in_dram"))

    def _welcome(self, now_s: float) -> None:
        """Sessions that are back: their restores read the rest, and use what is staged."""
        state = self._state
        if not state.back:
            return
        if self._job is not None and self._job.expected.session in state.back:
            self._job.ended = "early"
        for job in self._jobs():
            if job.expected.session in state.back:
                # A restore counts as use when it ends, which may be later than expected.
                job.expires_s = max(job.expires_s, now_s + state.config.load_deadline_s)
        state.back.clear()

    def _expire(self, now_s: float) -> None:
        """What was staged for sessions that are not expected any more goes first from now."""
        tiers = self._state.tiers
        for job in [j for j in self._staged if j.expires_s <= now_s]:
            self._staged.remove(job)
            for artifact in job.staged:
                if tiers.prefetched.expected(artifact) is job.expected:
                    tiers.prefetched.left(artifact)
                    tiers.demoted.add(artifact, Tier.DRAM)

    def _demote_declined(self) -> bool:
        """What the planner left alone goes first from the tier it is in; some of it a round."""
        state = self._state
        if not state.declined:
            return False
        chunks = state.declined.popleft()
        if len(chunks) > _MAX_DEMOTED:
            state.declined.appendleft(chunks[_MAX_DEMOTED:])
        state.tiers.demote(chunks[:_MAX_DEMOTED])
        return True

    def _waits(self, job: _Job) -> bool:
        expected = self._state.tiers.prefetched.expected
        return any(expected(artifact) is job.expected for artifact in job.staged)

    def _jobs(self) -> Iterator[_Job]:
        yield from self._staged
        if self._job is not None:
            yield self._job

    def _count(self, outcome: str) -> None:
        self._state.recorder.add("heterocache_prefetches", outcome=outcome)


def _path_to(leaf: Node, gaps_may_close: bool) -> list[Node]:
    """From the first chunk down to `leaf`, or from after a gap that peers' copies may close."""
    path = []
    node: Node | None = leaf
    while node is not None and node.parent is not None and (node.artifacts or not gaps_may_close):
        path.append(node)
        node = node.parent
    return path[::-1]


def _present(path: Sequence[Node], state_types: Sequence[StateType]) -> Iterator[Artifact]:
    """In chain order, up to the first chunk that lacks one."""
    for node in path:
        found = [node.artifacts.get(t) for t in state_types]
        artifacts = [a for a in found if a is not None and a.sealed]
        if len(artifacts) < len(state_types):
            return
        yield from artifacts


def _hold_of(artifacts: Sequence[Artifact]) -> Hold:
    columns: dict[StateType, list[StoredChunk]] = {}
    for artifact in artifacts:
        stored = artifact.node.stored
        if stored is not None:
            columns.setdefault(artifact.state_type, []).append(stored)
    return Hold([Wanted(kind, chunks) for kind, chunks in columns.items()])
