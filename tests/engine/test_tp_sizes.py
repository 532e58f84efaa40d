"""State saved by some ranks is loaded by other ranks: by copies, NIXL and an SSD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.artifacts.tensor_parallel import whole_model
from hetero_connector.engine.messages import ArtifactCopy
from hetero_connector.engine.worker.pages import check_cut_by_heads, run_views
from hetero_connector.errors import ConfigError, UnsupportedModelError
from hetero_connector.metrics import Recorder
from hetero_connector.spec import Family
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.peers.ports import PeerAccess
from tests.artifacts.whole_pages import LAYERS, TP_SIZES, model_of
from tests.engine.ranks import CHUNK, NUM_BLOCKS, Ranks, whole_pages
from tests.store.filling import wait
from tests.waiting import until

TOKENS = 2 * CHUNK
PRODUCER, CONSUMER = 7, 8
ANY = whole_model(model_of(1))

Engines = tuple[int, int, list[int], int]


def artifacts(ranks: Ranks, offset_of: Callable[[int], int]) -> list[ArtifactCopy]:
    """Return the artifacts of two chunks and a checkpoint, placed one after another."""
    spans = [
        (kind, start, start + CHUNK)
        for kind in ranks.layout.model.state_types
        for start in range(0, TOKENS, CHUNK)
        if kind.family is Family.PREFIX or start + CHUNK == TOKENS
    ]
    return [ArtifactCopy(*span, offset_of(i)) for i, span in enumerate(spans)]


ENGINES = st.tuples(
    st.sampled_from(TP_SIZES),
    st.sampled_from(TP_SIZES),
    st.permutations(range(1, NUM_BLOCKS)),
    st.integers(0, 2**32),
)
"""The TP sizes of producer and consumer, block ids, a seed."""


@settings(max_examples=25, deadline=None)
@given(ENGINES)
def test_ranks_load_state_that_other_ranks_saved(engines: Engines) -> None:
    check_that_ranks_load_what_others_saved("host", *engines)


@settings(max_examples=3, deadline=None)
@given(ENGINES)
def test_ranks_load_state_that_other_ranks_saved_on_cuda(engines: Engines) -> None:
    check_that_ranks_load_what_others_saved("cuda", *engines)


def check_that_ranks_load_what_others_saved(
    kind: str, producer: int, consumer: int, blocks: list[int], seed: int
) -> None:
    whole = whole_pages(LAYERS, TOKENS, seed)
    used = blocks[: TOKENS // 16]
    saving = Ranks(LAYERS, producer, kind)
    slot = max(saving.layout.max_bytes.values()) + 64
    places = artifacts(saving, lambda i: i * slot)
    arena = np.full(len(places) * slot, 0xEE, np.uint8)
    saving.compute(whole, used)
    saving.copy(arena, places, used, save=True)
    alone = Ranks(LAYERS, 1)
    alone.compute(whole, used)
    expected = np.full_like(arena, 0xEE)
    alone.copy(expected, places, used, save=True)
    assert np.array_equal(arena, expected), "an artifact's bytes depend on who saved it"
    loading = Ranks(LAYERS, consumer, kind)
    others = blocks[-len(used) :]
    loading.copy(arena, places, others, save=False)
    loading.check(whole, others, TOKENS)


class Engine:
    """A store and the ranks that fill it."""

    def __init__(
        self, tp_size: int, epoch: int, peers: KnownPeers, ssd: Path | None = None
    ) -> None:
        self.ranks = Ranks(LAYERS, tp_size)
        sizes = self.ranks.layout.max_bytes
        slots = sum(-(-size // 4096) * 4096 for size in sizes.values())
        self.store = ArtifactStore.open(
            sizes,
            StoreConfig(4 * slots, ssd, 1 << 22, spill_delay_s=0.0),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=b"any",
            description={},
            peers=None if ssd else PeerAccess(peers),
        )
        self._epoch = epoch
        if self.store.sharing is not None:
            peers.cards[epoch] = self.store.sharing.card
            self.store.sharing.serve_under(epoch)

    def save(self, chunks: list[ChunkRange], blocks: list[int]) -> None:
        for chunk in chunks:
            sizes = {t: n for t in ANY.state_types if (n := self._bytes(chunk, t))}
            save = self.store.begin_save(chunk, sizes)
            assert save is not None
            copies = [ArtifactCopy(t, chunk.start, chunk.end, at) for t, at in save.offsets.items()]
            self.ranks.copy(self.store.arena.view, copies, blocks, save=True)
            self.store.complete_save(save)

    def exported(self, count: int) -> dict[ArtifactId, PeerCopy]:
        """Return the places of the next `count` artifacts, as a directory would."""
        copies: dict[ArtifactId, PeerCopy] = {}
        sharing = self.store.sharing
        assert sharing is not None

        def are_all_told() -> bool:
            for change in sharing.take_exports():
                assert change.copy is not None
                c = change.copy
                copies[change.id] = PeerCopy(
                    self._epoch, c.dram_offset, c.generation, c.size_bytes, c.checksum
                )
            return len(copies) >= count

        until(are_all_told)
        return copies

    def load(self, chunks: list[ChunkRange], blocks: list[int], copies=None) -> None:
        """Restore all prefix-proportional state and the checkpoint at the end."""
        everything = dict.fromkeys(ANY.state_types, Tier.PEER)
        found = self.store.match(chunks) or [StoredChunk(c, everything) for c in chunks]
        wanted = [
            Wanted(t, found if t.family is Family.PREFIX else found[-1:]) for t in ANY.state_types
        ]
        restore = wait(self.store.begin_restore(wanted, copies))
        assert not restore.failed
        places = [
            ArtifactCopy(t, stored.chunk.start, stored.chunk.end, at)
            for (t, column), offsets in zip(wanted, restore.columns, strict=True)
            for stored, at in zip(column, offsets, strict=True)
        ]
        self.ranks.copy(self.store.arena.view, places, blocks, save=False)
        restore.release()

    def _bytes(self, chunk: ChunkRange, kind) -> int:
        return self.ranks.layout.artifact_bytes(kind, chunk.start, chunk.end)


def prompt(seed: int) -> list[ChunkRange]:
    """Return the chunks of a prompt with the keys that every engine of the fleet uses."""
    chain = RequestChain(ChainHasher(b"any", CHUNK))
    chain.extend(range(seed, seed + TOKENS))
    return list(chain.chunks())


SIZES = [(2, 1), (1, 2), (4, 2), (2, 8), (8, 1)]
THERE, HERE = list(range(1, 9)), list(range(20, 12, -1))


@pytest.mark.parametrize(("producer", "consumer"), SIZES)
def test_engines_read_each_other_over_nixl(producer: int, consumer: int) -> None:
    peers, chunks = KnownPeers(), prompt(5)
    whole = whole_pages(LAYERS, TOKENS, producer)
    one, other = Engine(producer, PRODUCER, peers), Engine(consumer, CONSUMER, peers)
    try:
        one.ranks.compute(whole, THERE)
        one.save(chunks, THERE)
        copies = one.exported(2 * len(ANY.state_types))
        other.load(chunks, HERE, copies)
        other.ranks.check(whole, HERE, TOKENS)
        # It has stored what it read, with the same checksum, so a third engine can read it.
        needed = {i for i in copies if i.state_type.family is Family.PREFIX}
        needed |= {i for i in copies if i.chunk == chunks[-1].key}
        assert {a.id for a in other.store.catalog.tiers.index.artifacts() if a.sealed} == needed
    finally:
        other.store.close()
        one.store.close()


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_an_engine_that_starts_again_with_other_ranks_has_its_ssd(
    tmp_path: Path, before: int, after: int
) -> None:
    chunks, whole = prompt(6), whole_pages(LAYERS, TOKENS, before)
    first = Engine(before, PRODUCER, KnownPeers(), tmp_path)
    first.ranks.compute(whole, THERE)
    first.save(chunks, THERE)
    assert first.store.flush(30.0)
    first.store.close()
    second = Engine(after, PRODUCER, KnownPeers(), tmp_path)
    try:
        assert [set(x.tiers.values()) for x in second.store.match(chunks)] == [{Tier.SSD}] * 2
        second.load(chunks, HERE)
        second.ranks.check(whole, HERE, TOKENS)
    finally:
        second.store.close()


def test_blocks_that_the_backend_divides_are_refused_at_start() -> None:
    (full, *_), mla = model_of(1).layers, model_of(1).layers[2]
    divided = torch.zeros(NUM_BLOCKS, 2, 8, 4, 3, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"tp_sizes.*full\.a.*into 2"):
        check_cut_by_heads(full, divided)
    check_cut_by_heads(full, divided[:, :1])
    check_cut_by_heads(mla, divided[:, :, :1])


def test_pages_of_several_runs_must_lie_in_one_piece() -> None:
    delta = model_of(2).layers[-1]
    ranks = Ranks(LAYERS, 2)
    runs = ranks.layout.page_runs(delta, 0)
    strided = torch.zeros(NUM_BLOCKS, delta.page_bytes, 2, dtype=torch.uint8)[..., 0]
    with pytest.raises(UnsupportedModelError, match=r"delta.*strided"):
        list(run_views(delta, strided, runs))
