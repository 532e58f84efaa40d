"""State that continues another engine's chain is kept on the own SSD, like all other state.

Two or three scheduler sides over one directory, as in `test_fleet_scheduling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.spec import StateType
from hetero_connector.store.catalog.evictability import Evictability, evictability
from ownership.directory import ArtifactRecord
from tests.engine.fakes import DENSE, HYBRID, FakeRequest
from tests.engine.stepped import CHUNK, Engine, tokens
from tests.engine.stepped_fleet import WAIT_S, Fleet, chunk_bytes, joined
from tests.waiting import until

PREAMBLE = tokens(4 * CHUNK)
"""The common beginning of all engines' sessions."""
PROMPT = [*PREAMBLE, *tokens(3 * CHUNK + 40, seed=1)]
RESTORED = 7 * CHUNK + 32


@pytest.fixture(params=[DENSE, HYBRID], ids=["dense", "hybrid"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with joined(request.param) as made:
        yield made


def join(fleet: Fleet, folder: Path, name: str, **given: Any) -> Engine:
    ssd = {"ssd_dir": folder / name, "ssd_bytes": 1 << 20, "adopt_from": folder}
    return fleet.join(name, **ssd, **given)


def owning(fleet: Fleet, folder: Path, name: str) -> Engine:
    """Return an engine that has computed the preamble and owns it."""
    engine = join(fleet, folder, name)
    assert engine.run(FakeRequest("preamble", [*PREAMBLE, 7])) == 0
    fleet.settle(engine)
    return engine


def continuing(fleet: Fleet, folder: Path, name: str, **given: Any) -> Engine:
    """Return an engine that has continued the preamble and written its own part to SSD."""
    engine = join(fleet, folder, name, **given)
    assert engine.run(FakeRequest("first", PROMPT)) == 4 * CHUNK
    fleet.settle(engine)
    assert engine.store.flush(WAIT_S)
    artifacts = list(engine.store.catalog.tiers.index.artifacts())
    ours, theirs = [a for a in artifacts if a.token], [a for a in artifacts if a.replica]
    assert len(ours) + len(theirs) == len(artifacts)
    assert {a.node.chunk.end for a in theirs} == {CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK}
    assert {a.node.chunk.end for a in ours} >= {5 * CHUNK, 6 * CHUNK, 7 * CHUNK, RESTORED}
    assert all(a.ssd is not None for a in ours)
    assert all(a.ssd is None for a in theirs), "one owner, who alone writes it"
    return engine


def hits(fleet: Fleet, engine: Engine) -> dict[str, float]:
    """Return the tokens restored so far, by tier."""
    tiers = {t: fleet.count(engine, "heterocache_hit_tokens", tier=t) for t in Tier}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}


def test_after_a_restart_the_beginning_comes_from_its_owner_and_the_rest_from_ssd(
    fleet: Fleet, tmp_path: Path
) -> None:
    owning(fleet, tmp_path, "ann")
    continuing(fleet, tmp_path, "bob").side.close()
    bob = join(fleet, tmp_path, "bob")
    assert bob.run(FakeRequest("second", PROMPT)) == RESTORED
    assert hits(fleet, bob) == {Tier.PEER: 4 * CHUNK, Tier.SSD: RESTORED - 4 * CHUNK}
    assert bob.store.catalog.tiers.index.num_missing == 0
    # The next time all of it is here.
    assert bob.run(FakeRequest("third", PROMPT)) == RESTORED
    assert hits(fleet, bob)[Tier.PEER] == 4 * CHUNK


def test_a_turn_that_ends_within_its_first_chunk_is_found_behind_a_gap_too(
    fleet: Fleet, tmp_path: Path
) -> None:
    owning(fleet, tmp_path, "ann")
    short = [*PREAMBLE, *tokens(40, seed=1)]
    bob = join(fleet, tmp_path, "bob")
    bob.run(FakeRequest("first", short))
    fleet.settle(bob)
    bob.side.close()
    bob = join(fleet, tmp_path, "bob")
    assert bob.run(FakeRequest("second", short)) == 4 * CHUNK + 32
    assert hits(fleet, bob) == {Tier.PEER: 4 * CHUNK, Tier.SSD: 32}


def test_tokens_of_the_gap_in_the_engines_own_pages_are_not_looked_up(
    fleet: Fleet, tmp_path: Path
) -> None:
    owning(fleet, tmp_path, "ann")
    continuing(fleet, tmp_path, "bob").side.close()
    bob = join(fleet, tmp_path, "bob")
    request = FakeRequest("second", PROMPT)
    assert bob.admit(request, local=4 * CHUNK) == RESTORED - 4 * CHUNK
    bob.step(second=len(PROMPT) - RESTORED)
    bob.finish(request)
    bob.step()
    assert hits(fleet, bob) == {Tier.SSD: RESTORED - 4 * CHUNK}
    assert bob.store.catalog.tiers.index.num_missing == 0, (
        "and from its pages the gap is closed again"
    )


def test_a_gap_without_any_copy_is_a_miss_until_it_is_computed_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    ann = fleet.join("ann")
    ann.run(FakeRequest("preamble", [*PREAMBLE, 7]))
    fleet.settle(ann)
    continuing(fleet, tmp_path, "bob").side.close()
    ann.side.close()
    bob = join(fleet, tmp_path, "bob")
    written = fleet.count(bob, "heterocache_ssd_written_bytes")
    assert bob.run(FakeRequest("second", PROMPT)) == 0
    fleet.settle(bob)
    assert bob.store.flush(WAIT_S)
    artifacts = list(bob.store.catalog.tiers.index.artifacts())
    assert all(a.ssd is not None for a in artifacts), "all of it is its own by now"
    anew = {a.node.chunk.end for a in artifacts if a.dram is not None}
    assert anew == {CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK}, "what was there is not saved again"
    assert fleet.count(bob, "heterocache_ssd_written_bytes") > written
    bob.side.close()
    bob = join(fleet, tmp_path, "bob")
    assert bob.run(FakeRequest("third", PROMPT)) == RESTORED
    assert hits(fleet, bob) == {Tier.SSD: RESTORED}


def test_a_peer_that_fails_in_the_gap_costs_only_the_chunks_after_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    ann = owning(fleet, tmp_path, "ann")
    continuing(fleet, tmp_path, "bob").side.close()
    bob = join(fleet, tmp_path, "bob")
    ann.store.sharing.serve_under(0)  # type: ignore[union-attr]
    assert bob.run(FakeRequest("second", PROMPT)) == 0
    assert bob.run(FakeRequest("third", PROMPT)) == RESTORED


def test_a_full_dram_evicts_copies_before_the_chunks_after_them(
    fleet: Fleet, tmp_path: Path
) -> None:
    owning(fleet, tmp_path, "ann")
    bob = continuing(fleet, tmp_path, "bob", dram_bytes=10 * chunk_bytes(fleet))
    other = tokens(9 * CHUNK + 1, seed=2)
    assert bob.run(FakeRequest("other", other)) == 0
    fleet.settle(bob)
    assert bob.store.flush(WAIT_S), "what is being written keeps its place in DRAM"
    index = bob.store.catalog.tiers.index
    until(lambda: index.num_missing > 0 or not any(a.replica for a in index.artifacts()))
    assert index.num_missing > 0
    assert bob.run(FakeRequest("second", PROMPT)) == RESTORED
    found = hits(fleet, bob)
    assert found[Tier.PEER] > 4 * CHUNK, "read once at first, and once more"
    assert found[Tier.SSD] == RESTORED - 4 * CHUNK


def test_a_checkpoint_alone_does_not_count_as_the_chunk(tmp_path: Path) -> None:
    """The copy of the checkpoint's chunk has left DRAM."""
    with joined(HYBRID) as fleet:
        owning(fleet, tmp_path, "ann")
        bob = continuing(fleet, tmp_path, "bob")
        store, index = bob.store, bob.store.catalog.tiers.index
        fourth = next(n for n in index.nodes.values() if n.chunk.end == 4 * CHUNK)
        assert store.sharing is not None
        store.sharing.resolve_claims({ArtifactId(fourth.key, StateType.WINDOW_SWA): 9}, ())
        assert store.flush(WAIT_S)
        with store.catalog.locked():
            theirs = fourth.artifacts[StateType.DENSE_KV]
            assert evictability(theirs, Tier.DRAM) is not Evictability.BLOCKED
            store.catalog.tiers.drop(theirs, Tier.DRAM)
            assert index.num_missing == 0
        assert bob.run(FakeRequest("second", PROMPT)) == RESTORED
        assert hits(fleet, bob)[Tier.PEER] == 5 * CHUNK, "the fourth chunk once more"


def test_a_dead_engines_continuation_is_adopted_with_its_beginning_from_a_third(
    fleet: Fleet, tmp_path: Path
) -> None:
    owning(fleet, tmp_path, "ann")
    bob = continuing(fleet, tmp_path, "bob")
    until(lambda: all(record.copy.on_ssd for record in _owned(fleet, bob)))
    bob.side.close()
    cay = join(fleet, tmp_path, "cay")
    assert cay.run(FakeRequest("second", PROMPT)) == RESTORED
    assert hits(fleet, cay) == {Tier.PEER: 4 * CHUNK, Tier.SSD: RESTORED - 4 * CHUNK}
    fleet.settle(cay)
    assert cay.store.flush(WAIT_S)
    adopted = [a for a in cay.store.catalog.tiers.index.artifacts() if a.token]
    assert adopted
    assert all(a.ssd is not None for a in adopted)
    cay.side.close()
    cay = join(fleet, tmp_path, "cay")
    assert cay.run(FakeRequest("third", PROMPT)) == RESTORED
    assert hits(fleet, cay) == {Tier.PEER: 4 * CHUNK, Tier.SSD: RESTORED - 4 * CHUNK}


def _owned(fleet: Fleet, engine: Engine) -> list[ArtifactRecord]:
    """Return the directory's records of the artifacts that an engine owns."""
    ours = {a.id for a in engine.store.catalog.tiers.index.artifacts() if a.token}
    return [record for artifact, record in fleet.records(engine).items() if artifact in ours]


def test_a_peers_chunks_after_a_local_gap_are_found(fleet: Fleet, tmp_path: Path) -> None:
    """Run two turns at one engine, one at another, the last at the first again."""
    ann = owning(fleet, tmp_path, "ann")
    bob = continuing(fleet, tmp_path, "bob")
    second = [*PROMPT, *tokens(50, seed=3)]
    assert ann.run(FakeRequest("second", second)) == RESTORED
    fleet.settle(ann)
    with ann.store.catalog.locked():
        for artifact in list(ann.store.catalog.tiers.index.artifacts()):
            if artifact.replica:
                ann.store.catalog.tiers.forget(artifact)
    fleet.settle(ann)
    until(lambda: not any(h.replicas for h in _owned(fleet, bob)))
    bob.side.close()
    bob = join(fleet, tmp_path, "bob")
    assert bob.run(FakeRequest("third", [*second, *tokens(100, seed=4)])) == 8 * CHUNK + 16
    from_ssd = 3 * CHUNK
    assert hits(fleet, bob) == {Tier.PEER: 8 * CHUNK + 16 - from_ssd, Tier.SSD: from_ssd}
