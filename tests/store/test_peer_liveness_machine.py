"""The liveness machine with a peer that stops, answers late or wrongly, or dies.

Nothing is lost by it: what its read may still fill comes back when the read has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from errno import EIO
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.errors import TransferError
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, StoreConfig, Wanted
from hetero_connector.store.catalog.loads import Load
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.peers.reader import ARENA, PeerReads
from hetero_connector.transfer.peer_base import PeerExtent
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, chain, fill
from tests.store.test_fleet_machine import THEIRS
from tests.store.test_liveness_machine import FleetLivenessMachine
from tests.store.test_store_machine import DEPTH, TRUNKS, chains
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers, MemoryRead

pytestmark = pytest.mark.long


class Fate(StrEnum):
    """The fates of a read of the peer."""

    WORKS = "works"
    BREAKS_OFF = "breaks off"
    ENDS_SHORT = "ends short"
    """And says that it went well."""
    BRINGS_OTHERS = "brings others' bytes"
    IS_LATE = "is late"
    NEVER_ENDS = "never ends"
    PEER_DIES = "peer dies"
    WE_LOSE_IT = "what moves our bytes dies"
    SLOT_IS_REUSED = "slot is reused"


PASSED_S = 2.5
"""Longer than a peer's deadline."""
AVOIDED_S = 2.0
"""Longer than a peer is left alone."""


class UnreliablePeers(MemoryPeers):
    """Reads of which some go wrong."""

    def __init__(
        self, fates: deque[Fate], network: MemoryNetwork, regions: Sequence[object]
    ) -> None:
        super().__init__(network, regions)  # type: ignore[arg-type]
        self._fates = fates

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> MemoryRead:
        """Start a read, of the next fate."""
        read = super().submit(peer, extents)
        if self._fates:
            fate = self._fates.popleft()
            read._move = partial(self._go_wrong, read, fate)  # type: ignore[method-assign]
        return read

    def _go_wrong(self, read: MemoryRead, fate: Fate, network: MemoryNetwork) -> None:
        extents = read._extents
        if fate is not Fate.BRINGS_OTHERS:
            read._extents = extents[: len(extents) // 2]
        MemoryRead._move(read, network)
        if fate is Fate.BREAKS_OFF:
            read.error = TransferError(EIO, "it broke off")
        if fate is Fate.BRINGS_OTHERS:
            for extent in extents:
                if extent.region == ARENA:
                    self.memory[ARENA][extent.offset] ^= 1


class Peer:
    """An engine that owns what the machine's engine does not."""

    def __init__(self, epoch: int, network: MemoryNetwork) -> None:
        self.epoch = epoch
        self.copies: dict[ArtifactId, PeerCopy] = {}
        """Everything that the directory has ever said of it, much of it outdated."""
        self.store = ArtifactStore.open(
            SIZES,
            StoreConfig(4 * CHUNK_BYTES, spill_delay_s=0.0),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            peers=PeerAccess(KnownPeers(), partial(MemoryPeers, network)),
            run_io=False,
        )
        assert self.store.sharing is not None
        assert self.store.io_thread is not None
        self.sharing, self.io_thread = self.store.sharing, self.store.io_thread
        self.sharing.serve_under(epoch)

    @property
    def metadata(self) -> bytes:
        assert self.io_thread.fleet is not None
        return self.io_thread.fleet.peer_device._transfers.metadata

    def save(self, chunks: Sequence[ChunkRange]) -> None:
        """Store these, and have them listed."""
        for chunk in chunks:
            kinds = self.store.missing(chunk, list(SIZES))
            save = self.store.begin_save(chunk, {k: SIZES[k] for k in kinds}) if kinds else None
            if save is not None:
                fill(self.store, save)
                self.store.complete_save(save)
            for _ in range(4):
                self.io_thread.step()
        for change in self.sharing.take_exports():
            if (copy := change.copy) is not None:
                artifact = ArtifactId(change.chunk.key, change.state_type)
                self.copies[artifact] = PeerCopy(
                    self.epoch, copy.dram_offset, copy.generation, copy.size_bytes, copy.checksum
                )

    def end(self) -> None:
        self.io_thread.start()
        self.store.close()


class PeerLivenessMachine(FleetLivenessMachine):
    """`THEIRS` can be read from a peer."""

    harmless = FleetLivenessMachine.harmless | {
        Failure.UNREACHABLE,
        Failure.FENCED,
        Failure.REUSED,
        Failure.BAD_RECORD,
    }

    def __init__(self) -> None:
        self.network, self.known = MemoryNetwork(), KnownPeers()
        self.fates = deque[Fate]()
        self.resets = 1
        self.peer = Peer(100, self.network)
        self.known.cards[100] = self.peer.sharing.card
        super().__init__()

    def peers(self) -> PeerAccess:
        return PeerAccess(self.known, partial(UnreliablePeers, self.fates, self.network))

    @property
    def reader(self) -> PeerReads:
        assert self.store.io_thread is not None
        assert self.store.io_thread.fleet is not None
        return self.store.io_thread.fleet.peer_device

    @rule(
        reads=st.lists(
            st.tuples(st.sampled_from("bbc"), st.sampled_from(Fate), st.booleans()),
            min_size=2,
            max_size=6,
        )
    )
    def a_peer_is_read(self, reads: list[tuple[str, Fate, bool]]) -> None:
        for name, fate, is_begun in reads:
            self.read_once(name, fate, is_begun)

    def read_once(self, name: str, fate: Fate, is_begun: bool) -> None:
        """Forget all that came from it. `is_begun`: the read is under way when it happens."""
        self.forget_replicas()
        self.peer.save(TRUNKS[name][:2])
        is_begun |= fate in (Fate.IS_LATE, Fate.NEVER_ENDS)
        if is_begun:
            self.network.stopped.add(self.peer.metadata)
        if fate in (Fate.BREAKS_OFF, Fate.ENDS_SHORT, Fate.BRINGS_OTHERS):
            self.fates.append(fate)
        self.restore_from_peer(name, 2, is_begun)
        if fate is Fate.IS_LATE:
            self.time_passes(PASSED_S, asked=True)
            assert not any(load.waiters for load in self.loads_from_peers()), "its deadline passed"
            self.seal(["a"], 1)
            self.restore("a", 1)
        if fate is Fate.PEER_DIES:
            self.the_peer_dies()
        if fate is Fate.WE_LOSE_IT:
            self.what_moves_our_bytes_dies()
        if fate is Fate.SLOT_IS_REUSED:
            self.peer.save(chain("the peer's own", 4))
        if fate is not Fate.NEVER_ENDS:
            self.the_peer_goes_on()
        self.io_round(2)
        self.fates.clear()
        if fate is not Fate.WORKS:
            self.time.passes(AVOIDED_S)

    def loads_from_peers(self) -> list[Load]:
        return [
            load for load in self.store.catalog.loads.by_artifact.values() if load.tier is Tier.PEER
        ]

    def forget_replicas(self) -> None:
        """Remove them as an eviction would."""
        tiers = self.store.catalog.tiers
        with self.store.catalog.locked():
            used = set(tiers.pinned())
            for artifact in list(tiers.index.artifacts()):
                if artifact.replica and artifact not in used and not artifact.forgotten:
                    tiers.forget(artifact)

    @rule(name=chains, depth=st.integers(1, DEPTH), rounds=st.integers(0, 3))
    def restore_from_peer(self, name: str, depth: int, rounds: int) -> None:
        """Read everything that is not here from the place that the directory once gave."""
        here = {x.chunk: x for x in self.store.holdings(TRUNKS[name])}
        columns: dict[StateType, list[StoredChunk]] = {}
        copies: dict[ArtifactId, PeerCopy] = {}
        for chunk in TRUNKS[name][:depth]:
            tiers = dict(here[chunk].tiers) if chunk in here else {}
            for kind in SIZES:
                copy = self.peer.copies.get(ArtifactId(chunk.key, kind))
                if kind not in tiers and copy and chunk.key in THEIRS - self.promoted:
                    tiers[kind] = Tier.PEER
                    copies[ArtifactId(chunk.key, kind)] = copy
            if not tiers:
                break
            for kind in tiers:
                columns.setdefault(kind, []).append(StoredChunk(chunk, tiers))
        if columns:
            wanted = [Wanted(kind, chunks) for kind, chunks in columns.items()]
            self.restores.append(self.store.begin_restore(wanted, copies))
        self.io_round(rounds)

    @rule()
    def the_peer_goes_on(self) -> None:
        """Let its answers land, whether or not the store looks."""
        self.network.stopped.clear()
        for read in list(self.reader._transfers._active):  # type: ignore[attr-defined]
            read.poll()

    def the_peer_dies(self) -> None:
        """Reads of it fail; another engine takes its place."""
        self.network.kill(self.peer.metadata)
        del self.known.cards[self.peer.epoch]
        self.peer.end()
        self.peer = Peer(self.peer.epoch + 1, self.network)
        self.known.cards[self.peer.epoch] = self.peer.sharing.card
        self.follow_reset()

    def what_moves_our_bytes_dies(self) -> None:
        transfers = self.reader._transfers
        assert isinstance(transfers, UnreliablePeers)
        transfers.restart()

    @rule()
    def the_fleet_is_reset(self) -> None:
        self.resets += 1
        self.follow_reset()
        self.sealed.clear()
        self.pinned.clear()

    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        self.network.stopped.clear()
        super().restart(kill)
        self.follow_reset()

    def follow_reset(self) -> None:
        """Both engines hear of the fleet's latest reset, and before of the one before."""
        for store in (self.store, self.peer.store):
            for number in (self.resets - 1, self.resets):
                store._generations.note_fleet(number, store.generation)
                store.catch_up()

    @invariant()
    def what_a_late_read_may_fill_is_nobodys(self) -> None:
        late = {load.target for batch in self.reader._late for load in batch.loads}
        artifacts = self.store.catalog.tiers.index.artifacts()
        assert late.isdisjoint(a.dram for a in artifacts if a.dram is not None)

    def what_hangs_goes_on(self) -> None:
        self.the_peer_goes_on()
        super().what_hangs_goes_on()

    def calm(self) -> None:
        self.fates.clear()
        super().calm()

    @rule(goes_on=st.booleans(), reading=st.booleans())
    def the_faults_end(self, goes_on: bool, reading: bool) -> None:
        super().the_faults_end(goes_on, reading)
        reader = self.reader
        assert self.store.io_thread is not None
        assert self.store.io_thread.fleet is not None
        assert not self.store.io_thread.fleet.peers.active
        if goes_on:
            assert not reader._late, "its slots never come back"
            assert not reader._transfers.in_flight
            self.the_peer_is_read_again()

    def the_peer_is_read_again(self) -> None:
        """No read that went wrong ends the use of a peer for good."""
        self.time.passes(AVOIDED_S)
        self.the_fleet_is_reset()
        self.peer.save(TRUNKS["b"][:1])
        before = len(self.restores)
        self.restore_from_peer("b", 1, 8)
        if before < len(self.restores):
            restore = self.restores.pop()
            assert restore.poll()
            assert set(restore.failed.values()) <= {Failure.NO_SLOT}
            restore.release()

    def hanging(self, direction: object) -> int:
        """Also what a peer's late answer may touch."""
        return super().hanging(direction) + bool(self.reader._late)  # type: ignore[arg-type]

    def teardown(self) -> None:
        self.the_faults_end(goes_on=True, reading=False)
        super().teardown()
        self.peer.end()


def test_whatever_peers_do_everything_comes_to_its_end() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        PeerLivenessMachine,
        settings=settings(max_examples=30, stateful_step_count=40, deadline=None),
    )
