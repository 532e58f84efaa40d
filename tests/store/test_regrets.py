"""State that was evicted and soon computed again is counted, by the tier that was too small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.regrets import WINDOW_S
from tests.clock import Clock
from tests.store.filling import CHUNK, DENSE, WINDOW, Bench, Disk, chain, put
from tests.store.under_way import snapshot
from tests.waiting import until

REGRET = "heterocache_eviction_regret_tokens"


@pytest.fixture
def bench(clock: Clock) -> Bench:
    return Bench(None, clock=clock)


@pytest.fixture
def store(bench: Bench) -> Iterator[ArtifactStore]:
    opened = bench.open(dram_chunks=4)
    yield opened
    opened.close()


def evict(store: ArtifactStore, name: str) -> None:
    """Save other chains until nothing of this one is stored."""
    for number in count():
        if not store.match(chain(name, 1)):
            return
        put(store, chain(f"other {number}", 1))


def test_what_is_saved_again_soon_after_its_eviction_is_counted_once(
    store: ArtifactStore, bench: Bench
) -> None:
    put(store, chain("a", 2))
    evict(store, "a")
    assert not bench.counts(REGRET)
    put(store, chain("a", 2))
    assert bench.counts(REGRET) == {
        f"state_type={kind.value},tier=dram": 2 * CHUNK for kind in (DENSE, WINDOW)
    }
    put(store, chain("b", 1))
    assert not bench.counts(REGRET), "nothing of this one was ever evicted"


def test_what_was_evicted_long_ago_is_no_regret(
    store: ArtifactStore, bench: Bench, clock: Clock
) -> None:
    put(store, chain("a", 1))
    evict(store, "a")
    clock.passes(WINDOW_S + 1)
    put(store, chain("a", 1))
    assert not bench.counts(REGRET)


def test_what_was_to_leave_first_is_no_regret(store: ArtifactStore, bench: Bench) -> None:
    put(store, chain("a", 1))
    store.decline(store.match(chain("a", 1)))
    evict(store, "a")
    put(store, chain("a", 1))
    assert not bench.counts(REGRET)


def test_what_is_left_of_a_damaged_chunk_is_no_regret(store: ArtifactStore, bench: Bench) -> None:
    put(store, chain("a", 1))
    node = store.catalog.tiers.index.nodes[chain("a", 1)[0].key]
    store.catalog.loads.lose_from_dram(node.artifacts[DENSE], Failure.CHECKSUM)
    assert not store.match(chain("a", 1))
    put(store, chain("a", 1))
    assert not bench.counts(REGRET)


def test_no_more_is_remembered_than_a_few_mebibytes(
    store: ArtifactStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted = store.catalog.regrets._evicted
    monkeypatch.setattr(evicted, "capacity", 6)
    for number in range(20):
        put(store, chain(f"{number}", 1))
    assert len(evicted) == 6
    put(store, chain("0", 1))
    assert not bench.counts(REGRET), "it is forgotten"


def test_what_left_dram_and_is_on_ssd_is_no_regret(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ssd", Disk())
    store = bench.open(dram_chunks=4, ssd_chunks=32)
    put(store, chain("a", 1))
    until(lambda: snapshot(store.catalog).writes_queued + snapshot(store.catalog).writing == 0)
    for number in range(8):
        put(store, chain(f"other {number}", 1))
    (found,) = store.match(chain("a", 1))
    assert set(found.tiers.values()) == {Tier.SSD}
    evicted = {artifact_id.chunk for artifact_id in store.catalog.regrets._evicted}
    assert found.chunk.key not in evicted
    store.close()
