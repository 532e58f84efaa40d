"""The store against a model, with the I/O thread's rounds interleaved by hypothesis."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_connector.artifacts.record import ArtifactId, ChunkRange, SlotRef, Tier
from hetero_connector.metrics import COUNTERS
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import EvictionName, Failure, Pinned, Save
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, PrefetchCosts
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd import journal_rows
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.transfer.base import Direction, Extent
from tests.store.filling import (
    CHUNK_BYTES,
    DENSE,
    SIZES,
    WINDOW,
    Bench,
    Beside,
    Disk,
    begin,
    chain,
    contents,
    fill,
    ids_of,
)
from tests.transfer.memory_files import MemoryFiles, MemoryTransfer
from tests.waiting import until

DEPTH = 4
TRUNKS = {name: chain(name, DEPTH) for name in "abc"}
# A branch: `b2` shares its first two chunks with `b`.
TRUNKS["b2"] = [*TRUNKS["b"][:2], *chain("b2", DEPTH - 2, TRUNKS["b"][1])]
chains = st.sampled_from(sorted(TRUNKS))


class CarefulDisk(Disk):
    """Check that nothing is written where the journal still lists something else."""

    def __call__(self, memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> MemoryFiles:
        files = super().__call__(memory, directory)
        submit = files.submit

        def checked(direction: Direction, extents: Sequence[Extent]) -> MemoryTransfer:
            cut = directory.geometry
            rows = directory.journal.load() if direction is Direction.WRITE else ()
            for row in rows:
                start = cut.offset(row.state_type, row.slot)
                end = start + cut.stride_bytes[row.state_type]
                for extent in extents:
                    over = extent.file_offset + extent.size
                    assert over <= start or end <= extent.file_offset, f"{row} is overwritten"
            return submit(direction, extents)

        files.submit = checked  # type: ignore[method-assign]
        return files


class StoreMachine(RuleBasedStateMachine):
    """Every byte a restore hands out is right and stays right while it is pinned.

    The I/O thread is not started: rule `io_round` takes its place.
    """

    ssd = True
    verify = "ssd"
    eviction: EvictionName = "leaf_lru"
    budget_bytes: int | None = None
    harmless = frozenset({Failure.GONE, Failure.NO_SLOT})
    """The ways in which a restore may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.disk = CarefulDisk()
        self.beside = Beside()
        self.patched = patch.object(journal_rows, "in_background", self.beside)
        self.patched.start()
        self.bench = Bench(self.root / "ssd" if self.ssd else None, self.disk, self.clock())
        self.saves: list[Save] = []
        self.restores: list[Restore] = []
        self.sealed: set[ChunkRange] = set()
        self.pinned: dict[str, dict[Artifact, list[SlotRef]]] = {}
        """The slots of what was sealed of each pinned chain when its pin began."""
        self.used_within = 0.0
        self.counted: Counter[str]
        self.counted_by_key: Counter[str]
        self.store = self.open()

    def open(self) -> ArtifactStore:
        self.counted, self.counted_by_key = Counter(), Counter()
        return self.bench.open(
            dram_chunks=4,
            ssd_chunks=6,
            verify=self.verify,
            eviction=self.eviction,
            ssd_write_bytes_per_day=self.budget_bytes,
            prefetch_costs=PrefetchCosts(used_within=lambda idle_s, within_s: self.used_within),
            peers=self.peers(),
            run_io=False,
        )

    def clock(self) -> Callable[[], float]:
        """The store's."""
        return time.monotonic

    def peers(self) -> PeerAccess | None:
        """The fleet; by itself it has none."""
        return None

    def teardown(self) -> None:
        for restore in self.restores:
            restore.release()
        if self.store.io_thread is not None:
            self.store.io_thread.start()
        self.store.close()
        self.patched.stop()
        shutil.rmtree(self.root)

    def finish_restores(self) -> None:
        for restore in self.restores:
            while not restore.poll():
                assert self.round(), "nothing moves but a restore is pending"

    def round(self) -> bool:
        return self.store.io_thread is not None and self.store.run_io_round()

    def drained(self) -> bool:
        """Return True if nothing waits to be written. A round may find a sync still under way."""
        self.round()
        return not (self.store.catalog.writes or self.store.catalog.writes.num_writing)

    @rule(name=chains, now=st.booleans())
    def save_next(self, name: str, now: bool) -> None:
        """Extend a chain by one chunk; seal it now or later."""
        trunk = TRUNKS[name]
        depth = len(self.store.match(trunk))
        if depth == DEPTH:
            return
        missing = self.store.missing(trunk[depth], list(SIZES))
        if not missing:
            return
        save = self.store.begin_save(trunk[depth], {t: SIZES[t] for t in missing})
        if save is not None:
            self.saves.append(save)
            if now:
                self.complete(len(self.saves) - 1)

    def complete(self, index: int) -> None:
        save = self.saves.pop(index)
        fill(self.store, save)
        self.store.complete_save(save)
        self.sealed.add(save.chunk)

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), seal=st.booleans())
    def end_save(self, data: st.DataObject, seal: bool) -> None:
        index = data.draw(st.integers(0, len(self.saves) - 1))
        if seal:
            self.complete(index)
        else:
            self.store.abandon_save(self.saves.pop(index))

    @rule(name=chains, depth=st.integers(1, DEPTH))
    def restore(self, name: str, depth: int) -> None:
        found = self.store.match(TRUNKS[name])[:depth]
        wanted = [
            i
            for i in ids_of([x.chunk for x in found])
            if i.state_type in dict(next(x.tiers for x in found if x.chunk.key == i.chunk))
        ]
        restore = begin(self.store, wanted)
        in_dram = {
            i for x in found for i in ids_of([x.chunk]) if x.tiers.get(i.state_type) is Tier.DRAM
        }
        if self.verify == "ssd":
            assert in_dram <= set(restore.offsets), "what is in DRAM is had at once"
        self.restores.append(restore)

    @precondition(lambda self: self.restores)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        restore = data.draw(st.sampled_from(self.restores))
        self.restores.remove(restore)
        restore.release()

    @rule(name=chains, depth=st.integers(1, DEPTH), late=st.booleans(), used=st.floats(0.0, 1.0))
    def expect(self, name: str, depth: int, late: bool, used: float) -> None:
        """A session is due: for long, or hardly any more."""
        self.used_within = used
        now_s = self.bench.clock()
        leaves = tuple(chunk.key for chunk in reversed(TRUNKS[name][:depth]))
        latest_s = now_s + (1e-4 if late else 1e9)
        self.store.expect(ExpectedReturn(name, leaves, now_s, latest_s, 0.5))

    @rule(name=chains)
    def come_back(self, name: str) -> None:
        self.store.session_returned(name)

    @rule(name=chains, depth=st.integers(0, DEPTH))
    def decline(self, name: str, depth: int) -> None:
        self.store.decline(self.store.match(TRUNKS[name])[depth:])

    @rule(name=chains, depth=st.integers(1, DEPTH), is_bounded=st.booleans())
    def pin(self, name: str, depth: int, is_bounded: bool) -> None:
        """A client or an operator pins a chain; what is refused leaves the earlier pin."""
        leaves = [chunk.key for chunk in reversed(TRUNKS[name][:depth])]
        pinned = self.store.retention.pin_chain(
            name, leaves, 1e9, name[0].encode(), is_bounded=is_bounded
        )
        if isinstance(pinned, Pinned):
            found = dict[Artifact, list[SlotRef]]()
            node = next(filter(None, map(self.store.catalog.tiers.index.nodes.get, leaves)))
            assert node.chunk.end == pinned.end
            while node.parent is not None:
                for a in node.artifacts.values():
                    if a.sealed:
                        found[a] = [x for x in (a.dram, a.ssd) if x is not None]
                node = node.parent
            self.pinned[name] = found

    @rule(name=chains)
    def unpin(self, name: str) -> None:
        kept = self.store.retention.unpin_chain(name)
        assert bool(kept) == (self.pinned.pop(name, None) is not None)

    @rule(name=chains, depth=st.integers(0, DEPTH), ttl=st.booleans(), used=st.booleans())
    def limit_life(self, name: str, depth: int, ttl: bool, used: bool) -> None:
        """The end of a chain is to be forgotten, or to leave first, unless it is used."""
        chunks = [chunk.key for chunk in TRUNKS[name]]
        self.store.retention.limit_life(chunks[depth:], 0.0, is_forgotten=ttl)
        if used:
            self.store.retention.lift_limits(reversed(chunks))
        self.store.retention.expire_due()

    @rule(name=chains, depth=st.integers(1, DEPTH), priority=st.sampled_from(["high", "ended"]))
    def end_turn(self, name: str, depth: int, priority: str) -> None:
        """A session keeps its chain for long, or it ends, and its pin with it."""
        leaves = [chunk.key for chunk in reversed(TRUNKS[name][:depth])]
        if priority == "high":
            until_s = self.bench.clock() + 1e9
            self.store.retention.protect_chain(name, leaves, until_s, name[0].encode())
        else:
            self.store.retention.retire_session(name, leaves)
            self.pinned.pop(name, None)

    @rule(name=chains, depth=st.integers(1, DEPTH))
    def forget_session(self, name: str, depth: int) -> None:
        """An operator clears a session: its own pin ends, those of others keep what they have."""
        self.pinned.pop(name, None)
        self.store.forget_session(name, [TRUNKS[name][depth - 1].key])

    @rule(rounds=st.integers(1, 4))
    def io_round(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    @precondition(lambda self: self.ssd)
    @rule()
    def touch(self) -> None:
        """Do what the I/O thread does every half minute."""
        assert self.store.io_thread is not None
        self.store.io_thread.housekeep()

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.sealed.clear()
        self.pinned.clear()
        assert all(not self.store.match(t) for t in TRUNKS.values())

    @precondition(lambda self: self.ssd)
    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        """Cleanly, or with nothing written that is still pending."""
        if not kill:
            self.finish_restores()
            until(self.drained)
        durable = {
            a.id
            for a in self.store.catalog.tiers.index.artifacts()
            if a.ssd is not None and not self.store.catalog.tiers.journal_stale
        }
        for restore in self.restores:
            restore.release()
        self.restores.clear()
        self.saves.clear()
        self.pinned.clear()
        assert self.store.io_thread is not None
        self.store.io_thread.ssd.rows.directory.close()  # as the kernel does for a killed process
        self.store.arena.close()
        self.store = self.open()
        back = {a.id for a in self.store.catalog.tiers.index.artifacts()}
        self.check_restarted(back)
        if not kill:
            assert back >= {i for i in durable if self.comes_back(i, durable)}

    def check_restarted(self, back: set[ArtifactId]) -> None:
        """By itself an engine finds only what it can reach."""
        assert back == {
            i
            for t in TRUNKS.values()
            for x in self.store.match(t)
            for i in ids_of([x.chunk], x.tiers)
        }

    def comes_back(self, artifact_id: ArtifactId, durable: set[ArtifactId]) -> bool:
        """Return True if a restart must find it: its chunk and all above it are durable."""
        for trunk in TRUNKS.values():
            for depth, chunk in enumerate(trunk):
                if chunk.key == artifact_id.chunk:
                    has_chunk = not durable.isdisjoint(ids_of([chunk], [DENSE]))
                    return has_chunk and all(durable & set(ids_of([c])) for c in trunk[:depth])
        raise AssertionError

    @invariant()
    def what_is_pinned_stays_where_it_is(self) -> None:
        for found in self.pinned.values():
            for artifact, slots in found.items():
                assert not artifact.forgotten
                assert {*slots} <= {artifact.dram, artifact.ssd}

    @invariant()
    def consistent(self) -> None:
        self.store.check_integrity()

    def count(self) -> None:
        """Add up what was counted since the last time, by metric."""
        for key, value in (self.bench.recorder.drain() or {}).get(COUNTERS, {}).items():
            self.counted[key.partition("{")[0]] += value
            self.counted_by_key[key] += value

    @invariant()
    def what_was_prefetched_is_used_wasted_or_waits(self) -> None:
        self.count()
        came, used, wasted = (
            self.counted[f"heterocache_prefetch{x}_bytes"] for x in ("ed", "_used", "_wasted")
        )
        waiting = self.store.catalog.tiers.prefetched._waiting
        assert all(artifact.dram is not None for artifact in waiting)
        assert came == used + wasted + sum(artifact.size_bytes for artifact in waiting)

    @invariant()
    def only_sealed_chunks_are_visible_and_all_are_reachable(self) -> None:
        index = self.store.catalog.tiers.index
        for node in index.nodes.values():
            above = node.parent
            while node.stored is not None and above is not None and above is not index.root:
                assert above.stored is not None or self.may_be_a_gap(above), "out of reach"
                above = above.parent
        if not self.ssd:
            visible = {x.chunk for t in TRUNKS.values() for x in self.store.match(t)}
            assert visible <= self.sealed

    def may_be_a_gap(self, node: Node) -> bool:
        """Return True if a chunk needs nothing stored though something below it is."""
        return False

    @invariant()
    def pinned_bytes_are_right(self) -> None:
        view = self.store.arena.view
        for restore in self.restores:
            assert set(restore.failed.values()) <= self.harmless
            for artifact_id, at in restore.offsets.items():
                size = SIZES[artifact_id.state_type]
                assert np.array_equal(view[at : at + size], contents(artifact_id, size))


class DramMachine(StoreMachine):
    ssd = False


class VerifyAllMachine(StoreMachine):
    verify = "all"


class ValueMachine(StoreMachine):
    eviction = "value"


class DramValueMachine(DramMachine):
    eviction = "value"


class MixMachine(StoreMachine):
    """Chains without checkpoints and single checkpoints: zones change hands in both tiers."""

    @rule(name=chains, count=st.integers(1, DEPTH))
    def save_prefix(self, name: str, count: int) -> None:
        """Extend a chain without checkpoints."""
        for chunk in TRUNKS[name][len(self.store.match(TRUNKS[name])) :][:count]:
            if not self.store.missing(chunk, [DENSE]):
                return
            save = self.store.begin_save(chunk, {DENSE: SIZES[DENSE]})
            if save is None:
                return
            self.saves.append(save)
            self.complete(len(self.saves) - 1)

    @rule(name=chains, depth=st.integers(0, DEPTH - 1))
    def save_checkpoint(self, name: str, depth: int) -> None:
        """Add a checkpoint to a chunk that has none."""
        found = self.store.match(TRUNKS[name])
        if depth < len(found) and self.store.missing(found[depth].chunk, [WINDOW]):
            save = self.store.begin_save(found[depth].chunk, {WINDOW: SIZES[WINDOW]})
            if save is not None:
                self.saves.append(save)
                self.complete(len(self.saves) - 1)


class BudgetMachine(StoreMachine):
    """A bucket of two chunks, which hardly fills while a test runs."""

    eviction = "value"
    budget_bytes = 8 * 2 * CHUNK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.began_s = time.time()

    @invariant()
    def within_budget(self) -> None:
        """Over all restarts and resets."""
        passed = (time.time() - self.began_s) / 86_400
        allowed = self.budget_bytes * (1 / 8 + passed) if self.budget_bytes else 0
        assert self.disk.written_bytes <= allowed

    @invariant()
    def what_is_on_ssd_is_of_use_after_a_restart(self) -> None:
        for artifact in self.store.catalog.tiers.index.artifacts():
            above = artifact.node.parent
            if artifact.ssd is not None and above is not None and above.parent is not None:
                assert any(a.ssd is not None for a in above.artifacts.values())


for machine, examples in (
    (StoreMachine, 40),
    (DramMachine, 40),
    (VerifyAllMachine, 15),
    (ValueMachine, 15),
    (DramValueMachine, 15),
    (BudgetMachine, 25),
    (MixMachine, 40),
):
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None
    )
TestStoreMachine = StoreMachine.TestCase
TestDramMachine = DramMachine.TestCase
TestVerifyAllMachine = VerifyAllMachine.TestCase
TestValueMachine = ValueMachine.TestCase
TestDramValueMachine = DramValueMachine.TestCase
TestBudgetMachine = BudgetMachine.TestCase
TestMixMachine = MixMachine.TestCase
