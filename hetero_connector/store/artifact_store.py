"""`ArtifactStore`: the content-addressed store of artifacts that an engine's scheduler calls.

Threads: restores, saves and `reset` are the scheduler's thread's. Threads of commands and of the
fleet call the rest, too, and the one that watches the parent process calls `close`. No method waits
for I/O but `flush`, `reset`, `wait_forgotten` and `close`. The store's own I/O thread moves bytes;
the catalog's lock guards what they share and is never held during I/O.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.errors import StoreClosedError
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.arena import Arena
from hetero_connector.store.base import (
    ChunkCopies,
    ReadTiming,
    Save,
    StoreConfig,
    Wanted,
)
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.nodes import ChainPlace, place_of
from hetero_connector.store.catalog.prefetch_schedule import (
    DEFAULT_COSTS,
    ExpectedReturn,
    PrefetchCosts,
)
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from hetero_connector.store.catalog.slot_geometry import dram_geometry
from hetero_connector.store.catalog.tiers import Health, Occupancy, Tiers
from hetero_connector.store.catalog.write_budget import WriteBudget
from hetero_connector.store.garbage import Freezer
from hetero_connector.store.io_thread import IoThread
from hetero_connector.store.peers.ports import PeerAccess, PeerPort
from hetero_connector.store.peers.sharing import Sharing
from hetero_connector.store.scrubber import Scrubber
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.generation_file import GenerationKeeper
from hetero_connector.store.ssd.journal_connection import Connect, connect
from hetero_connector.store.ssd.reader import SizeOf
from hetero_connector.store.ssd.tier import OpenTransfer, best_transfer, load

logger = logging.getLogger("vllm.heterocache")

_KEEP_S = 5.0
"""A reset waits so long for the disk: the engine stands still meanwhile."""

_FORGET_AT_ONCE = 64
"""Chunks that are forgotten while the lock is held: about a millisecond."""
_kept_arenas: list[Arena] = []
"""Arenas that a transfer which never ended may still touch."""


class ArtifactStore:
    """Sealed artifacts over DRAM and SSD. Made by `open`; without `ssd_dir` in DRAM alone."""

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        generations: GenerationKeeper,
        io_thread: IoThread | None,
        sharing: Sharing | None,
        folder: Path | None = None,
    ) -> None:
        self.arena = arena
        """The DRAM tier's memory; offsets in `Save` and `Restore` point into it."""
        self.sharing = sharing
        """For the fleet; None: peers cannot read the DRAM tier, and theirs is not read."""
        self.catalog = catalog
        self.retention = catalog.retention
        """The chains that are pinned, leave last or leave early. Any thread may ask."""
        self.folder = folder
        """The model's directory in `ssd_dir`; None without an SSD tier."""
        self._generations = generations
        self.io_thread = io_thread
        """None where nothing but DRAM is read and written."""
        self._is_closed = False
        self._freezer = Freezer(catalog.tiers.index)
        self.scrubber = Scrubber(catalog, arena, folder)
        """Checks what is stored, when it is told to."""

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
        run_io: bool = True,
    ) -> Self:
        """Open the tiers.

        `slot_bytes`: the largest artifact of each stored state type (`ArtifactLayout.max_bytes`).
        `chunk_tokens`: tokens of a full chunk. `fingerprint` and `description` name the model; an
        SSD directory of another one is refused. `open_transfer` and `connect` open its slab and
        its journal. `seconds_saved`: the worth of artifacts for eviction and admission to SSD;
        `prefetch_costs`: further figures for prefetching; `peers`: the fleet, if it reads this
        DRAM tier and this engine theirs; `size_of`: the size that a journal row must have.
        `run_io`: False to have `run_io_round` called in place of a thread. Raises
        StoreInUseError, FormatError, StoreError, and ConfigError naming the key (`dram_gib`,
        `ssd_dir`, `ssd_gib`).
        """
        geometry = dram_geometry(slot_bytes, config.dram_bytes)
        with contextlib.ExitStack() as undo:
            arena = Arena.create(geometry.size_bytes, shared=config.shared or peers is not None)
            undo.callback(arena.close)
            directory = None
            if config.ssd_dir is not None:
                directory = SsdDirectory.open(
                    config.ssd_dir, fingerprint, slot_bytes, config.ssd_bytes, description, connect
                )
                undo.callback(directory.close)
            port = PeerPort.open(peers, arena, geometry)
            if port is not None:
                undo.callback(port.close, 1.0)
            tiers = Tiers(
                chunk_tokens,
                geometry,
                None if directory is None else directory.geometry,
                recorder,
                config.eviction,
                seconds_saved,
                generations=None if port is None else port.table.generations,
                exports=None if port is None else port.feed,
            )
            ssd, generations = None, GenerationKeeper()
            if directory is not None:
                ssd = load(directory, tiers, open_transfer(arena.view, directory))
                generations = directory.generations
            catalog = Catalog(tiers, config, recorder, clock, generations.latest)
            catalog.prefetcher.set_costs(prefetch_costs)
            sharing = None
            if port is not None:
                catalog.reads_peers = catalog.prefetcher.peers_may_fill = True
                storage = "" if directory is None else str(directory.path)
                sharing = Sharing(catalog, generations, port, storage)
            io_thread = None
            if catalog.writes.is_active:
                io_thread = IoThread(catalog, arena.view, recorder, ssd, port, size_of)
                _open_budget(config, catalog, io_thread)
                if run_io:
                    io_thread.start()
            undo.pop_all()
        catalog.publish_gauges()
        folder = None if directory is None else directory.path
        store = cls(arena, catalog, generations, io_thread, sharing, folder)
        store._freezer.start()
        return store

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return the longest prefix of `chain` whose chunks each have a sealed artifact.

        No side effect: no pin, no recency. Stops at the first chunk that is unknown, so a lazily
        hashed chain is consumed only as far as it matches. Takes no lock: it reads one attribute
        a chunk.
        """
        self._check_open()
        return self.catalog.tiers.index.match(chain)

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return what is stored of the chain, also after missing ranges, up to its last chunk.

        Chunks in between that are not stored have no tiers. Takes no lock either.
        """
        self._check_open()
        return self.catalog.tiers.index.holdings(chain)

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Return the token lengths of the newest few short chunks after `parent`."""
        self._check_open()
        return self.catalog.tiers.index.tails(parent)

    def is_fork(self, key: ChunkKey) -> bool:
        """Return whether several chains leave each other at the end of a chunk. Takes no lock."""
        return self.catalog.tiers.index.is_fork(key)

    def missing(self, chunk: ChunkRange, state_types: Sequence[StateType]) -> list[StateType]:
        """Return those of `state_types` that are neither sealed nor being saved for this chunk."""
        self._check_open()
        return self.catalog.missing(chunk, state_types)

    def known(self, keys: Iterable[ChunkKey]) -> list[ChunkRange]:
        """Return the chunks of these names that are stored or being saved. Takes no lock."""
        nodes = map(self.catalog.tiers.index.nodes.get, keys)
        return [node.chunk for node in nodes if node is not None]

    def note_changes(self) -> None:
        """Note from now on which chunks change, for `take_changed`. Costs nothing before."""
        with self.catalog.locked():
            self.catalog.tiers.index.note_changes()

    @property
    def has_changed(self) -> bool:
        """Return whether `take_changed` has something to return. Any thread may ask."""
        return bool(self.catalog.tiers.index.changed)

    def take_changed(self, limit: int) -> list[ChunkKey]:
        """Return up to `limit` chunks of which a copy came to a tier, or left one, oldest first.

        Each chunk is returned once for all its changes since it was last returned.
        """
        return self.catalog.take_changed(limit)

    def copies_of(self, chunks: Sequence[ChunkKey]) -> list[ChunkCopies | None]:
        """Return the tiers that have each chunk's sealed state now; None for an unknown chunk."""
        return self.catalog.copies_of(chunks)

    def begin_restore(
        self,
        wanted: Sequence[Wanted],
        copies: Mapping[ArtifactId, PeerCopy] | None = None,
        within_s: float | None = None,
    ) -> Restore:
        """Pin what is in DRAM, and begin to read the rest, in order.

        What is not stored here is read from the peer or the orphaned storage that `copies` names,
        and is stored here from then on; anything else is read from SSD. What is missing after
        `within_s` seconds fails; None: after `StoreConfig.load_deadline_s`. Always `release()` or
        `abandon()` what is returned.
        """
        self._check_open()
        return self.catalog.begin_restore(wanted, copies or {}, within_s)

    def begin_save(
        self, chunk: ChunkRange, sizes: Mapping[StateType, int], *, is_again: bool = False
    ) -> Save | None:
        """Reserve DRAM slots for a chunk's artifacts, evicting leaves if needed.

        None (counted, unless `is_again`) if all is pinned, or if the store does not know the parent
        chunk. ValueError for a type or size it was not opened for, or one that is sealed or being
        saved already: see `missing`.
        """
        self._check_open()
        strides = self.catalog.tiers.dram.geometry.stride_bytes
        for kind, size_bytes in sizes.items():
            if not 0 < size_bytes <= strides.get(kind, 0):
                raise ValueError(f"an artifact of {kind.value} cannot have {size_bytes} bytes")
        self.retention.expire_due()  # there may be no I/O thread to do it
        reserved = self.catalog.reserve(chunk, sizes, is_again=is_again)
        return reserved if isinstance(reserved, Save) else None

    def complete_save(self, save: Save) -> None:
        """Seal: the bytes are in the arena. Visible to `match` from now; queued for SSD.

        Has no effect if a `reset` came in between.
        """
        self.catalog.seal(save)

    def abandon_save(self, save: Save) -> None:
        """Release the slots of a save; nothing becomes visible."""
        self.catalog.abandon(save)

    @property
    def generation(self) -> Generation:
        """Return the root of chains from now on: another one after `reset`, or after the fleet's.

        Never blocks; may change at any moment. Where its `tag` is new, call `catch_up` before
        anything is matched or saved under it.
        """
        return self._generations.latest

    def reset(self) -> bool:
        """Forget every artifact in every tier, for good: no later process finds one either.

        Running restores and saves end harmlessly. Waits for the disk, a few seconds at most. False,
        with one line in the log, if the new generation could not be written to the SSD: this
        process does not use it any more, but the next would find what it has.
        """
        self._check_open()
        self.catalog.forget_all(self._generations.start_own_reset())
        if self.sharing is not None:
            self.sharing.wait_for_fleet()
        return self._generations.wait_kept(_KEEP_S)

    def catch_up(self) -> Generation:
        """Forget at once what was stored before the latest generation, and return that."""
        if (latest := self.generation).tag != self.catalog.generation.tag:
            self.catalog.forget_all(latest)
        return latest

    def expect(self, expected: ExpectedReturn) -> None:
        """Expect a session back: stage its chain in DRAM, if that pays. Replaces earlier ones.

        Never at the expense of a restore; see `catalog.prefetch`.
        """
        self.catalog.expect(expected)

    def session_returned(self, session: Hashable) -> None:
        """Expect the session no longer: its restore reads what is not staged yet."""
        self.catalog.session_returned(session)

    def expire_due(self) -> None:
        """End what retention keeps or limits and whose time is over.

        All of it where there is no I/O thread; else some, so that nothing depends on that alone.
        """
        while self.retention.expire_due() and not self._is_served:
            pass

    def forget_session(self, session: Hashable, leaves: Sequence[ChunkKey]) -> int:
        """Forget a session's chunks that no other chain goes through; return their number.

        Its own pin ends; what others have pinned stays.

        `leaves`: where its chains may end, the deepest first. Any thread may ask.
        """
        forgotten, nodes = 0, self.catalog.retention.end_session(session, leaves)
        while nodes:
            count, nodes = self.catalog.retention.forget_up_from(nodes, _FORGET_AT_ONCE)
            forgotten += count
        return forgotten

    def wait_forgotten(self, deadline_s: float) -> bool:
        """Wait until no later process finds what was forgotten; return False if one still would.

        A power cut soon afterwards may bring back what was stored. Any thread may ask.
        """
        return self.catalog.wait_rows_gone(deadline_s)

    def num_unwritten(self) -> int:
        """Count our sealed artifacts that are in DRAM alone. O(chunks). Any thread may ask."""
        return len(self.catalog.writes.unwritten())

    def place_of(self, leaves: Sequence[ChunkKey], limit: int) -> ChainPlace | None:
        """Return where the chain up to the first stored leaf is; None if it has more chunks.

        Takes no lock, so it may miss a change that is being made.
        """
        return place_of(self.catalog.tiers.index.nodes, leaves, limit)

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        """Evict these chunks first when room is needed: computing them is cheaper than loading.

        Where there is an I/O thread, it does that later.
        """
        if self._is_served:
            self.catalog.decline(chunks)
        else:
            self.catalog.demote(chunks)

    @property
    def reading_bytes(self) -> Mapping[Tier, int]:
        """Return the bytes that restores wait for, by the tier they come from."""
        read: Counter[Tier] = Counter()
        for source, size_bytes in self.catalog.loads.waiting_bytes.items():
            read[source.tier] += size_bytes
        return +read

    def bytes_ahead_of(self, chunks: Sequence[StoredChunk]) -> Mapping[Tier, int]:
        """Return the bytes that are read before a restore of these chunks could be, by tier.

        What is being read of the chunks themselves is no queue: the restore would share it.
        """
        return self.catalog.bytes_ahead_of(chunks) if self.reading_bytes else {}

    def take_timings(self) -> list[ReadTiming]:
        """Return reads that ended or were given up since the last call: the newest 256 at most."""
        timings = self.catalog.loads.timings
        return [timings.popleft() for _ in range(len(timings))]

    @contextlib.contextmanager
    def watch_transfers(self, on_end: Callable[[str, float, float], None]) -> Iterator[None]:
        """Call `on_end(device, began_s, ended_s)` on the I/O thread for every batch that ends."""
        io_thread = self.io_thread
        runners = {} if io_thread is None else io_thread.runners
        for name, runner in runners.items():
            runner.on_end = partial(on_end, name)
        try:
            yield
        finally:
            for runner in runners.values():
                runner.on_end = None

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything sealed is on SSD; False if the deadline passed first.

        What the write budget refuses is not waited for.
        """
        self._check_open()
        return self._flush(deadline_s)

    def close(self, deadline_s: float = 30.0) -> None:
        """Flush, stop the I/O thread, release files and memory. Idempotent.

        Pending restores fail as `closed`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._freezer.stop()
        self.scrubber.close()
        if self.sharing is not None:
            self.sharing.serve_under(0)
        io_thread, self.io_thread = self.io_thread, None
        if io_thread is not None:
            started_s = self.catalog.clock()
            if not self._flush(deadline_s):
                logger.warning("closing before everything was written to SSD")
            if not io_thread.stop(max(0.0, deadline_s - (self.catalog.clock() - started_s))):
                # A device may still write into the arena: it must never be unmapped.
                logger.error("a transfer did not end; the DRAM arena is kept until exit")
                _kept_arenas.append(self.arena)
                return
        del io_thread  # its views would keep the memory
        self.arena.close()

    # --- for tests, benchmarks and diagnosis ------------------------------------------------------

    def run_io_round(self) -> bool:
        """Do one round of the I/O thread's work, for a store opened with `run_io=False`."""
        assert self.io_thread is not None
        return self.io_thread.step()

    def leave_to_ssd(self) -> None:
        """Drop every DRAM copy that is on SSD too and not in use: to measure the SSD."""
        self.catalog.leave_to_ssd()

    def occupancy(self) -> list[Occupancy]:
        """Return the contents of each tier. Any thread may ask."""
        return self.catalog.occupancy()

    def health(self) -> Health:
        """Return what works. Any thread may ask."""
        return self.catalog.health()

    def publish_health(self) -> None:
        """Write what works into the recorder now. Any thread may ask."""
        self.catalog.publish_health()

    def publish_gauges(self) -> None:
        """Write occupancy and health into the recorder now."""
        self.catalog.publish_gauges()

    def check_integrity(self) -> None:
        """Raise AssertionError if index, slots and accounts disagree."""
        self.catalog.check_integrity()

    def _flush(self, deadline_s: float) -> bool:
        return self.catalog.config.ssd_dir is None or self.catalog.flush(deadline_s)

    @property
    def _is_served(self) -> bool:
        return self.io_thread is not None and self.catalog.io_alive

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the artifact store is closed")


def _open_budget(config: StoreConfig, catalog: Catalog, io_thread: IoThread) -> None:
    """Limit the writes of a day, going on with what the last engine left of the budget."""
    if config.ssd_write_bytes_per_day is not None:
        budget = WriteBudget(config.ssd_write_bytes_per_day, catalog.clock, time.time)
        if io_thread.ssd is not None:
            io_thread.ssd.rows.recall_budget(budget)
        catalog.set_write_budget(budget)
