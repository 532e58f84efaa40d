"""`ArtifactStore`: the store an engine's scheduler talks to. See `base.Store`."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.errors import StoreClosedError
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.arena import Arena
from hetero_connector.store.base import Failure, ReadTiming, Save, StoreConfig, Wanted
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.store.catalog.saving import reserve, taken
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from hetero_connector.store.catalog.slots import SlotGeometry, dram_geometry
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.garbage import Freezer
from hetero_connector.store.io_thread import IoThread
from hetero_connector.store.peers.ports import PeerAccess, PeerPort
from hetero_connector.store.peers.sharing import Sharing
from hetero_connector.store.prefetch.weighing import DEFAULT_COSTS, PrefetchCosts
from hetero_connector.store.restore import ArtifactRestore
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.generation_file import GenerationKeeper
from hetero_connector.store.ssd.journal_connection import Connect, connect
from hetero_connector.store.ssd.reader import SizeOf
from hetero_connector.store.ssd.tier import OpenTransfer, best_transfer, load

logger = logging.getLogger("vllm.heterocache")

_KEEP_S = 5.0
"""How long a reset waits for the disk: the engine stands still meanwhile."""

_kept_arenas: list[Arena] = []
"""Arenas that a transfer which never ended may still touch."""


class ArtifactStore:
    """Implements `base.Store`. Made by `open`; with no `ssd_dir` it lives in DRAM alone."""

    def __init__(
        self,
        arena: Arena,
        state: StoreState,
        io_thread: IoThread | None,
        port: PeerPort | None = None,
        storage: str = "",
    ) -> None:
        """Use `open`."""
        self.arena = arena
        """The DRAM tier's memory; offsets in `Save` and `Restore` point into it."""
        self._state = state
        self._tiers = state.tiers
        self._io_thread = io_thread
        self.sharing = None if port is None else Sharing(state, port, storage)
        """For the fleet; None: peers cannot read the DRAM tier, nor is theirs read."""
        self._closed = False
        self._freezer = Freezer(state.tiers.index)
        self._freezer.start()

    @classmethod
    def open(
        cls,
        slot_bytes: Mapping[StateType, int],
        config: StoreConfig,
        recorder: Recorder,
        *,
        chunk_tokens: int,
        fingerprint: bytes,
        description: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
        open_transfer: OpenTransfer = best_transfer,
        connect: Connect = connect,
        seconds_saved: SecondsSaved = default_seconds_saved,
        peers: PeerAccess | None = None,
        prefetch_costs: PrefetchCosts = DEFAULT_COSTS,
        size_of: SizeOf | None = None,
    ) -> ArtifactStore:
        """Open the tiers.

        `slot_bytes`: the largest artifact of each stored state type (`ArtifactLayout.max_bytes`).
        `chunk_tokens`: tokens of a full chunk. `fingerprint` and `description` name the model; an
        SSD directory of another one is refused. `open_transfer` and `connect` open its slabs and
        its journal. `seconds_saved`: what artifacts are worth to eviction and admission to SSD;
        `prefetch_costs`: what prefetching weighs besides; `peers`: the fleet, if it reads this
        DRAM tier and this engine theirs; `size_of`: what rows of the journal are held against when
        their artifacts are read. Raises StoreInUseError, FormatError, StoreError, and
        ConfigError naming the key (`dram_gib`, `ssd_dir`, `ssd_gib`).
        """
        geometry = dram_geometry(slot_bytes, config.dram_bytes)
        with contextlib.ExitStack() as undo:
            arena = Arena.create(geometry.size_bytes, shared=config.shared or peers is not None)
            undo.callback(arena.close)
            ssd, ssd_geometry = None, None
            if config.ssd_dir is not None:
                strides = geometry.stride_bytes
                directory = SsdDirectory.open(
                    config.ssd_dir, fingerprint, strides, config.ssd_bytes, description, connect
                )
                undo.callback(directory.close)
                ssd_geometry = SlotGeometry(directory.slots_per_type, strides)
            port = PeerPort.open(peers, arena, geometry)
            if port is not None:
                undo.callback(port.close, 1.0)
            tiers = Tiers(
                chunk_tokens,
                geometry,
                ssd_geometry,
                recorder,
                config.eviction,
                seconds_saved,
                generations=None if port is None else port.table.generations,
                exports=None if port is None else port.feed,
            )
            generations = GenerationKeeper()
            if config.ssd_dir is not None:
                generations = directory.generations
                ssd = load(directory, tiers, open_transfer(arena.view, directory))
            state = StoreState(tiers, config, recorder, clock, generations)
            io_thread = None
            if state.wants_spills:
                io_thread = IoThread(state, arena.view, ssd, prefetch_costs, port, size_of)
                io_thread.start()
            undo.pop_all()
        tiers.publish_gauges()
        storage = "" if config.ssd_dir is None else str(directory.path)
        return cls(arena, state, io_thread, port, storage)

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """See `base.Store.match`. Takes no lock: it reads one attribute a chunk."""
        self._check_open()
        return self._tiers.index.match(chain)

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """See `base.Store.holdings`. Takes no lock either."""
        self._check_open()
        return self._tiers.index.holdings(chain)

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """See `base.Store.tails`."""
        self._check_open()
        return self._tiers.index.tails(parent)

    def missing(self, chunk: ChunkRange, state_types: Sequence[StateType]) -> list[StateType]:
        """See `base.Store.missing`."""
        self._check_open()
        node = self._tiers.index.nodes.get(chunk.key)
        return [t for t in state_types if node is None or t not in node.artifacts]

    def begin_restore(
        self, wanted: Sequence[Wanted], copies: Mapping[ArtifactId, PeerCopy] | None = None
    ) -> ArtifactRestore:
        """See `base.Store.begin_restore`."""
        self._check_open()
        with self._state.lock:
            return ArtifactRestore(self._state, wanted, copies or {})

    def begin_save(self, chunk: ChunkRange, sizes: Mapping[StateType, int]) -> Save | None:
        """See `base.Store.begin_save`.

        Also None (counted as `gone`) when the store does not know the parent chunk. ValueError for
        a type or size it was not opened for, or one that is already sealed or being saved.
        """
        self._check_open()
        strides = self._tiers.dram.geometry.stride_bytes
        for kind, size_bytes in sizes.items():
            if not 0 < size_bytes <= strides.get(kind, 0):
                raise ValueError(f"an artifact of {kind.value} cannot have {size_bytes} bytes")
        with self._state.lock:
            absent = self.missing(chunk, list(sizes))
            if not absent or len(absent) < len(sizes):
                raise ValueError(f"nothing to save, or already saved: {list(sizes)}, {absent=}")
            if not self._tiers.index.has_place_for(chunk):
                self._state.fail(Failure.GONE, Tier.DRAM)
                return None
            return reserve(self._state, chunk, sizes)

    def complete_save(self, save: Save) -> None:
        """See `base.Store.complete_save`. Without effect if a `reset` came in between."""
        state = self._state
        with state.lock:
            now, due_s = state.tick(), state.clock() + state.config.spill_delay_s
            wake = not state.spills
            for artifact in taken(save):
                if not artifact.forgotten:
                    artifact.last_used = now
                    self._tiers.index.seal(artifact)
                    state.recorder.add(
                        "heterocache_saved_bytes",
                        artifact.size_bytes,
                        state_type=artifact.state_type.value,
                    )
                    if state.wants_spills:
                        state.queue_write(artifact, due_s)
                self._tiers.unpin(artifact)
            if wake and state.spills:
                state.lock.notify_all()
            state.refresh_gauges()

    def abandon_save(self, save: Save) -> None:
        """See `base.Store.abandon_save`."""
        with self._state.lock:
            for artifact in taken(save):
                if not artifact.forgotten:
                    self._tiers.forget(artifact)
                self._tiers.unpin(artifact)

    @property
    def generation(self) -> Generation:
        """See `base.Store.generation`."""
        return self._state.generations.latest

    def reset(self) -> bool:
        """See `base.Store.reset`."""
        self._check_open()
        generations = self._state.generations
        self._state.forget_all(generations.part())
        if self.sharing is not None:
            self.sharing.wait_for_fleet()
        return generations.wait_kept(_KEEP_S)

    def catch_up(self) -> Generation:
        """See `base.Store.catch_up`."""
        self._check_open()
        if (latest := self.generation).tag != self._state.generation.tag:
            self._state.forget_all(latest)
        return latest

    def expect(self, expected: ExpectedReturn) -> None:
        """See `base.Store.expect`."""
        self._state.expect(expected)

    def came_back(self, session: Hashable) -> None:
        """See `base.Store.came_back`."""
        self._state.came_back(session)

    def reads(
        self, session: Hashable, leaves: Sequence[ChunkKey], until_s: float, tenant: bytes = b""
    ) -> None:
        """See `base.Store.reads`."""
        self._state.reads(session, leaves, until_s, tenant, expire=not self._is_served)

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        """See `base.Store.decline`. Where there is an I/O thread, that looks at it later."""
        if self._is_served:
            self._state.declined.append(chunks)
        else:
            with self._state.lock:
                self._tiers.demote(chunks)

    @property
    def reading_bytes(self) -> Mapping[Tier, int]:
        """See `base.Store.reading_bytes`."""
        return {tier: n for tier, n in self._state.reading_bytes.items() if n}

    def take_timings(self) -> list[ReadTiming]:
        """See `base.Store.take_timings`."""
        timings = self._state.timings
        return [timings.popleft() for _ in range(len(timings))]

    def flush(self, deadline_s: float) -> bool:
        """See `base.Store.flush`."""
        self._check_open()
        return self._flush(deadline_s)

    def close(self, deadline_s: float = 30.0) -> None:
        """See `base.Store.close`. Pending restores fail as `closed`."""
        if self._closed:
            return
        self._closed = True
        self._freezer.stop()
        if self.sharing is not None:
            self.sharing.serve_under(0)
        io_thread, self._io_thread = self._io_thread, None
        if io_thread is not None:
            started_s = self._state.clock()
            if not self._flush(deadline_s):
                logger.warning("closing before everything was written to SSD")
            if not io_thread.stop(max(0.0, deadline_s - (self._state.clock() - started_s))):
                # A device may still write into the arena: it must never be unmapped.
                logger.error("a transfer did not end; the DRAM arena is kept until exit")
                _kept_arenas.append(self.arena)
                return
        del io_thread  # its views would keep the memory
        self.arena.close()

    def leave_to_ssd(self) -> None:
        """Drop every DRAM copy that is on SSD too and not in use: to measure the SSD."""
        with self._state.lock:
            used = set(self._tiers.in_use())
            for artifact in list(self._tiers.index.artifacts()):
                if artifact.dram is not None and artifact.ssd is not None and artifact not in used:
                    self._tiers.drop(artifact, Tier.DRAM)

    def publish_gauges(self) -> None:
        """Write occupancy into the recorder now."""
        with self._state.lock:
            self._tiers.publish_gauges()

    def check_integrity(self) -> None:
        """Raise AssertionError if index, slots and accounts disagree."""
        with self._state.lock:
            self._tiers.check_integrity()

    def _flush(self, deadline_s: float) -> bool:
        state = self._state
        if self._state.config.ssd_dir is None:
            return True
        with state.lock:
            state.flushing = True
            state.lock.notify_all()
            if state.write_again_s < math.inf:
                state.write_again_s = 0.0  # a pause ends early: once more, then that is that
            state.lock.wait_for(lambda: state.drained or not state.may_write, timeout=deadline_s)
            state.flushing = False
            return state.drained

    @property
    def _is_served(self) -> bool:
        return self._io_thread is not None and self._state.io_alive

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the artifact store is closed")
