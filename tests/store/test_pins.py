"""Pins on chains: counted when an eviction asks, and each of them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, StoredChunk
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.catalog import pins
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.pins import ChainPin, ChainPins
from tests.store.filling import CHUNK, CHUNK_BYTES, DENSE, SLOTS, WINDOW, chain, put

KINDS = (DENSE, WINDOW)
KEYS = [ChunkKey(bytes([n + 1]) * 16) for n in range(6)]
ARTIFACTS = {
    (kind, key): Artifact(Node(ChunkRange(key, ROOT, 0, CHUNK), None), kind, 1)
    for kind in KINDS
    for key in KEYS
}


def stored(key: ChunkKey) -> StoredChunk:
    return StoredChunk(ChunkRange(key, ROOT, 0, CHUNK), {})


def pin_of(wanted: Sequence[tuple[StateType, Sequence[ChunkKey]]]) -> ChainPin:
    return ChainPin([Wanted(kind, [stored(key) for key in keys]) for kind, keys in wanted])


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
def test_an_artifact_is_pinned_while_any_pin_names_it_and_returned_by_the_last(
    steps: list[tuple[str, object]],
) -> None:
    all_pins, running, waiting = ChainPins(), [], set[Artifact]()

    def is_pinned(kind: StateType, key: ChunkKey) -> bool:
        return any(k is kind and key in keys for _, wanted in running for k, keys in wanted)

    for what, value in steps:
        if what == "add":
            running.append((pin_of(value), value))  # type: ignore[arg-type]
            all_pins.add(running[-1][0])
        elif what == "remove" and running:
            pin, _ = running.pop(value % len(running))  # type: ignore[operator]
            returned = all_pins.remove(pin)
            ended = {a for a in waiting if not is_pinned(a.state_type, a.node.key)}
            assert len(returned) == len(ended), "each once"
            assert set(returned) == ended
            waiting -= ended
        elif what == "ask":
            artifact = ARTIFACTS[value]  # type: ignore[index]
            found = all_pins.has(artifact)
            assert found == is_pinned(*value)  # type: ignore[misc]
            if all_pins.pass_over(artifact):
                waiting.add(artifact)


class CountedLooks(Sequence[StoredChunk]):
    """Chunks that count how often they were iterated over."""

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


def test_a_pin_is_counted_once_however_many_evictions_ask() -> None:
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
        counted.append((ChainPin([Wanted(DENSE, chunks)]), chunks))
        store.catalog.tiers.pin_chain(counted[-1][0])
    assert [c.looks for _, c in counted] == [0] * 50, "to begin costs no look at the chunks"
    for n in range(40):
        put(store, chain(f"other {n}", 1))
    assert len(store.match(kept)) == 4
    assert [c.looks for _, c in counted] == [1] * 50
    for pin, _ in counted:
        store.catalog.tiers.unpin_chain(pin)
    for restore in restores:
        restore.release()
    for n in range(40, 80):
        put(store, chain(f"other {n}", 1))
    assert not store.match(kept), "what was passed over leaves once it is not pinned"
    store.check_integrity()
    store.close()


def test_only_so_many_artifacts_wait_to_be_counted() -> None:
    all_pins, limit = ChainPins(), pins._MAX_UNCOUNTED
    big = CountedLooks([stored(KEYS[0])] * limit)
    small = [CountedLooks([stored(KEYS[0])]) for _ in range(limit)]
    for column in (big, *small):
        all_pins.add(ChainPin([Wanted(DENSE, column)]))
    assert big.looks == 1
    assert 0 < sum(column.looks == 0 for column in small) <= limit // pins._COST_OF_PIN


def test_a_pin_that_no_eviction_asked_about_ends_uncounted() -> None:
    all_pins, column = ChainPins(), CountedLooks([stored(KEYS[0])])
    pin = ChainPin([Wanted(DENSE, column)])
    all_pins.add(pin)
    assert all_pins.remove(pin) == []
    assert column.looks == 0
    assert not all_pins.has(ARTIFACTS[DENSE, KEYS[0]])
