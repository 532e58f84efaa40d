"""Holds: counted when somebody asks, and each of them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from filling import CHUNK, CHUNK_BYTES, DENSE, SLOTS, WINDOW, chain, put
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, StoredChunk
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.catalog import hold as hold_module
from hetero_connector.store.catalog.hold import Hold, Holds
from hetero_connector.store.catalog.nodes import Artifact, Node

KINDS = (DENSE, WINDOW)
KEYS = [ChunkKey(bytes([n + 1]) * 16) for n in range(6)]
ARTIFACTS = {
    (kind, key): Artifact(Node(ChunkRange(key, ROOT, 0, CHUNK), None), kind, 1)
    for kind in KINDS
    for key in KEYS
}


def stored(key: ChunkKey) -> StoredChunk:
    return StoredChunk(ChunkRange(key, ROOT, 0, CHUNK), {})


def hold_of(wanted: Sequence[tuple[StateType, Sequence[ChunkKey]]]) -> Hold:
    return Hold([Wanted(kind, [stored(key) for key in keys]) for kind, keys in wanted])


WANTED = st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.sampled_from(KEYS))), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), WANTED),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("ask"), st.sampled_from(sorted(ARTIFACTS))),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_an_artifact_is_held_while_any_hold_names_it_and_returned_by_the_last(
    steps: list[tuple[str, object]],
) -> None:
    holds, running, waiting = Holds(), [], set[Artifact]()

    def is_held(kind: StateType, key: ChunkKey) -> bool:
        return any(k is kind and key in keys for _, wanted in running for k, keys in wanted)

    for what, value in steps:
        if what == "add":
            running.append((hold_of(value), value))  # type: ignore[arg-type]
            holds.add(running[-1][0])
        elif what == "remove" and running:
            hold, _ = running.pop(value % len(running))  # type: ignore[operator]
            returned = holds.remove(hold)
            ended = {a for a in waiting if not is_held(a.state_type, a.node.key)}
            assert len(returned) == len(ended), "each once"
            assert set(returned) == ended
            waiting -= ended
        elif what == "ask":
            artifact = ARTIFACTS[value]  # type: ignore[index]
            found = holds.has(artifact)
            assert found == is_held(*value)  # type: ignore[misc]
            if holds.pass_over(artifact):
                waiting.add(artifact)


class CountedLooks(Sequence[StoredChunk]):
    """Chunks that know how often somebody went through them."""

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._chunks = chunks
        self.looks = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, at: int) -> StoredChunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[StoredChunk]: ...
    def __getitem__(self, at: int | slice) -> StoredChunk | Sequence[StoredChunk]:
        return self._chunks[at]

    def __iter__(self) -> Iterator[StoredChunk]:
        self.looks += 1
        return iter(self._chunks)


def test_a_hold_is_looked_into_once_however_many_evictions_ask() -> None:
    store = ArtifactStore.open(
        SLOTS,
        StoreConfig(dram_bytes=20 * CHUNK_BYTES),
        Recorder(),
        chunk_tokens=CHUNK,
        fingerprint=b"f" * 16,
        description={},
    )
    kept = chain("kept", 4)
    put(store, kept)
    found = store.match(kept)
    restores, counted = [], []
    for _ in range(50):
        restores.append(store.begin_restore([Wanted(DENSE, found), Wanted(WINDOW, found[-1:])]))
        chunks = CountedLooks(found)
        counted.append((Hold([Wanted(DENSE, chunks)]), chunks))
        store._tiers.hold(counted[-1][0])
    assert [c.looks for _, c in counted] == [0] * 50, "to begin costs no look at the chunks"
    for n in range(40):
        put(store, chain(f"other {n}", 1))
    assert len(store.match(kept)) == 4
    assert [c.looks for _, c in counted] == [1] * 50
    for hold, _ in counted:
        store._tiers.let_go(hold)
    for restore in restores:
        restore.release()
    for n in range(40, 80):
        put(store, chain(f"other {n}", 1))
    assert not store.match(kept), "what was passed over leaves once nobody holds it"
    store.check_integrity()
    store.close()


def test_only_so_many_artifacts_wait_to_be_counted() -> None:
    holds, limit = Holds(), hold_module._MAX_UNCOUNTED
    big = CountedLooks([stored(KEYS[0])] * limit)
    small = [CountedLooks([stored(KEYS[0])]) for _ in range(limit)]
    for column in (big, *small):
        holds.add(Hold([Wanted(DENSE, column)]))
    assert big.looks == 1
    assert 0 < sum(column.looks == 0 for column in small) <= limit // hold_module._HOLD_ITSELF


def test_a_hold_that_nobody_asked_about_ends_without_a_look() -> None:
    holds, column = Holds(), CountedLooks([stored(KEYS[0])])
    hold = Hold([Wanted(DENSE, column)])
    holds.add(hold)
    assert holds.remove(hold) == []
    assert column.looks == 0
    assert not holds.has(ARTIFACTS[DENSE, KEYS[0]])
