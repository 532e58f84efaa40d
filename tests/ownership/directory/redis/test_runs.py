"""Chunks are stored in runs: no claim or release loses or duplicates one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgpack
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from ownership.directory import (
    ArtifactRecord,
    ChunkRecords,
    Claim,
    Directory,
    DirectoryLimits,
    GrantOutcome,
)
from ownership.directory.memory import MemoryDirectory
from ownership.directory.redis.encoding import run_entries
from ownership.directory.redis.scripts import fleet_key, run_starts
from tests.ownership.fleet_bench import KV, WINDOW, chain, copy_of, join
from tests.ownership.redis_bench import RedisBench, shared_server

LIMITS = DirectoryLimits()
TRUNK = chain("trunk", 300)
BRANCHES = [[*TRUNK[:at], *chain(f"branch {at}", 12)] for at in (0, 1, 63, 64, 65, 200)]
CHAINS = [TRUNK, *BRANCHES]


class Fleet:
    """The same calls to both directories, which must give the same answers."""

    def __init__(self) -> None:
        self.bench = RedisBench(LIMITS)
        self.both: tuple[Directory, Directory] = (self.bench.open(), MemoryDirectory())
        self.epochs = [join(directory, "ann", lease_s=1_000.0).epoch for directory in self.both]

    def claim(self, keys: list[ChunkKey], first: int, with_parents: bool, window: bool) -> None:
        claims = []
        for index in range(first, len(keys)):
            parent = keys[index - 1] if with_parents and index else ROOT
            kinds = (KV, WINDOW) if window else (KV,)
            for kind in kinds:
                artifact = ArtifactId(keys[index], kind)
                claims.append(Claim(artifact, copy_of(artifact), parent))
        for directory, epoch in zip(self.both, self.epochs, strict=True):
            directory.claim_owner(epoch, claims)

    def release(self, keys: list[ChunkKey], window_too: bool) -> None:
        kinds = (KV, WINDOW) if window_too else (KV,)
        for directory, epoch in zip(self.both, self.epochs, strict=True):
            view = directory.lookup(keys)
            owned = {
                ArtifactId(key, kind): found[kind].token
                for key, found in zip(keys, view.chunks, strict=True)
                for kind in kinds
                if kind in found
            }
            directory.release(epoch, owned)

    def check(self) -> None:
        remote, local = self.both
        for keys in CHAINS:
            assert list(map(shape, remote.lookup(keys).chunks)) == list(
                map(shape, local.lookup(keys).chunks)
            )
        check_stored(self.bench)

    def close(self) -> None:
        self.bench.close()


def shape(records: ChunkRecords) -> dict[str, object]:
    """Return all fields except epochs and tokens, which two directories number differently."""

    def of(record: ArtifactRecord) -> tuple[object, ...]:
        return record.copy, record.replicas, record.owner != 0

    return {str(kind): of(record) for kind, record in records.items()}


def check_stored(bench: RedisBench) -> None:
    """Check that every field leads to one run that has it, and that the count is right."""
    database = redis.Redis.from_url(shared_server().url)
    index = database.hgetall(fleet_key(bench.fleet, "chunks"))
    runs = database.hgetall(fleet_key(bench.fleet, "runs"))
    seen: dict[bytes, bytes] = {}
    num_artifacts = 0
    for head, value in runs.items():
        keys = [index[head][at : at + 16] for at in range(0, len(index[head]), 16)]
        entries = run_entries(value)
        assert keys[0] == head
        assert run_starts(index[head]) == [0]
        assert len(keys) == len(entries) <= 256
        assert all(entries[1:]), "an empty entry that is not the first"
        assert any(entries), "a run of nothing"
        assert not seen.keys() & set(keys), "a chunk in two runs"
        seen |= dict.fromkeys(keys, head)
        num_artifacts += sum(len(msgpack.unpackb(entry, raw=True)) for entry in entries if entry)
    pointers = {key: value for key, value in index.items() if key not in runs}
    assert pointers == {key: b"\2" + head for key, head in seen.items() if key != head}
    counted = database.hget(fleet_key(bench.fleet, "fleet"), "artifacts") or 0
    assert int(counted) == num_artifacts
    database.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def num_runs(bench: RedisBench) -> int:
    database = redis.Redis.from_url(shared_server().url)
    count = database.hlen(fleet_key(bench.fleet, "runs"))
    database.close()
    return int(count)


def test_a_chain_claimed_chunk_by_chunk_is_kept_in_few_runs(fleet: Fleet) -> None:
    for index in range(len(TRUNK)):
        fleet.claim(TRUNK[: index + 1], index, True, False)
    fleet.check()
    starts = [*run_starts(b"".join(TRUNK)), len(TRUNK)]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    assert max(lengths) > 256, "a run that is too long is not tried"
    assert num_runs(fleet.bench) == sum(-(-length // 256) for length in lengths)


def test_without_parents_every_chunk_is_found_too(fleet: Fleet) -> None:
    fleet.claim(TRUNK, 0, False, True)
    fleet.check()
    assert num_runs(fleet.bench) == len(TRUNK)


def test_a_chain_that_leaves_another_in_the_middle_of_a_run(fleet: Fleet) -> None:
    fleet.claim(TRUNK, 0, True, False)
    for branch in BRANCHES:
        fleet.claim(branch, 0, True, True)
    fleet.check()


def test_the_first_chunk_of_a_run_may_go_and_come_back(fleet: Fleet) -> None:
    fleet.claim(TRUNK, 0, True, False)
    fleet.release(TRUNK[:1], False)
    fleet.check()
    fleet.release(TRUNK[5:8], False)
    fleet.check()
    fleet.claim(TRUNK, 0, True, False)
    fleet.check()
    fleet.release(TRUNK, False)
    fleet.check()
    assert num_runs(fleet.bench) == 0


@settings(max_examples=40)
@given(data=st.data())
def test_any_claims_and_releases(data: st.DataObject) -> None:
    fleet = Fleet()
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            keys = data.draw(st.sampled_from(CHAINS))
            first = data.draw(st.integers(0, len(keys) - 1))
            last = data.draw(st.integers(first + 1, len(keys)))
            if data.draw(st.booleans()):
                fleet.claim(keys[:last], first, data.draw(st.booleans()), data.draw(st.booleans()))
            else:
                fleet.release(keys[first:last], data.draw(st.booleans()))
        fleet.check()
    finally:
        fleet.close()


@pytest.mark.parametrize("run", [None, b"", b"\1junk"])
def test_a_sweep_forgets_what_a_lost_run_has_left(fleet: Fleet, run: bytes | None) -> None:
    fleet.claim(TRUNK, 0, True, False)
    directory, key = fleet.both[0], lambda name: fleet_key(fleet.bench.fleet, name)
    with redis.Redis.from_url(shared_server().url) as database:
        index = database.hgetall(key("chunks"))
        heads = database.hkeys(key("runs"))
        lost = max(heads, key=lambda head: len(index[head]))
        assert len(index[lost]) > 16, "a run of one chunk has no pointers"
        kept = index.keys() - {index[lost][at : at + 16] for at in range(0, len(index[lost]), 16)}
        before = int(database.hget(key("fleet"), "fields"))
        if run is None:
            database.hdel(key("runs"), lost)
        else:
            database.hset(key("runs"), lost, run)
        # Pointers may come before what they point to.
        num_forgotten = sum(directory.sweep(10_000) for _ in range(2))
        assert database.hgetall(key("chunks")) == {x: index[x] for x in kept}
        assert set(database.hkeys(key("runs"))) == set(heads) - {lost}
        # A field that the scripts have deleted is no loss, one that was lost is.
        stored = database.hlen(key("chunks")) + database.hlen(key("runs"))
        after = int(database.hget(key("fleet"), "fields"))
        assert num_forgotten == before - after > 0
        assert after - stored == (1 if run is None else 0)
        counted = int(database.hget(key("fleet"), "artifacts"))
        assert abs(counted - len(kept)) <= len(heads), "a run has one field more than chunks"


def test_after_a_loss_of_all_runs_a_sweep_makes_room_for_all_claims() -> None:
    bench = RedisBench(DirectoryLimits(max_artifacts=3 * len(TRUNK)))
    directory, key = bench.open(), lambda name: fleet_key(bench.fleet, name)
    epoch = join(directory, "ann", lease_s=1_000.0).epoch
    artifacts = [ArtifactId(chunk, kind) for chunk in TRUNK for kind in (KV, WINDOW)]
    parents = [parent for parent in (ROOT, *TRUNK) for _ in (KV, WINDOW)]
    claims = [Claim(x, copy_of(x), y) for x, y in zip(artifacts, parents, strict=False)]
    directory.claim_owner(epoch, claims)
    with redis.Redis.from_url(shared_server().url) as database:
        database.delete(key("runs"))
        directory.renew_lease(epoch)
        assert sum(directory.sweep(10_000) for _ in range(2)) == len(TRUNK)
        assert database.hget(key("fleet"), "artifacts") == b"0"
        grants = directory.claim_owner(epoch, claims)
        assert {grant.outcome for grant in grants} == {GrantOutcome.OWNED}
        check_stored(bench)
        directory.release(epoch, {x: y.token for x, y in zip(artifacts, grants, strict=True)})
        assert database.hget(key("fleet"), "artifacts") == b"0"
    bench.close()


@pytest.mark.parametrize("loss", ["all", "one", "one that another run has by now"])
def test_a_sweep_forgets_runs_whose_first_chunk_is_lost(fleet: Fleet, loss: str) -> None:
    first, second = chain("a chain", 2)
    assert run_starts(first + second) == [0], "the second begins no run"
    fleet.claim([first], 0, False, False)
    fleet.claim([second], 0, False, False)
    directory, key = fleet.both[0], lambda name: fleet_key(fleet.bench.fleet, name)
    with redis.Redis.from_url(shared_server().url) as database:
        assert set(database.hkeys(key("runs"))) == {first, second}
        if loss == "all":
            database.delete(key("chunks"))
        else:
            database.hdel(key("chunks"), second)
        if loss == "one that another run has by now":
            fleet.claim([first, second], 1, True, False)
            assert database.hget(key("chunks"), second) == b"\2" + first
        num_lost = 2 if loss == "all" else 1
        assert directory.sweep(10_000) == num_lost
        assert database.hkeys(key("runs")) == ([] if loss == "all" else [first])
        if loss == "all":
            directory.renew_lease(fleet.epochs[0])
            assert database.hget(key("fleet"), "artifacts") == b"0"
