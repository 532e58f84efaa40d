"""One engine's part in its fleet: the lease, what it shares, and what it finds at others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Directory, Grant, Worker
from ownership.directory.identifiers import NO_EPOCH, Epoch, Token
from ownership.directory.validation import MAX_STORAGE_BYTES
from ownership.member.chain_lookup import DEADLINE_S, ChainLookup, ChainLookups
from ownership.member.chain_users import ChainUserExchange
from ownership.member.directory_thread import CALLS_PER_TURN, DirectoryThread
from ownership.member.fencing import HORIZON_S
from ownership.member.held_lease import MARGIN, RENEWALS_PER_LEASE
from ownership.member.lease_clock import lease_clock
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.ledger import LISTING_TTL_S, Ledger
from ownership.member.live_peers import LivePeers
from ownership.member.shared_store import SharedStore


class FleetWorker:
    """Implements `hetero_connector.engine.scheduler.fleet.Fleet` over any `Directory`.

    Everything that talks to the directory happens on a thread of its own. While the directory
    is gone the engine is alone with its own cache; it joins again by itself.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        lease_s: float,
        recorder: Recorder,
        *,
        call_s: float = 1.0,
        lookup_s: float = DEADLINE_S,
        listing_ttl_s: float = LISTING_TTL_S,
        horizon_s: float = HORIZON_S,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        """`call_s`: longest that a call of the directory takes. `lookup_s`: how long a request
        waits for it. `horizon_s`: longest from a lookup to the use of what it found.
        Raises ValueError for a lease in which such calls leave no time to serve.
        """
        self.peers = LivePeers(lease_s, clock, horizon_s)
        self._name = name
        self._lease_s = lease_s
        self._recorder = recorder
        self._stop_early_s = CALLS_PER_TURN * call_s
        """Serving ends so long before the lease: our thread may hang in so many calls meanwhile."""
        before_renewal = 1.0 - MARGIN - 1.0 / RENEWALS_PER_LEASE
        if lease_s * before_renewal <= self._stop_early_s:
            raise ValueError(
                f"with calls of {call_s} s a lease must be longer than "
                f"{self._stop_early_s / before_renewal:.2f} s, got {lease_s} s"
            )
        self._listing_ttl_s = listing_ttl_s
        self._clock = clock
        self._keeper = LeaseKeeper(directory, self._worker, lease_s, recorder, clock)
        self._thread = DirectoryThread(
            directory,
            self._keeper,
            self._inventory,
            self._granted,
            recorder,
            errands=self._errands,
            leaving=self._stop_serving,
            swept=self._swept,
            num_workers=lambda: self.peers.num_live,
            clock=clock,
        )
        self._lookups = ChainLookups(
            self._thread,
            self._keeper,
            self.peers,
            recorder,
            lookup_s,
            clock,
            self._found_own,
            lambda storage: self._store is not None and self._store.may_adopt_from(storage),
        )
        self._store: SharedStore | None = None
        self._ledger: Ledger | None = None
        self._readers: ChainUserExchange | None = None
        self._serving = NO_EPOCH
        self._refresh_at_s = clock()
        self._refreshing: Future[None] | None = None
        self._tell_at_s = clock()
        self._told_in: Generation | None = None
        self._telling: Future[None] | None = None

    @property
    def accepts_claims(self) -> bool:
        """True if the directory takes claims, so that peers will find what is sealed now."""
        ledger = self._ledger
        return ledger is not None and not ledger.is_refused and self._thread.takes_claims

    def start(self, store: SharedStore) -> None:
        """Join with this store."""
        self._store = store
        self._ledger = Ledger(
            store,
            self._thread,
            self._recorder,
            self._listing_ttl_s,
            self._clock,
            lease_s=self._lease_s,
        )
        period_s = self._lease_s / RENEWALS_PER_LEASE
        self._readers = ChainUserExchange(store, self._thread, period_s, self._clock)
        self._thread.start()

    def wake(self) -> None:
        """The store has something to tell. Returns at once."""
        self._thread.wake()

    def find(self, chain: Sequence[ChunkKey]) -> ChainLookup:
        """Ask what peers hold of these chunks. Returns at once."""
        return self._lookups.find(chain)

    def close(self) -> None:
        """Stop serving, and leave. Waits a few seconds at most. Idempotent."""
        if self._store is not None:
            self._thread.close()
            self._stop_serving()  # the thread may hang

    def _worker(self) -> Worker:
        assert self._store is not None
        return Worker(self._name, self._store.card, self._storage)

    @property
    def _storage(self) -> str:
        """Where others find what was written here, once this worker is dead."""
        storage = "" if self._store is None else self._store.storage
        return storage if len(storage.encode()) <= MAX_STORAGE_BYTES else ""

    def _inventory(self) -> Iterator[Sequence[Claim]]:
        assert self._ledger is not None
        return self._ledger.inventory()

    def _granted(self, epoch: Epoch, claims: Sequence[Claim], grants: Sequence[Grant]) -> None:
        assert self._ledger is not None
        self._ledger.granted(epoch, claims, grants)

    def _swept(self, num_forgotten: int) -> None:
        assert self._ledger is not None
        if num_forgotten and self._ledger.is_refused:
            self._ledger.reclaim()

    def _found_own(self, own: Mapping[ArtifactId, Token]) -> None:
        assert self._ledger is not None
        self._ledger.found(own)

    def _errands(self) -> float:
        assert self._ledger is not None
        assert self._readers is not None
        assert self._store is not None
        if self._store.exports_lost():  # what has left may be known as ours for ever
            self._keeper.start_over()
        if self._keeper.take_loss():
            self._ledger.records_lost()
            self._readers.records_lost()
        wait_s = min(
            self._serve(),
            self._ledger.keep(),
            self._readers.keep(),
            self._refresh(),
            self._follow_resets(),
        )
        return max(0.0, wait_s)

    def _serve(self) -> float:
        """Let peers read as long as nobody can have taken over; seconds until that ends."""
        assert self._store is not None
        lease = self._keeper.lease
        left_s = 0.0 if lease is None else lease.left_s - self._stop_early_s
        serving = NO_EPOCH if lease is None or left_s <= 0.0 else lease.epoch
        if serving != self._serving:
            self._store.serve_under(serving)
            self._serving = serving
        return left_s if serving else self._lease_s

    def _stop_serving(self) -> None:
        assert self._store is not None
        self._store.serve_under(NO_EPOCH)

    def _refresh(self) -> float:
        """Ask who lives, now and then; seconds until then."""
        now_s = self._clock()
        if self._refreshing is not None and not self._refreshing.done():
            return self._lease_s
        if now_s >= self._refresh_at_s:
            self._refresh_at_s = now_s + self._lease_s / RENEWALS_PER_LEASE
            self._refreshing = self._thread.call(self._ask_who_lives, self._lease_s)
        return self._refresh_at_s - now_s

    def _ask_who_lives(self, directory: Directory, _: Epoch) -> None:
        assert self._ledger is not None
        asked_s = self._clock()
        workers = directory.workers()
        self.peers.refresh(workers, asked_s)
        # An owner may have come and gone between two questions: nobody here saw it live.
        if self.peers.take_ended() or not self._ledger.owners <= workers.keys():
            self._ledger.reclaim()
            self._thread.wake()

    def _follow_resets(self) -> float:
        """Ask for the fleet's resets, now and then, and at once after one of our own."""
        assert self._store is not None
        now_s, generation = self._clock(), self._store.generation
        if self._telling is not None and not self._telling.done():
            return self._lease_s
        if now_s >= self._tell_at_s or generation is not self._told_in:
            self._tell_at_s = now_s + self._lease_s / RENEWALS_PER_LEASE
            self._told_in = generation
            self._telling = self._thread.call(self._tell_generation, self._lease_s)
        return self._tell_at_s - now_s

    def _tell_generation(self, directory: Directory, epoch: Epoch) -> None:
        """Adopt the fleet's latest reset, and say so the next time: all within a lease."""
        assert self._store is not None
        asked_in = self._store.generation
        number = directory.report_generation(epoch, self._store.adopted, asked_in.fleet)
        self._store.hear_generation(number, asked_in)
