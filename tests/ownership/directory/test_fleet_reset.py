"""After a reset of a fleet no state from before it is exchanged, for any order of events."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.generation import FIRST
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Wanted
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.tools.cli import main
from ownership.directory import Directory, Worker, opening
from ownership.directory.fleet_reset import reset_fleet
from ownership.directory.memory import MemoryDirectory
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from tests.ownership.fleet_bench import LEASE_S, DirectoryBench, join
from tests.store.filling import CHUNK, FINGERPRINT, SIZES, Bench, intact, put, wait
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

TOKENS = 2 * CHUNK
HASHER = ChainHasher(FINGERPRINT, CHUNK)


class Engine:
    """A store in a fleet, with the chains that its scheduler side would make."""

    def __init__(
        self, name: str, directory: Directory, network: MemoryNetwork, ssd: Path | None = None
    ) -> None:
        self.worker = FleetWorker(directory, name, MemberTimes(0.6, call_s=0.05), Recorder())
        access = PeerAccess(
            self.worker.peers, lambda regions: MemoryPeers(network, regions), self.worker.wake
        )
        self.store: ArtifactStore = Bench(ssd).open(peers=access)
        assert self.store.sharing is not None
        self.worker.start(self.store.sharing)
        until(lambda: self.worker._keeper.lease is not None)

    def chain(self, seed: int = 0) -> list[ChunkRange]:
        chain = RequestChain(HASHER.with_root(self.store.catch_up().tag, b""))
        chain.extend([(i * 31 + seed) % 997 for i in range(TOKENS)])
        return list(chain.chunks())

    def save(self, seed: int = 0) -> None:
        put(self.store, self.chain(seed))
        ids = [ArtifactId(c.key, kind) for c in self.chain(seed) for kind in SIZES]
        find = self.store.catalog.tiers.index.find
        until(lambda: all((a := find(i)) is not None and (a.token or a.replica) for i in ids))

    def restored(self, seed: int = 0) -> int:
        """Return the artifacts of peers that were read and verified for a request."""
        chain = self.chain(seed)
        lookup = self.worker.find([c.key for c in chain])
        until(lambda: lookup.poll())
        copies = {
            ArtifactId(chunk.key, kind): found[0]
            for chunk, kinds in zip(chain, lookup.found, strict=False)
            for kind, found in kinds.items()
        }
        wanted = [
            Wanted(kind, [StoredChunk(c, {}) for c in chain if ArtifactId(c.key, kind) in copies])
            for kind in SIZES
        ]
        restore = wait(self.store.begin_restore([w for w in wanted if w.chunks], copies))
        assert intact(self.store, restore)
        count = len(restore.offsets)
        restore.release()
        return count

    def adopted(self, number: int) -> bool:
        assert self.store.sharing is not None
        return self.store.sharing.adopted == number

    def close(self) -> None:
        self.worker.close()
        self.store.close()


Join = Callable[..., Engine]


@pytest.fixture
def joins(directory: Directory) -> Iterator[Join]:
    network, engines = MemoryNetwork(), list[Engine]()

    def join(name: str, ssd: Path | None = None) -> Engine:
        engines.append(Engine(name, directory, network, ssd))
        return engines[-1]

    yield join
    for engine in engines:
        engine.close()


def test_a_rolling_update_never_mixes(directory: Directory, joins: Join) -> None:
    """Each engine gets new weights and is reset by itself; then all are, with one call."""
    ann, bob = joins("ann"), joins("bob")
    bob.save()
    until(lambda: ann.restored() > 0)
    assert ann.store.reset()
    assert ann.restored() == 0, "bob has the old weights still"
    ann.save(1)
    assert bob.restored(1) == 0
    assert bob.store.reset()
    assert bob.restored(1) == ann.restored() == 0, "nobody has said that both are alike"
    reset = reset_fleet(directory, 20.0)
    assert reset.is_complete
    assert reset.adopted == ("ann", "bob")
    assert ann.restored(1) == bob.restored() == 0, "of before"
    ann.save(2)
    until(lambda: bob.restored(2) > 0)


def test_a_fleets_reset_from_before_an_engines_own_does_not_undo_it(
    directory: Directory, joins: Join
) -> None:
    """The engine learns of the reset only after it has new weights."""
    ann, bob = joins("ann"), joins("bob")
    number = directory.reset_generation()
    assert ann.store.reset()
    until(lambda: bob.adopted(number))
    until(lambda: ann.store.generation.knows_fleet)
    assert ann.store.generation.private
    bob.save()
    assert ann.restored() == 0
    assert directory.generation().adopted["ann"] == 0
    assert reset_fleet(directory, 20.0).is_complete


def test_an_engine_that_was_away_follows_the_reset_afterwards(
    directory: Directory, joins: Join, tmp_path: Path
) -> None:
    ann = joins("ann", tmp_path / "ssd")
    ann.save()
    assert ann.store.flush(20)
    old = ann.chain()
    ann.close()
    number = reset_fleet(directory).number
    ann = joins("ann", tmp_path / "ssd")
    until(lambda: ann.adopted(number))
    assert ann.store.catch_up().fleet == number
    assert not ann.store.match(old)


def test_an_adoption_survives_a_restart_of_the_engine(
    directory: Directory, joins: Join, tmp_path: Path
) -> None:
    ann = joins("ann", tmp_path / "ssd")
    number = reset_fleet(directory, 20.0).number
    ann.save()
    assert ann.store.flush(20)
    ann.close()
    again = Bench(tmp_path / "ssd").open()
    assert again.generation.fleet == number
    chain = RequestChain(HASHER.with_root(again.generation.tag, b""))
    chain.extend([i * 31 % 997 for i in range(TOKENS)])
    assert len(again.match(chain.chunks())) == 2
    again.close()


def test_a_directory_that_lost_its_memory_brings_nothing_back() -> None:
    directory, network = MemoryDirectory(), MemoryNetwork()
    ann = Engine("ann", directory, network)
    number = reset_fleet(directory, 20.0).number
    directory._leases._generation = 0
    until(lambda: directory.generation().number == number)
    assert ann.adopted(number)
    directory._leases._generation = 1  # reset after it lost its memory
    until(lambda: directory.generation().number == number + 1)
    until(lambda: ann.adopted(number + 1))
    ann.close()


def test_engines_that_do_not_answer_are_named(directory: Directory, joins: Join) -> None:
    joins("ann")
    join(directory, "stopped", lease_s=1_000.0)
    reset = reset_fleet(directory, 2.0)
    assert reset.adopted == ("ann",)
    assert reset.missing == ("stopped",)
    assert not reset.is_complete


def test_a_directory_that_is_slow_for_a_moment_is_asked_again() -> None:
    directory = MemoryDirectory()
    lease = directory.register(Worker("ann"), LEASE_S)
    answers = [DirectoryUnavailableError("late"), None]

    class Slow(MemoryDirectory):
        def reset_generation(self) -> int:
            return directory.reset_generation()

        def generation(self):  # type: ignore[no-untyped-def]
            if answers and answers.pop(0) is not None:
                raise DirectoryUnavailableError("late")
            number = directory.generation().number
            directory.report_generation(lease.epoch, number, number)
            return directory.generation()

    assert reset_fleet(Slow(), 20.0, sleep=lambda _: None).is_complete


class TestCommand:
    def test_the_command_names_the_engines_that_have_adopted(
        self, bench: DirectoryBench, joins: Join, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = getattr(bench, "url", None)
        if url is None:  # a directory in memory is of one process
            return
        joins("ann")
        joins("bob")
        assert main(["reset", "--directory", url, "--wait", "20", "--yes"]) == 0
        out = capsys.readouterr().out
        assert "ann: adopted" in out
        assert "bob: adopted" in out
        assert main(["reset", "--directory", url, "--wait", "20", "--json", "-y"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["adopted"] == ["ann", "bob"]
        assert told["number"] > 0

    def test_the_command_says_that_there_is_no_engine(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(opening, "open_directory", lambda url: MemoryDirectory())
        assert main(["reset", "--directory", "redis://host", "--yes"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "no engine is registered" in err

    def test_a_directory_of_this_process_alone_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(opening, "open_directory", lambda url: pytest.fail("it goes on"))
        assert main(["reset", "--directory", "memory://", "--yes"]) == 2
        assert "memory:// is a directory within one process" in capsys.readouterr().err

    @pytest.mark.parametrize(("wait", "code"), [([], 0), (["--wait", "0"], 1)])
    def test_a_wait_of_no_time_is_one(
        self, monkeypatch: pytest.MonkeyPatch, wait: list[str], code: int
    ) -> None:
        directory = MemoryDirectory()
        directory.register(Worker("ann"), LEASE_S)
        monkeypatch.setattr(opening, "open_directory", lambda url: directory)
        assert main(["reset", "--directory", "redis://host", "--yes", *wait]) == code

    @pytest.mark.parametrize("answer", [None, "n", "y"])
    def test_the_command_asks_first(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        answer: str | None,
    ) -> None:
        directory, stdin = MemoryDirectory(), io.StringIO(f"{answer or ''}\n")
        before = directory.generation().number
        monkeypatch.setattr(opening, "open_directory", lambda url: directory)
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr(stdin, "isatty", lambda: answer is not None)
        assert main(["reset", "--directory", "redis://u:secret@host"]) == (
            1 if answer == "y" else 2
        )
        assert (directory.generation().number > before) == (answer == "y")
        err = capsys.readouterr().err
        assert ("--yes" if answer is None else "stored by the fleet at redis://...@host?") in err
        assert "secret" not in err

    @pytest.mark.parametrize("wait", ["nan", "inf", "-1", "1e9", "long"])
    def test_a_wait_that_is_none_resets_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wait: str
    ) -> None:
        monkeypatch.setattr(opening, "open_directory", lambda url: pytest.fail("it goes on"))
        assert main(["reset", "--directory", "memory://", "--yes", "--wait", wait]) == 2
        err = " ".join(capsys.readouterr().err.replace("│", "").split())
        assert "'--wait': expected a number from 0 to 86400" in err

    @pytest.mark.parametrize("url", ["http://x", "redis://127.0.0.1:1/0"])
    def test_the_command_says_that_the_directory_cannot_be_used(
        self, capsys: pytest.CaptureFixture[str], url: str
    ) -> None:
        assert main(["reset", "--directory", url, "--wait", "1", "--yes"]) == 2
        assert "heterocache:" in capsys.readouterr().err


class Resets(RuleBasedStateMachine):
    """An oracle of the rule: engines share state only if no reset of one of them came after it.

    Without threads: what an engine hears and when is the machine's choice.
    """

    @initialize()
    def fleet(self) -> None:
        self.directory = MemoryDirectory()
        self.generations = dict.fromkeys("abc", FIRST)
        self.epochs = {n: self.directory.register(Worker(n), LEASE_S).epoch for n in "abc"}
        self.asked: dict[str, tuple[object, int]] = {}
        self.moment = 0
        self.reset_at = dict.fromkeys("abc", 0)
        """The time at which each engine's weights last changed and it was reset."""
        self.fleet_at: dict[int, int] = {0: 0}
        """The time at which each of the fleet's generations began."""

    @rule(name=st.sampled_from("abc"))
    def own_reset(self, name: str) -> None:
        self.moment += 1
        self.reset_at[name] = self.moment
        self.generations[name] = self.generations[name].after_own_reset()

    @rule()
    def fleet_reset(self) -> None:
        self.moment += 1
        self.fleet_at[self.directory.reset_generation()] = self.moment

    @rule(name=st.sampled_from("abc"))
    def ask(self, name: str) -> None:
        of = self.generations[name]
        number = self.directory.report_generation(self.epochs[name], of.adopted, of.fleet)
        self.asked[name] = (of, number)

    @rule(name=st.sampled_from("abc"))
    def hear(self, name: str) -> None:
        """Let an engine adopt it at any later time, also after a reset of its own."""
        asked_in, number = self.asked.pop(name, (None, 0))
        if asked_in is self.generations[name]:
            self.generations[name] = self.generations[name].with_fleet(number)

    @invariant()
    def who_shares_has_seen_a_common_reset_after_its_own(self) -> None:
        for name, generation in getattr(self, "generations", {}).items():
            if not generation.private:
                assert self.fleet_at[generation.fleet] >= self.reset_at[name]
        tags = [g.tag for g in getattr(self, "generations", {}).values() if g.private]
        assert len(set(tags)) == len(tags)


Resets.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestResets = Resets.TestCase
