"""Random faults of real peers while a store reads from them, and saves of its own, go on."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure
from tests.store.filling import chain, forget_all
from tests.store.peer_engine import BIG, Engine, Writer, open_store, right
from tests.store.test_peer_processes import check_bytes, fetch
from tests.waiting import until

ROUNDS = 120
MINE = chain("mine", 2)


def check_own(store: ArtifactStore, mine: dict[ArtifactId, np.ndarray]) -> None:
    """Check that everything this store saved itself is unchanged."""
    for chunk, stored in zip(MINE, store.match(MINE), strict=False):
        offsets = np.frombuffer(stored.offsets, np.int64)
        for kind in BIG:
            at = int(offsets[kind.position])
            if at >= 0:
                found = store.arena.view[at : at + BIG[kind]]
                assert np.array_equal(found, mine[ArtifactId(chunk.key, kind)])


def own_contents(chunks: list[ChunkRange]) -> dict[ArtifactId, np.ndarray]:
    return {
        ArtifactId(c.key, kind): data  # type: ignore[arg-type]
        for c in chunks
        for kind, data in right(c).items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_faults_bring_no_wrong_byte_no_hang_and_leave_nothing_behind() -> None:
    rng = np.random.default_rng(4)
    known = KnownPeers()
    store = open_store(known, chunks=12, peer_deadline_s=0.3)
    writer, mine = Writer(store), own_contents(MINE)
    pool, outcomes = store.catalog.tiers.dram, Counter[Failure | None]()
    owners = [Engine(epoch, churns=epoch == 1) for epoch in (1, 2)]
    epoch = 2
    try:
        for _ in range(ROUNDS):
            at = int(rng.integers(2))
            owner = owners[at]
            copies = owner.register(known)
            fault = rng.choice(["none", "none", "kill", "stop", "lease"])
            if fault == "stop":
                owner.stop()
            elif fault == "kill":
                owner.kill()
            elif fault == "lease":
                del known.cards[owner.epoch]
            before_s = time.monotonic()
            restore = fetch(store, copies)
            assert time.monotonic() - before_s < 15, "longer than any deadline"
            check_bytes(store, restore)
            outcomes.update(restore.failed.values())
            outcomes[None] += len(restore.offsets)
            restore.release()
            gone = [c for c in MINE if len(store.missing(c, list(BIG))) == len(BIG)]
            if gone and all(pool.num_free(kind) >= len(MINE) for kind in BIG):
                writer.put(gone)
            check_own(store, mine)
            if fault == "stop":
                owner.resume()
            elif fault == "kill":
                del known.cards[owner.epoch]
                epoch += 1
                owners[at] = Engine(epoch, churns=at == 0)
            if rng.random() < 0.5:
                forget_all(store)
            store.check_integrity()
        forget_all(store)
        until(lambda: sum(map(pool.num_used, BIG)) == 0)
        # A read from a peer that was killed ends once UCX notices: 20 s were once too few.
        until(lambda: not sum(map(pool.num_quarantined, BIG)), patience_s=120)
        assert outcomes[None], "nothing was ever read"
        assert {Failure.UNREACHABLE, Failure.IO_ERROR} & set(outcomes), "no fault was ever met"
        allowed = {Failure.UNREACHABLE, Failure.IO_ERROR, Failure.DEADLINE, Failure.REUSED}
        assert set(outcomes) <= allowed | {None, Failure.CHECKSUM, Failure.GONE, Failure.NO_SLOT}
    finally:
        for owner in owners:
            owner.kill()
        store.close()
