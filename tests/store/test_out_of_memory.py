"""A control group whose memory runs out: the kernel kills an engine, or its peer process alone.

The groups are made by the test itself, for which it must be root. Where they cannot be, it is
skipped, and a test in its place sends the signal that the kernel would, at moments from a seed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector import machine
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.errors import ConfigError
from hetero_connector.store.arena import Arena
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Wanted
from hetero_connector.tools.verification import verify_model
from tests.store.filling import chain, wait
from tests.store.memory_group import MemoryGroup, memory_group, why_no_groups
from tests.store.peer_engine import BIG, CHUNKS, Told, engines, open_store, right
from tests.waiting import until

MIB = 1 << 20
EPOCH, OTHERS = 7, 8
SSD_BYTES = 64 * MIB
CHAINS = 12
context = multiprocessing.get_context("spawn")
"""Nothing of another process's memory is counted as theirs."""


def reasons() -> list[Any]:
    """Return the ways in which a process ends here: parameters of a test."""
    why = why_no_groups()
    real = pytest.param("out of memory", marks=pytest.mark.skipif(bool(why), reason=why))
    return [real, "kill -9"] if why else [real]


def chunks_of(number: int) -> list[ChunkRange]:
    return chain(f"saved {number % CHAINS}", 3)


def hungry(pipe: Connection, group: MemoryGroup | None, root: Path) -> None:
    """Runs in an engine's process: saves and takes memory, step by step, as it is told.

    Asked to `restore`, it answers with how many artifacts of CHUNKS came from a peer.
    """
    if group is not None:
        group.take_in_this_process()
    peers = KnownPeers()
    store = open_store(peers, ssd_dir=root, ssd_bytes=SSD_BYTES, peer_deadline_s=5.0)
    assert store.sharing is not None
    store.sharing.serve_under(EPOCH)
    child = psutil.Process().children()[0].pid
    pipe.send(child)
    eaten: list[bytearray] = []
    number = 0
    while True:
        what, given = pipe.recv()
        if what == "step":
            number += 1
            save(store, number)
            eaten.append(bytearray(b"\1") * given)
            pipe.send(number)
        elif what == "flush":
            pipe.send(store.flush(60))
        elif what == "restore":
            pipe.send(restored(store, peers, given))
        elif what == "card":
            pipe.send(store.sharing.card)
        else:
            store.close()
            pipe.send(True)
            return


def save(store: ArtifactStore, number: int) -> None:
    """Save what is missing of a chain; where there is no room nothing is saved."""
    for chunk in chunks_of(number):
        missing = store.missing(chunk, list(BIG))
        made = store.begin_save(chunk, {kind: BIG[kind] for kind in missing}) if missing else None
        if made is not None:
            for kind, offset in made.offsets.items():
                store.arena.view[offset : offset + BIG[kind]] = right(chunk)[kind]
            store.complete_save(made)
            store.sharing.resolve_claims(
                {ArtifactId(chunk.key, kind): 1 for kind in made.offsets}, []
            )


def restored(store: ArtifactStore, peers: KnownPeers, told: Told) -> int:
    card, copies = told
    peers.cards[OTHERS] = card
    remote = [StoredChunk(c, dict.fromkeys(BIG, Tier.PEER)) for c in CHUNKS]
    restore = wait(store.begin_restore([Wanted(kind, remote) for kind in BIG], copies))
    check(store, {ArtifactId(c.key, k): d for c in CHUNKS for k, d in right(c).items()}, restore)
    arrived = len(restore.offsets)
    restore.release()
    keys = {chunk.key for chunk in CHUNKS}
    with store.catalog.locked():
        for artifact in list(store.catalog.tiers.index.artifacts()):
            if artifact.id.chunk in keys:
                store.catalog.tiers.forget(artifact)
    return arrived


def check(store: ArtifactStore, contents: dict[ArtifactId, Any], restore: Any) -> None:
    for artifact, at in restore.offsets.items():
        found = store.arena.view[at : at + BIG[artifact.state_type]]
        assert np.array_equal(found, contents[artifact]), "a wrong byte was served"


class Engine:
    """One such process."""

    def __init__(self, group: MemoryGroup | None, root: Path) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=hungry, args=(theirs, group, root), daemon=True)
        self.process.start()
        theirs.close()
        self.child = self.answer()
        """Its peer process."""

    def ask(self, what: str, given: Any = None) -> Any:
        self._pipe.send((what, given))
        return self.answer()

    def answer(self) -> Any:
        """EOFError if it has died."""
        assert self._pipe.poll(60), "it hangs"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()
        until(lambda: not psutil.pid_exists(self.child))


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[MemoryGroup | None]:
    made = memory_group() if request.param == "out of memory" else nullcontext()
    with made as group:
        yield group


@pytest.mark.parametrize("group", reasons(), indirect=True)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_saves_leaves_what_can_be_served(
    tmp_path: Path, group: MemoryGroup | None, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(group, tmp_path)
    if group is not None:
        group.limit(group.used_bytes + rng.randrange(40, 120) * MIB)
    dies_at = rng.randrange(10, 30)
    with suppress(EOFError, ConnectionError):
        for number in range(200):
            engine.ask("step", 4 * MIB)
            if number % 8 == 7:
                engine.ask("flush")
            if group is None and number == dies_at:
                os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.join(60)
    assert engine.process.exitcode == -signal.SIGKILL, "it was not killed: the test shows nothing"
    assert group is None or group.kills
    engine.end()
    assert served_from(tmp_path) > 0, "nothing was written before: the test shows nothing"


def served_from(root: Path) -> int:
    """Return the number of artifacts that a dead engine's directory serves, all of them right."""
    (ssd,) = (path for path in root.iterdir() if path.is_dir())
    assert not verify_model(ssd).bad
    store = open_store(KnownPeers(), ssd_dir=root, ssd_bytes=SSD_BYTES)
    store.check_integrity()
    found = 0
    for number in range(CHAINS):
        held = [x for x in store.holdings(chunks_of(number)) if x.tiers]
        contents = {ArtifactId(x.chunk.key, k): d for x in held for k, d in right(x.chunk).items()}
        columns = [Wanted(kind, [x for x in held if kind in x.tiers]) for kind in BIG]
        restore = wait(store.begin_restore(columns))
        assert not restore.failed
        check(store, contents, restore)
        found += len(restore.offsets)
        restore.release()
    store.close()
    return found


@pytest.mark.parametrize("group", reasons(), indirect=True)
@pytest.mark.slow
def test_when_its_peer_process_alone_is_killed_the_engine_goes_on_and_reads_peers_again(
    tmp_path: Path, group: MemoryGroup | None
) -> None:
    with engines(OTHERS) as (owner,):
        engine = Engine(group, tmp_path)
        told = owner.told()
        assert engine.ask("restore", told) == len(CHUNKS) * len(BIG)
        before = engine.ask("card")
        for _ in range(3):
            engine.ask("step", 0)
        if group is None:
            os.kill(engine.child, signal.SIGKILL)
        else:
            Path(f"/proc/{engine.child}/oom_score_adj").write_text("1000")
            group.limit(group.used_bytes + 64 * MIB)
            neighbour = context.Process(target=eat, args=(group,), daemon=True)
            neighbour.start()
            # The kernel may choose twice: the memory of the first victim is not free at once.
            Path(f"/proc/{neighbour.pid}/oom_score_adj").write_text("900")

            def has_killed() -> bool:
                engine.ask("step", 0)
                return group.kills > 0

            until(has_killed)
            neighbour.join(60)
            assert neighbour.exitcode in (0, -signal.SIGKILL)
        assert engine.ask("flush"), "what was saved is written, whoever was killed"
        if group is not None:
            group.limit(group.used_bytes + 500 * MIB)
            assert group.kills in (1, 2), "the child, and perhaps the neighbour"
        until(lambda: engine.ask("card") != before)
        until(lambda: engine.ask("restore", told) == len(CHUNKS) * len(BIG))
        assert engine.ask("close")
        engine.end()
    assert served_from(tmp_path) > 0


def eat(group: MemoryGroup) -> None:
    """Take memory until somebody has been killed for it."""
    group.take_in_this_process()
    eaten = []
    while not group.kills:
        eaten.append(bytearray(b"\1") * MIB)
        time.sleep(0.002)


def take_an_arena(pipe: Connection, group: MemoryGroup) -> None:
    group.take_in_this_process()
    try:
        Arena.create(256 * MIB)
    except ConfigError as e:
        pipe.send(e.key)


@pytest.mark.parametrize("group", reasons(), indirect=True)
def test_an_arena_that_its_group_has_no_room_for_is_refused_before_it_is_taken(
    group: MemoryGroup | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process is in a group below the one that is mounted, as under systemd."""
    if group is None:
        monkeypatch.setattr(machine, "memory", lambda: machine.Memory(128 * MIB, 128 * MIB))
        with pytest.raises(ConfigError, match="dram_gib"):
            Arena.create(256 * MIB)
        return
    group.limit(128 * MIB)
    pipe, theirs = context.Pipe()
    process = context.Process(target=take_an_arena, args=(theirs, group))
    process.start()
    theirs.close()
    process.join(60)
    assert process.exitcode == 0, "it was killed instead"
    assert pipe.recv() == "dram_gib"
    assert group.kills == 0
