"""One engine's part in its fleet: the lease, what it shares, and what it finds at others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Directory, Grant, Worker
from ownership.directory.contract import DEFAULT_DEADLINE_S
from ownership.directory.identifiers import NO_EPOCH, Epoch, Token
from ownership.directory.validation import MAX_STORAGE_BYTES
from ownership.member.chain_lookup import DEADLINE_S, ChainLookup, ChainLookups
from ownership.member.chain_users import ChainUserExchange
from ownership.member.claim_queue import LISTING_TTL_S, ClaimQueue
from ownership.member.directory_thread import (
    CALLS_PER_TURN,
    ClaimBatches,
    DirectoryThread,
    Job,
    ThreadHooks,
)
from ownership.member.fencing import HORIZON_S
from ownership.member.held_lease import MARGIN, RENEWALS_PER_LEASE, lease_clock
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.live_peers import LivePeers
from ownership.member.shared_store import SharedStore


@dataclass(frozen=True)
class MemberTimes:
    """The durations of a fleet's member, in seconds.

    Raises ValueError for a lease in which the directory's calls leave no time to serve.
    """

    lease_s: float
    call_s: float = DEFAULT_DEADLINE_S
    """Deadline of one call of the directory. Not all calls keep it, see `RedisConnection`."""
    lookup_s: float = DEADLINE_S
    """Longest time that a request waits for a lookup."""
    listing_ttl_s: float = LISTING_TTL_S
    """Time for which a replica is listed."""
    horizon_s: float = HORIZON_S
    """Longest time from a lookup to the use of a copy it found."""

    def __post_init__(self) -> None:
        before_renewal = 1.0 - MARGIN - 1.0 / RENEWALS_PER_LEASE
        if self.lease_s * before_renewal <= self.stop_early_s:
            raise ValueError(
                f"with calls of {self.call_s} s a lease must be longer than "
                f"{self.stop_early_s / before_renewal:.2f} s, got {self.lease_s} s"
            )

    @property
    def stop_early_s(self) -> float:
        """Serving ends so long before the lease: the thread may hang in so many calls meanwhile.

        Calls that have to connect, that resolve a host name, or whose answer comes in pieces may
        take longer. Readers then still refuse what was taken over.
        """
        return CALLS_PER_TURN * self.call_s

    @property
    def period_s(self) -> float:
        """Interval of the periodic tasks."""
        return self.lease_s / RENEWALS_PER_LEASE


class PeriodicCall:
    """A job of the directory's thread: once each period, and never twice at the same time."""

    def __init__(
        self,
        thread: DirectoryThread,
        job: Job[None],
        times: MemberTimes,
        clock: Callable[[], float],
    ) -> None:
        self._thread = thread
        self._job = job
        self._times = times
        self._clock = clock
        self._due_at_s = clock()
        self._future: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._future is not None and not self._future.done()

    def run_due(self, is_urgent: bool = False) -> float:
        """Start the job if it is due or urgent; return the seconds until the next call of this."""
        if self.is_running:
            return self._times.lease_s
        now_s = self._clock()
        if is_urgent or now_s >= self._due_at_s:
            self._due_at_s = now_s + self._times.period_s
            self._future = self._thread.call(self._job, self._times.lease_s)
        return self._due_at_s - now_s


class FleetWorker:
    """Implements the `Fleet` port of `hetero_connector.engine.scheduler.fleet` over a `Directory`.

    A thread of its own makes all calls to the directory. While the directory does not answer, the
    engine has only its own cache; afterwards it joins again by itself.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        times: MemberTimes,
        recorder: Recorder,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self.peers = LivePeers(times.lease_s, clock, times.horizon_s)
        self._name = name
        self._times = times
        self._recorder = recorder
        self._clock = clock
        self._keeper = LeaseKeeper(directory, self._worker, times.lease_s, recorder, clock)
        hooks = ThreadHooks(
            start_epoch=self._start_epoch,
            on_granted=self._on_granted,
            run_periodic=self._run_periodic,
            before_leaving=self._stop_serving,
            on_swept=self._on_swept,
            num_workers=lambda: self.peers.num_live,
        )
        self._thread = DirectoryThread(directory, self._keeper, hooks, recorder, clock=clock)
        self._lookups = ChainLookups(
            self._thread,
            self._keeper,
            self.peers,
            recorder,
            times.lookup_s,
            clock,
            self._on_found_own,
            lambda storage: self._store is not None and self._store.may_adopt_from(storage),
        )
        self._store: SharedStore | None = None
        self._claims: ClaimQueue | None = None
        self._chain_users: ChainUserExchange | None = None
        self._serving = NO_EPOCH
        self._refresh = PeriodicCall(self._thread, self._refresh_peers, times, clock)
        self._report = PeriodicCall(self._thread, self._report_generation, times, clock)
        self._reported_in: Generation | None = None

    @property
    def accepts_claims(self) -> bool:
        """True if peers will probably find what is sealed now."""
        claims = self._claims
        return claims is not None and not claims.has_refused and self._thread.accepts_claims

    def start(self, store: SharedStore) -> None:
        """Join the fleet with this store."""
        times = self._times
        self._store = store
        self._claims = ClaimQueue(
            store,
            self._thread,
            self._recorder,
            times.listing_ttl_s,
            self._clock,
            lease_s=times.lease_s,
        )
        self._chain_users = ChainUserExchange(store, self._thread, times.period_s, self._clock)
        self._thread.start()

    def wake(self) -> None:
        """Take the store's changes soon. Returns at once."""
        self._thread.wake()

    def find(self, chain: Sequence[ChunkKey]) -> ChainLookup:
        """Ask which peers have copies of these chunks. Returns at once."""
        return self._lookups.find(chain)

    def close(self) -> None:
        """Stop serving and leave. Waits a few seconds at most. Idempotent."""
        if self._store is not None:
            self._thread.close()
            self._stop_serving()  # the thread may hang

    def _worker(self) -> Worker:
        assert self._store is not None
        storage = self._store.storage
        if len(storage.encode()) > MAX_STORAGE_BYTES:
            storage = ""
        return Worker(self._name, self._store.card, storage)

    def _start_epoch(self) -> ClaimBatches:
        assert self._claims is not None
        return self._claims.start_epoch()

    def _on_granted(self, epoch: Epoch, claims: Sequence[Claim], grants: Sequence[Grant]) -> None:
        assert self._claims is not None
        self._claims.on_granted(epoch, claims, grants)

    def _on_swept(self, num_forgotten: int) -> None:
        assert self._claims is not None
        if num_forgotten and self._claims.has_refused:
            self._claims.reclaim()

    def _on_found_own(self, owned: Mapping[ArtifactId, Token]) -> None:
        assert self._claims is not None
        self._claims.release_absent(owned)

    def _run_periodic(self) -> float:
        """Run all periodic tasks; return the seconds until one of them is due again."""
        assert self._claims is not None
        assert self._chain_users is not None
        assert self._store is not None
        if self._store.take_export_loss():
            # An artifact that has left unnoticed would stay this worker's for ever.
            self._keeper.start_over()
        lost_after_s = self._keeper.take_loss()
        if lost_after_s is not None:
            self._claims.on_records_lost(lost_after_s)
            self._chain_users.on_records_lost()
        wait_s = min(
            self._update_serving(),
            self._claims.run_due(),
            self._chain_users.run_due(),
            self._refresh.run_due(),
            self._follow_resets(),
        )
        return max(0.0, wait_s)

    def _update_serving(self) -> float:
        """Let peers read while no takeover is possible; return the seconds until that ends."""
        assert self._store is not None
        lease = self._keeper.lease
        left_s = 0.0 if lease is None else lease.left_s - self._times.stop_early_s
        serving = NO_EPOCH if lease is None or left_s <= 0.0 else lease.epoch
        if serving != self._serving:
            self._store.serve_under(serving)
            self._serving = serving
        return left_s if serving else self._times.lease_s

    def _stop_serving(self) -> None:
        assert self._store is not None
        self._store.serve_under(NO_EPOCH)

    def _refresh_peers(self, directory: Directory, _: Epoch) -> None:
        """Ask for the live workers, and claim replicas at once whose owner has ended."""
        assert self._claims is not None
        asked_s = self._clock()
        workers = directory.workers()
        self.peers.refresh(workers, asked_s)
        if not self._claims.replica_owners <= workers.keys():
            self._claims.reclaim()
            self._thread.wake()

    def _follow_resets(self) -> float:
        """Ask for the fleet's resets once each period, and at once after a reset of this engine."""
        assert self._store is not None
        generation = self._store.generation
        is_new = generation is not self._reported_in
        if not self._report.is_running:
            self._reported_in = generation
        return self._report.run_due(is_urgent=is_new)

    def _report_generation(self, directory: Directory, epoch: Epoch) -> None:
        """Adopt the fleet's latest reset; the next call reports it, all within one lease."""
        assert self._store is not None
        asked_in = self._store.generation
        number = directory.report_generation(epoch, self._store.adopted, asked_in.fleet)
        self._store.note_fleet_generation(number, asked_in)
