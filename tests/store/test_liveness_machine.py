"""The store's model tests on a disk that fails, hangs and never ends: the rest comes to its end.

After the faults stop, nothing waits any more within some minutes of the store's clock: what was
sealed is summed, shown to the fleet and on SSD, or was counted as given up; every queue is empty
and every slot has an owner. Where what hung never ends, the same but for writing.
"""

from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, Save
from hetero_connector.store.catalog.catalog import ReservedSave
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.peers import sharing
from hetero_connector.transfer.base import Direction
from tests.clock import Clock
from tests.store.filling import SIZES, begin, ids_of
from tests.store.test_fleet_machine import THEIRS, FleetMachine
from tests.store.test_store_machine import DEPTH, TRUNKS, StoreMachine, chains
from tests.store.under_way import snapshot

pytestmark = pytest.mark.long

SETTLING_STEPS = 150
"""Two seconds each: a hang is noticed in one minute, a pause ends in another."""
BESIDE_READS_STEPS = 12
"""A quarter of a second each: for as long may what is sealed wait for reads."""


class Faults(StoreMachine):
    """Rules that break the disk, and one that asks what became of everything."""

    harmless = StoreMachine.harmless | {
        Failure.IO_ERROR,
        Failure.DEADLINE,
        Failure.CHECKSUM,
        Failure.CONGESTED,
    }

    def clock(self) -> Callable[[], float]:
        self.time = Clock()
        return self.time

    @rule(count=st.integers(1, 4))
    def transfers_hang(self, count: int) -> None:
        self.disk.files.hang_next(count)

    @rule(count=st.integers(1, 4))
    def transfers_fail(self, count: int) -> None:
        self.disk.files.fail_next(count)

    @rule(count=st.integers(1, 2))
    def a_bit_flips(self, count: int) -> None:
        self.disk.files.corrupt_next(count)

    @rule(after=st.integers(0, 2))
    def the_journal_hangs(self, after: int) -> None:
        self.beside.hang_after(after)

    @rule(count=st.integers(1, 4))
    def the_journal_fails(self, count: int) -> None:
        self.beside.fail_next(count)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 11.0, 61.0]), asked=st.booleans())
    def time_passes(self, seconds: float, asked: bool) -> None:
        self.time.passes(seconds)
        if asked:  # before the I/O thread has noticed
            for restore in self.restores:
                restore.poll()
        self.round()

    @rule()
    def leave_dram(self) -> None:
        self.store.leave_to_ssd()

    @rule(names=st.lists(chains, min_size=1, max_size=3), rounds=st.integers(0, 4))
    def seal(self, names: list[str], rounds: int) -> None:
        for name in names:
            self.save_next(name, now=True)
        self.io_round(rounds)

    @rule(name=chains, calls=st.integers(-1, 2), patience_s=st.sampled_from([1.0, 61.0]))
    def a_write_never_ends(self, name: str, calls: int, patience_s: float) -> None:
        """Nor does the call of the journal before it, or the one behind it."""
        if calls < 0:
            self.disk.files.hang_next()
        else:
            self.beside.hang_after(calls)
        self.seal([name], 3)
        self.time_passes(patience_s, asked=False)

    @rule(names=st.lists(chains, min_size=1, max_size=3), patience_s=st.sampled_from([1.0, 11.0]))
    def reads_never_end(self, names: list[str], patience_s: float) -> None:
        for name in names:
            self.store.leave_to_ssd()
            self.disk.files.hang_next()
            self.restore(name, 1)
            self.io_round(1)
        self.time_passes(patience_s, asked=True)

    @invariant()
    def nothing_is_queued_in_vain(self) -> None:
        catalog, writes = self.store.catalog, self.store.catalog.writes
        queues = catalog.loads._queues
        assert all(load.waiters for queue in queues.values() for load in queue)
        queued = [pending.artifact for pending in (*writes._queue, *writes._unsummed)]
        queued += [*writes.claims._until_s, *catalog._used]
        assert not [artifact for artifact in queued if artifact.forgotten]
        limit = len(list(self.store.catalog.tiers.index.artifacts()))
        assert max(len(writes), writes.num_unsummed, len(catalog._used)) <= limit

    @rule()
    def what_hangs_goes_on(self) -> None:
        self.disk.files.resume()
        self.beside.resume()

    @precondition(lambda self: self.ssd)
    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        """Killed at any moment; or else as on a healthy disk."""
        self.calm()
        if kill:
            self.beside.drop()
        else:
            self.what_hangs_goes_on()
            self.settle()
        super().restart(kill)

    @rule(goes_on=st.booleans(), reading=st.booleans())
    def the_faults_end(self, goes_on: bool, reading: bool) -> None:
        """Let everything that hangs go on, or never. Reads may be under way without a pause."""
        self.calm()
        if goes_on:
            self.what_hangs_goes_on()
        self.settle()
        if reading:
            self.seal_one_while_something_is_read()
        self.settle()
        if goes_on:
            assert self.store.catalog.writes.is_writable
            assert self.store.catalog.ssd_readable
            assert not self.store.catalog.late_bytes

    def teardown(self) -> None:
        self.calm()
        self.what_hangs_goes_on()
        if self.store.io_thread is not None:
            self.settle()
        super().teardown()

    def calm(self) -> None:
        """No further fault; what hangs goes on hanging."""
        self.beside.calm()
        files = self.disk.files
        files._hangs = files._corruptions = 0
        files._failures.clear()
        for restore in self.restores:
            restore.release()
        self.restores.clear()

    def settle(self) -> None:
        for _ in range(SETTLING_STEPS):
            self.time.passes(2.0)
            self.round()
            if not self.waits():
                break
        assert not self.waits(), self.waits()
        self.check_slots()

    def waits(self) -> list[str]:
        """Return everything that is wrong once all has come to its end."""
        catalog, now = self.store.catalog, snapshot(self.store.catalog)
        queues = {
            "loads": now.loads_queued,
            "reads": sum(not load.is_late for load in catalog.loads.by_artifact.values()),
            "checksums": now.unsummed,
            "writes": now.writes_queued,
            "writes under way": now.writing,
            "claims": now.pending_claims,
        }
        found = [f"{count} {name}" for name, count in queues.items() if count]
        found += [f"without a checksum: {a}" for a in self.sealed_here() if self.lacks_sum(a)]
        if catalog.writes.is_writable:
            left = [a for a in self.sealed_here() if a.ssd is None and not a.replica]
            if len(left) > self.given_up():
                found.append(f"neither on SSD nor counted as given up: {left}")
            if now.rows_to_forget:
                found.append("rows to forget")
        elif not (self.beside.is_stuck or self.hanging(Direction.WRITE)):
            found.append("nothing is written, and nothing hangs")
        if not catalog.ssd_readable and not self.hanging(Direction.READ):
            found.append("nothing is read, and nothing hangs")
        return found

    def lacks_sum(self, artifact: Artifact) -> bool:
        return artifact.checksum is None and self.store.catalog.writes.is_active

    def sealed_here(self) -> list[Artifact]:
        return [
            a for a in self.store.catalog.tiers.index.artifacts() if a.sealed and a.dram is not None
        ]

    def given_up(self) -> float:
        """Artifacts that are not on SSD, and were counted as that."""
        self.count()
        causes = ("heterocache_failures", "heterocache_evictions")
        counted = self.counted_by_key.items()
        return sum(n for key, n in counted if key.startswith(causes) and "ssd" in key)

    def hanging(self, direction: Direction) -> int:
        active = self.disk.files._active
        return sum(t.hung and t._direction is direction for t in active)

    def check_slots(self) -> None:
        """Every DRAM slot holds an artifact, or something that hangs may still touch it."""
        tiers = self.store.catalog.tiers
        for kind in SIZES:
            here = [a for a in tiers.index.artifacts() if a.state_type is kind and a.dram]
            late = [
                x for x in self.store.catalog.loads.by_artifact.values() if x.target is not None
            ]
            elsewhere = [x.artifact for x in late]
            elsewhere += [a for save in self.saves for a in taken_by(save) if a.forgotten]
            others = sum(artifact.state_type is kind for artifact in elsewhere)
            assert tiers.dram.num_used(kind) == len(here) + others, "a slot was lost"
            touched = tiers.dram.num_quarantined(kind)
            assert not touched or self.hanging(Direction.WRITE) or self.hanging(Direction.READ)

    def seal_one_while_something_is_read(self) -> None:
        """Its checksum waits for no read, its write for a second: though reads never pause."""
        writes = self.store.catalog.writes
        reading = self.read_that_goes_on()
        depths = {name: len(self.store.match(trunk)) for name, trunk in TRUNKS.items()}
        name = next((n for n, depth in depths.items() if depth < DEPTH), None)
        if reading is None or name is None:
            return
        self.save_next(name, now=True)
        for _ in range(BESIDE_READS_STEPS):
            self.time.passes(0.25)
            self.round()
        assert not writes.num_unsummed, "checksums wait for reads"
        assert not (len(writes) and writes.is_writable), "writes wait for reads"
        self.disk.files._hangs = 0
        self.disk.files.resume()
        reading.release()

    def read_that_goes_on(self) -> Restore | None:
        """A restore from SSD that has just begun and does not end; None if there is none."""
        if not self.store.catalog.ssd_readable or self.hanging(Direction.WRITE):
            return None
        self.store.leave_to_ssd()
        for trunk in TRUNKS.values():
            for stored in self.store.match(trunk):
                self.disk.files.hang_next()
                restore = begin(self.store, ids_of([stored.chunk], stored.tiers))
                self.round()
                if not restore.poll():
                    return restore
                restore.release()
                self.disk.files._hangs = 0
        return None


def taken_by(save: Save) -> list[Artifact]:
    """The slots that a save under way writes to; forgotten if there was a reset."""
    assert isinstance(save, ReservedSave)
    return save.artifacts


class LivenessMachine(Faults):
    pass


class VerifiedLivenessMachine(Faults):
    verify = "all"


class FleetLivenessMachine(Faults, FleetMachine):
    """The fleet may never answer for what nobody else owns."""

    def __init__(self) -> None:
        self.silent = True
        super().__init__()

    @rule()
    def reset(self) -> None:
        """No fleet says which resets it has had, and nobody waits for that here."""
        with patch.object(sharing, "_FLEET_S", 0.0):
            super().reset()

    def open(self) -> ArtifactStore:
        store = super().open()
        assert store.sharing is not None
        store.sharing.serve_under(7)
        return store

    @rule(silent=st.booleans())
    def the_fleet_answers(self, silent: bool) -> None:
        self.silent = silent

    @rule(unanswered=chains, answered=chains)
    def a_write_never_ends_while_others_wait_for_the_fleet(
        self, unanswered: str, answered: str
    ) -> None:
        self.silent = True
        self.seal([unanswered], 0)
        self.silent = False
        self.a_write_never_ends(answered, -1, 61.0)

    def judge(self, key: bytes) -> None:
        if not self.silent or key in THEIRS:
            super().judge(key)


@pytest.mark.parametrize(
    ("machine", "examples"),
    [(LivenessMachine, 40), (VerifiedLivenessMachine, 15), (FleetLivenessMachine, 40)],
)
def test_after_any_faults_everything_comes_to_its_end(machine: type[Faults], examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )
