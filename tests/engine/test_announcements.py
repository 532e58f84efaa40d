"""A chunk is announced if and only if a chain through it can be resumed behind it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.engine.scheduler.announcements import (
    Announcements,
    BlocksRemoved,
    BlocksStored,
    Change,
    ChunkBlocks,
    Medium,
)

CHUNK, BLOCK = 64, 16
HERE = b"root"
CPU, STORAGE = Medium.CPU, Medium.STORAGE


def key(name: str) -> ChunkKey:
    return ChunkKey(name.encode().ljust(16, b"."))


def blocks(
    name: str, parent: ChunkBlocks | None = None, *, tokens: int = CHUNK, prompt: str = "",
    root: bytes = HERE, is_replayable: bool = True,
) -> ChunkBlocks:  # fmt: skip
    """Return the blocks of a chunk; those of equal `prompt` after one parent are equal."""
    start = parent.chunk.end if parent else 0
    above = parent.hashes[-1] if parent else 0
    return ChunkBlocks(
        ChunkRange(key(name), parent.chunk.key if parent else ROOT, start, start + tokens),
        root,
        tuple(hash((above, prompt or name, i)) for i in range(tokens // BLOCK)),
        above if parent else None,
        array("I", range(start, start + tokens)),
        is_replayable=is_replayable,
    )


def chain(count: int, name: str = "c", parent: ChunkBlocks | None = None) -> list[ChunkBlocks]:
    found: list[ChunkBlocks] = []
    for i in range(count):
        parent = blocks(f"{name}{i}", parent)
        found.append(parent)
    return found


class View:
    """The blocks of each medium, as the changes say."""

    def __init__(self) -> None:
        self.held: dict[Medium, set[int | bytes]] = {medium: set() for medium in Medium}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            held = self.held[change.medium]
            if isinstance(change, BlocksStored):
                added = change.blocks.hashes[change.first :]
                assert not held & set(added)
                held |= set(added)
            else:
                assert held >= set(change.hashes)
                held -= set(change.hashes)

    def has(self, chunk: ChunkBlocks, medium: Medium = CPU) -> bool:
        return self.held[medium] >= set(chunk.hashes)


class Bench:
    """Announcements, and a view of them that follows every change."""

    def __init__(self, replay_tokens: int | None = None) -> None:
        self.said = Announcements(replay_tokens)
        self.said.set_root(HERE)
        self.view = View()

    def describe(self, *chunks: ChunkBlocks) -> None:
        for chunk in chunks:
            self.said.describe(chunk)

    def store(
        self, chunk: ChunkBlocks, media: Sequence[Medium] = (CPU,), *, is_checkpoint: bool = True
    ) -> None:
        is_stored = bool(media)
        self.said.update(
            chunk.chunk.key, media, is_checkpoint=is_checkpoint and is_stored, is_stored=is_stored
        )
        self.see()

    def evict(self, chunk: ChunkBlocks) -> None:
        self.store(chunk, ())

    def see(self) -> list[Change]:
        changes: list[Change] = []
        while self.said.has_backlog:
            changes += self.said.take(1 << 20)
        self.view.apply(changes)
        return changes

    def announced(self, chunks: Sequence[ChunkBlocks]) -> list[int]:
        return [i for i, chunk in enumerate(chunks) if self.view.has(chunk)]


def test_chunks_count_up_to_the_last_checkpoint() -> None:
    bench, chunks = Bench(), chain(4)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk, is_checkpoint=False)
    assert bench.announced(chunks) == []
    bench.store(chunks[2])
    assert bench.announced(chunks) == [0, 1, 2]
    bench.store(chunks[2], is_checkpoint=False)
    assert bench.announced(chunks) == []


def test_a_replay_counts_the_tokens_before_it() -> None:
    bench, chunks = Bench(replay_tokens=100), chain(4)
    bench.describe(*chunks)
    seen = []
    for chunk in chunks:
        bench.store(chunk, is_checkpoint=False)
        seen.append(bench.announced(chunks))
    assert seen == [[], [], [0], [0, 1]], "a request resumes 100 tokens before the last boundary"
    bench.evict(chunks[3])
    assert bench.announced(chunks) == [0]


def test_a_chain_that_cannot_be_replayed_needs_a_checkpoint() -> None:
    bench = Bench(replay_tokens=0)
    media = blocks("image", is_replayable=False)
    bench.describe(media)
    bench.store(media, is_checkpoint=False)
    assert not bench.view.has(media)


def test_nothing_after_a_gap_counts_until_it_is_filled() -> None:
    bench, chunks = Bench(), chain(4)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk, is_checkpoint=chunk is chunks[3])
    assert bench.announced(chunks) == [0, 1, 2, 3]
    bench.evict(chunks[1])
    assert bench.announced(chunks) == []
    bench.store(chunks[1], is_checkpoint=False)
    assert bench.announced(chunks) == [0, 1, 2, 3]


def test_blocks_that_chunks_share_are_published_once() -> None:
    bench = Bench()
    short, full = blocks("s", tokens=32, prompt="p"), blocks("f", prompt="p")
    bench.describe(short, full)
    bench.store(short)
    bench.store(full)
    assert bench.view.has(full)
    bench.evict(short)
    assert bench.view.has(full), "the full chunk has the blocks of the short one"
    bench.store(full, ())
    assert not bench.view.held[CPU]


def test_an_event_of_the_rest_of_a_chunk_begins_at_its_first_new_block() -> None:
    said = Announcements()
    said.set_root(HERE)
    short, full = blocks("s", tokens=32, prompt="p"), blocks("f", prompt="p")
    for chunk in (short, full):
        said.describe(chunk)
        said.update(chunk.chunk.key, (CPU,), is_checkpoint=True, is_stored=True)
    assert said.take(9) == [BlocksStored(short, 0, CPU), BlocksStored(full, 2, CPU)]


def test_each_medium_is_announced_apart() -> None:
    bench, chunks = Bench(), chain(2)
    bench.describe(*chunks)
    for media in ((CPU,), (CPU, STORAGE), (STORAGE,), (CPU, STORAGE), ()):
        for chunk in chunks:
            bench.store(chunk, media)
        held = {m for m in Medium if bench.view.has(chunks[0], m) and bench.view.has(chunks[1], m)}
        assert held == set(media)


def test_another_root_withdraws_everything_and_the_first_brings_it_back() -> None:
    bench, chunks = Bench(), chain(3)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk)
    bench.said.set_root(b"new weights")
    bench.see()
    assert not bench.view.held[CPU]
    bench.said.set_root(HERE)
    bench.see()
    assert bench.announced(chunks) == [0, 1, 2]


def test_everything_is_announced_again_parents_first() -> None:
    bench, chunks = Bench(), chain(3)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk)
    bench.said.update(chunks[0].chunk.key, (), is_checkpoint=False, is_stored=True)  # not told yet
    bench.said.update(chunks[0].chunk.key, (CPU,), is_checkpoint=True, is_stored=True)
    bench.said.repeat()
    bench.view = View()
    assert bench.see() == [BlocksStored(chunk, 0, CPU) for chunk in chunks]


def test_withdrawals_that_follow_each_other_are_one_change() -> None:
    bench, chunks = Bench(), chain(3)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk)
    bench.said.set_root(None)
    hashes = tuple(block for chunk in chunks for block in chunk.hashes)
    assert bench.see() == [BlocksRemoved(hashes, CPU)]


def test_what_leaves_the_store_is_forgotten() -> None:
    bench, chunks = Bench(), chain(3)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.store(chunk)
    bench.evict(chunks[0])
    assert len(bench.said) == 3, "others need its place in the chain"
    bench.evict(chunks[2])
    bench.evict(chunks[1])
    assert len(bench.said) == 0
    assert bench.said._counts == {CPU: {}, STORAGE: {}}


def test_a_backlog_is_published_in_parts() -> None:
    bench, chunks = Bench(), chain(10)
    bench.describe(*chunks)
    for chunk in chunks:
        bench.said.update(chunk.chunk.key, (CPU,), is_checkpoint=True, is_stored=True)
    for told in range(3, 10, 3):
        while len(bench.announced(chunks)) < told:
            changes = bench.said.take(3)
            assert len(changes) <= 3
            bench.view.apply(changes)
        assert bench.announced(chunks) == list(range(told))
        assert bench.said.has_backlog
    bench.see()
    assert bench.announced(chunks) == list(range(10))
    assert not bench.said.has_backlog


def expected(
    stored: dict[ChunkKey, tuple[ChunkBlocks, Sequence[Medium], bool]], replay_tokens: int | None
) -> dict[Medium, set[int | bytes]]:
    """Return the blocks that can be resumed behind, found by following every chain."""
    held: dict[Medium, set[int | bytes]] = {medium: set() for medium in Medium}
    for described, media, is_checkpoint in list(stored.values()):
        above: list[tuple[ChunkBlocks, Sequence[Medium]]] = [(described, media)]
        while above[-1][0].chunk.parent != ROOT:
            parent = stored[above[-1][0].chunk.parent]
            above.append((parent[0], parent[1]))
        if not all(media for _, media in above) or above[-1][0].root != HERE:
            continue
        resume = described.chunk.end
        if not is_checkpoint:
            if replay_tokens is None or not described.is_replayable:
                continue
            resume -= replay_tokens
        for chunk, chunk_media in above:
            for medium in chunk_media if chunk.chunk.end <= resume else ():
                held[medium] |= set(chunk.hashes)
    return held


@pytest.mark.parametrize("replay_tokens", [None, 0, 100, 200])
def test_a_view_is_what_can_be_resumed_after_any_changes(replay_tokens: int | None) -> None:
    rng = Random(f"announcements {replay_tokens}")
    for _ in range(40):
        bench = Bench(replay_tokens)
        described: list[ChunkBlocks] = []
        stored: dict[ChunkKey, tuple[ChunkBlocks, Sequence[Medium], bool]] = {}
        for turn in range(60):
            if not described or rng.random() < 0.4:
                full = [
                    x for x in described if x.chunk.end % CHUNK == 0 and x.chunk.key in bench.said
                ]
                parent = rng.choice([None, *full])
                new = blocks(
                    f"{turn}", parent, tokens=rng.choice([CHUNK, CHUNK, 32]),
                    prompt=rng.choice(["x", "y", f"{turn}"]),
                    root=parent.root if parent else rng.choice([HERE, HERE, b"old"]),
                    is_replayable=parent.is_replayable if parent else rng.random() < 0.8,
                )  # fmt: skip
                described.append(new)
                bench.describe(new)
                stored[new.chunk.key] = new, (), False
            chunk = rng.choice([x for x in described if x.chunk.key in bench.said] or described)
            if chunk.chunk.key not in bench.said:
                continue
            media = rng.choice([(), (CPU,), (STORAGE,), (CPU, STORAGE), (CPU,)])
            is_checkpoint = bool(media) and rng.random() < 0.4
            bench.said.update(
                chunk.chunk.key, media, is_checkpoint=is_checkpoint, is_stored=bool(media)
            )
            stored[chunk.chunk.key] = chunk, media, is_checkpoint
            if rng.random() < 0.05:
                bench.said.repeat()
                bench.view = View()
            bench.see()
            assert bench.view.held == expected(stored, replay_tokens)
