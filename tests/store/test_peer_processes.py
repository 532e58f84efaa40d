"""A store that reads from those of real processes over NIXL and UCX, and what befalls them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.catalog.restore import Restore
from tests.store.filling import chain, forget_all, wait
from tests.store.peer_engine import BIG, CHUNKS, Writer, engines, open_store, right
from tests.waiting import until

pytestmark = pytest.mark.long

CONTENTS = {
    ArtifactId(chunk.key, kind): data for chunk in CHUNKS for kind, data in right(chunk).items()
}


@pytest.fixture
def peers() -> KnownPeers:
    return KnownPeers()


@pytest.fixture
def reader(peers: KnownPeers) -> Iterator[ArtifactStore]:
    store = open_store(peers, peer_deadline_s=30.0)  # on a busy machine UCX notices a kill late
    yield store
    store.close()
    store.check_integrity()


def fetch(store: ArtifactStore, copies: Mapping[ArtifactId, PeerCopy]) -> Restore:
    remote = [StoredChunk(c, dict.fromkeys(BIG, Tier.PEER)) for c in CHUNKS]
    return wait(store.begin_restore([Wanted(kind, remote) for kind in BIG], copies))


def check_bytes(store: ArtifactStore, restore: Restore) -> None:
    for key, at in restore.offsets.items():
        found = store.arena.view[at : at + BIG[key.state_type]]
        assert np.array_equal(found, CONTENTS[key]), "a wrong byte was accepted"


def test_exact_bytes_from_another_process_that_ends_in_peace(
    reader: ArtifactStore, peers: KnownPeers
) -> None:
    with engines(1) as (owner,):
        restore = fetch(reader, owner.register(peers))
        assert not restore.failed
        assert len(restore.offsets) == len(CONTENTS)
        check_bytes(reader, restore)
        restore.release()
        assert owner.close()


def test_slots_rewritten_while_they_are_read_never_bring_a_wrong_byte(
    reader: ArtifactStore, peers: KnownPeers
) -> None:
    """The owner forgets, writes others and writes again all the time; the reader keeps reading."""
    outcomes: Counter[Failure | None] = Counter()
    with engines(1, churns=True) as (owner,):
        began_s, misses = time.monotonic(), 0
        # For 10 s, and on a busy machine until a read has succeeded and another has not.
        while (passed_s := time.monotonic() - began_s) < 10 or not (outcomes[None] and misses):
            assert passed_s < 120, "the test shows nothing"
            restore = fetch(reader, owner.register(peers))
            check_bytes(reader, restore)
            outcomes.update(restore.failed.values())
            outcomes[None] += len(restore.offsets)
            restore.release()
            forget_all(reader)
            misses = outcomes[Failure.REUSED] + outcomes[Failure.CHECKSUM]
            if outcomes[None] >= 100 and misses >= 30:
                break
    assert set(outcomes) <= {None, Failure.REUSED, Failure.CHECKSUM}


def test_an_owner_killed_before_and_during_reads_and_started_again(
    reader: ArtifactStore, peers: KnownPeers
) -> None:
    with engines(1, 2, 3) as (first, second, third):
        copies = first.register(peers)
        first.kill()
        restore = fetch(reader, copies)
        assert set(restore.failed.values()) <= {Failure.IO_ERROR, Failure.UNREACHABLE}
        assert restore.failed
        restore.release()

        copies = second.register(peers)
        killer = threading.Timer(0.05, second.kill)
        killer.start()

        def causes() -> set[Failure]:
            restore = fetch(reader, copies)
            check_bytes(reader, restore)
            restore.release()
            forget_all(reader)
            return set(restore.failed.values())

        failed = until(causes, pause_s=0.0)
        killer.join()
        assert failed <= {Failure.IO_ERROR, Failure.UNREACHABLE}

        restore = fetch(reader, third.register(peers))
        assert not restore.failed, "another life of the worker is read at once"
        check_bytes(reader, restore)
        restore.release()


def test_an_owner_that_is_stopped_costs_a_deadline_and_its_late_bytes_harm_nobody(
    peers: KnownPeers,
) -> None:
    reader = open_store(peers, chunks=6, peer_deadline_s=0.3)
    pool = reader.catalog.tiers.dram
    with engines(1) as (owner,):
        copies = owner.register(peers)
        owner.stop()
        restore = fetch(reader, copies)
        assert set(restore.failed.values()) == {Failure.DEADLINE}
        restore.release()
        assert sum(map(pool.num_used, BIG)) == len(CONTENTS), "slots a late read may fill are free"
        mine = chain("mine", 3)
        Writer(reader).put(mine)
        owner.resume()
        until(lambda: sum(map(pool.num_used, BIG)) == len(CONTENTS))
        for chunk, stored in zip(mine, reader.match(mine), strict=True):
            offsets = np.frombuffer(stored.offsets, np.int64)
            for kind, data in right(chunk).items():
                at = int(offsets[kind.position])  # type: ignore[attr-defined]
                assert np.array_equal(reader.arena.view[at : at + len(data)], data)
        until(lambda: pool.num_free(next(iter(BIG))) == 3)
        until(lambda: not fetch_failed(reader, copies))
    reader.close()


def fetch_failed(reader: ArtifactStore, copies: Mapping[ArtifactId, PeerCopy]) -> bool:
    """Return True while the peer is left alone."""
    restore = fetch(reader, copies)
    check_bytes(reader, restore)
    restore.release()
    return bool(restore.failed)


def test_a_stopped_owner_whose_lease_ran_out_is_not_read_though_its_memory_could_be(
    reader: ArtifactStore, peers: KnownPeers
) -> None:
    with engines(1) as (owner,):
        copies = owner.register(peers)
        restore = fetch(reader, copies)
        assert not restore.failed
        restore.release()
        forget_all(reader)
        owner.stop()
        del peers.cards[owner.epoch]
        restore = fetch(reader, copies)
        assert set(restore.failed.values()) == {Failure.UNREACHABLE}
        restore.release()
        owner.resume()
        restore = fetch(reader, copies)
        assert set(restore.failed.values()) == {Failure.UNREACHABLE}
        restore.release()
