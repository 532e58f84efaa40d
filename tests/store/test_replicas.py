"""Copies of what others own: first to leave once nobody has used them for their time to live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.peers.ports import PeerAccess
from tests.store.filling import (
    CHUNK,
    CHUNK_BYTES,
    FINGERPRINT,
    SIZES,
    begin,
    chain,
    ids_of,
    put,
    stored,
)
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

TTL_S = 60.0
OURS, THEIRS, NEW = chain("ours", 2), chain("theirs", 2), chain("new", 2)


class Shared:
    """A store with room for four chunks, its clock in the test's hand."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.recorder = Recorder()
        self._expired = 0.0
        network = MemoryNetwork()
        self.store = ArtifactStore.open(
            SIZES,
            StoreConfig(4 * CHUNK_BYTES, spill_delay_s=0.0, replica_ttl_s=TTL_S),
            self.recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
            clock=lambda: self.now_s,
            peers=PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions)),
        )

    def hold_theirs(self) -> None:
        """Ours first, so that by recency ours would leave first."""
        put(self.store, OURS)
        put(self.store, THEIRS)
        self.judge()

    def judge(self) -> None:
        """Answer as the fleet does, again and again."""
        assert self.store.sharing is not None
        self.store.sharing.resolve_claims(dict.fromkeys(ids_of(OURS), 3), ids_of(THEIRS))

    def use(self) -> None:
        begin(self.store, ids_of(THEIRS)).release()

    def pass_time(self, seconds: float) -> None:
        """Until the I/O thread has looked."""
        self.now_s += seconds
        until(lambda: self.store.catalog.replicas.look_s > self.now_s)

    @property
    def expired(self) -> float:
        """Replicas counted as expired, since the start."""
        drained = (self.recorder.drain() or {}).get(COUNTERS, {})
        self._expired += drained.get("heterocache_replicas_expired{}", 0.0)
        return self._expired


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.store.close()
    made.store.check_integrity()


def test_a_replica_that_nobody_used_leaves_before_older_state_of_our_own(shared: Shared) -> None:
    shared.hold_theirs()
    shared.pass_time(TTL_S)
    assert shared.expired == len(ids_of(THEIRS))
    assert stored(shared.store, THEIRS) == 2, "nothing is dropped while there is room"
    put(shared.store, NEW)
    assert stored(shared.store, THEIRS) == 0
    assert stored(shared.store, OURS) == 2


def test_before_its_time_is_over_it_leaves_when_its_turn_comes(shared: Shared) -> None:
    shared.hold_theirs()
    shared.pass_time(0.9 * TTL_S)
    put(shared.store, NEW)
    assert shared.expired == 0
    assert stored(shared.store, THEIRS) == 2
    assert stored(shared.store, OURS) == 0


def test_a_use_begins_its_time_anew(shared: Shared) -> None:
    shared.hold_theirs()
    shared.pass_time(0.9 * TTL_S)
    shared.use()
    shared.pass_time(0.9 * TTL_S)
    assert shared.expired == 0
    shared.pass_time(0.2 * TTL_S)
    assert shared.expired == len(ids_of(THEIRS))


def test_used_again_after_its_time_it_is_worth_as_much_as_ever(shared: Shared) -> None:
    shared.hold_theirs()
    shared.pass_time(TTL_S)
    shared.use()
    put(shared.store, NEW)
    assert stored(shared.store, THEIRS) == 2
    shared.pass_time(2 * TTL_S)
    assert shared.expired == 2 * len(ids_of(THEIRS)), "each time it goes unused is counted"


def test_it_is_counted_once_however_often_the_fleet_says_so(shared: Shared) -> None:
    shared.hold_theirs()
    for _ in range(4):
        shared.pass_time(TTL_S)
        shared.judge()
    assert shared.expired == len(ids_of(THEIRS))
    assert len(shared.store.catalog.replicas) == len(ids_of(THEIRS))


def test_what_becomes_ours_does_not_leave_first(shared: Shared) -> None:
    shared.hold_theirs()
    shared.pass_time(TTL_S)
    assert shared.store.sharing is not None
    shared.store.sharing.resolve_claims(dict.fromkeys(ids_of(THEIRS), 5), ())
    put(shared.store, NEW)
    assert stored(shared.store, THEIRS) == 2
    assert stored(shared.store, OURS) == 0


def test_of_many_that_are_due_a_few_are_looked_at_at_once(shared: Shared) -> None:
    shared.hold_theirs()
    replicas = shared.store.catalog.replicas
    with shared.store.catalog.locked():  # the I/O thread waits
        shared.now_s += TTL_S
        for left in range(len(ids_of(THEIRS)) - 1, 0, -1):
            assert replicas.expire(1), "others are left"
            assert shared.expired == len(ids_of(THEIRS)) - left
        assert not replicas.expire(1)
    assert shared.expired == len(ids_of(THEIRS))


def test_the_io_thread_goes_on_until_all_that_are_due_were_looked_at(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = shared.store.catalog.replicas
    expire = replicas.expire
    shared.hold_theirs()
    monkeypatch.setattr(replicas, "expire", lambda: expire(1))
    shared.pass_time(TTL_S)
    assert shared.expired == len(ids_of(THEIRS))


def test_looks_do_not_pile_up_where_owners_change(shared: Shared) -> None:
    """One look an artifact: what was ours meanwhile is not looked at twice for ever."""
    shared.hold_theirs()
    replicas, index = shared.store.catalog.replicas, shared.store.catalog.tiers.index
    artifact = index.find(ids_of(THEIRS)[0])
    assert artifact is not None
    with shared.store.catalog.locked():
        for _ in range(1_000):
            replicas.promote(artifact)
            replicas.add(artifact)
        assert len(replicas._looks) < 100
    for _ in range(2):
        shared.pass_time(TTL_S)
    assert len(replicas._looks) == len(ids_of(THEIRS))


def test_what_left_or_was_reset_is_not_looked_after(shared: Shared) -> None:
    shared.hold_theirs()
    put(shared.store, chain("more", 4))
    assert stored(shared.store, THEIRS) == 0
    shared.pass_time(TTL_S)
    assert len(shared.store.catalog.replicas) == 0
    put(shared.store, THEIRS)
    shared.judge()
    shared.store.reset()
    assert len(shared.store.catalog.replicas) == 0
    assert shared.expired == 0
