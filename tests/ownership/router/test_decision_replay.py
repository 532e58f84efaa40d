"""The log of a real router, in front of stub workers, is enough to make its decisions again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stub_fleet import StubFleet
from hetero_connector.artifacts.record import ChunkKey
from ownership.decisions.records import DecisionRecord
from ownership.router.decision_log import ChunkNumbers, DecisionLog
from ownership.simulator.decisions.policies import OtherPolicies
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.decision_file import DecisionFile
from ownership.simulator.traces.router_decisions import read
from tests.ownership.router.test_policy_placer import SIZE, KnownFleet, running
from tests.ownership.scheduling.fleets import fleet_of, worker
from tests.ownership.simulator.small_fleets import fleet as simulated_fleet
from tests.waiting import until

TURNS = 4
SYSTEM = [token % 199 for token in range(3 * SIZE)]
"""The prompts of all sessions begin with it."""


@pytest.fixture
def known(fleet: StubFleet, tmp_path: Path) -> Iterator[KnownFleet]:
    with running(fleet, tmp_path) as found:
        yield found


def talk(known: KnownFleet, number: int) -> None:
    prompt = [*SYSTEM]
    for _ in range(TURNS):
        prompt += [200 + number] * SIZE
        known.complete(f"s{number}", prompt=prompt, stream=True, stub={"events": 3, "gap_s": 0.02})


def test_the_log_is_enough_to_decide_again_and_to_replay(known: KnownFleet) -> None:
    known.store(0, 3)
    threads = [threading.Thread(target=talk, args=(known, number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(known.decisions()) == 3 * TURNS)
    log, policies = DecisionFile(known.lines), OtherPolicies(["ownerserve", "colocated"])
    loads = 0
    for decided in log:
        policies.add(decided)
        assert decided.record.ttft_s is not None
        loads += bool(decided.record.loads)
    assert log.counts.sentences() == []
    assert loads, "some were placed while others ran"
    own, other = policies.rows()
    assert (own.decisions, own.equal_share, own.impossible) == (3 * TURNS, 1.0, 0)
    assert own.ttft_change_s == pytest.approx((0.0, 0.0, 0.0))
    assert other.decisions == 3 * TURNS

    trace = read(known.lines)
    assert trace.block_tokens == SIZE
    sessions = list(trace)
    assert [len(x.requests) for x in sessions] == [TURNS] * 3
    for session in sessions:
        assert [x.parent for x in session.requests] == [None, *range(TURNS - 1)]
        assert [x.input_tokens for x in session.requests] == [(4 + x) * SIZE for x in range(TURNS)]
        last = session.requests[-1].blocks
        assert [x.blocks.shared_with(last) for x in session.requests] == [4, 5, 6, 7]
    one, another = (x.requests[-1].blocks for x in sessions[:2])
    assert one.shared_with(another) == 3, "the system prompt"
    found = simulate(trace, simulated_fleet(2, chunk_tokens=256), parse_policy("ownerserve"))
    assert found.figures.requests == 3 * TURNS


def record() -> DecisionRecord:
    return DecisionRecord(
        time=1.0, path="chat", policy="p", prompt_tokens=1,
        worker="a", action="colocated_prefill", predicted={}, predicted_ttft_s=None,
    )  # fmt: skip


def test_a_line_that_the_disk_took_half_of_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[None] = []
    log = DecisionLog(tmp_path / "log", lambda: lost.append(None))
    whole, is_full = log._file, True

    class FullOnce:
        def write(self, line: bytes) -> int:
            nonlocal is_full
            part, is_full = (line[:20] if is_full else line), False
            return whole.write(part)

        def fileno(self) -> int:
            return whole.fileno()

        def close(self) -> None:
            whole.close()

    monkeypatch.setattr(log, "_file", FullOnce())
    for _ in range(3):
        log.write(record(), None)
    log.close()
    assert len(lost) == 1
    found = DecisionFile(tmp_path / "log")
    assert (sum(1 for _ in found), found.counts.unreadable) == (2, 1)


def test_lines_follow_the_path_of_a_file_that_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(path)
    log.write(record(), None)
    until(path.read_bytes)
    path.rename(tmp_path / "older")
    log.write(record(), None)
    until(lambda: path.exists() and path.read_bytes())
    path.unlink()
    log.write(record(), None)
    log.close()
    assert sum(1 for _ in DecisionFile(path)) == 1
    assert sum(1 for _ in DecisionFile(tmp_path / "older")) == 1


def test_each_file_has_the_fleets_of_its_decisions(tmp_path: Path) -> None:
    """Also of those that were decided before the file was renamed, on figures of before."""
    path = tmp_path / "log"
    log = DecisionLog(path)
    decided = [record() for _ in range(4)]
    before, after = (fleet_of(worker(name)) for name in ("before", "after"))
    for line, fleet in zip(decided, (before, before, after, after), strict=True):
        log.note_fleet(fleet, line)
    log.write(decided[0], None)
    until(lambda: path.read_bytes().count(b"\n") == 2)
    path.rename(tmp_path / "older")
    for line in (decided[2], decided[1], decided[3]):
        log.write(line, None)
    log.close()
    names = [[x.fleet.names for x in DecisionFile(tmp_path / "older") if x.fleet]]
    names += [[x.fleet.names for x in DecisionFile(path) if x.fleet]]
    assert names == [[("before",)], [("after",), ("before",), ("after",)]]
    assert path.read_bytes().count(b"\n") == 5, "each fleet once"


def test_a_fleet_is_written_with_the_next_decision_after_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ownership.router.decision_log._MOST", 1)
    may_write, lost = threading.Event(), list[None]()
    monkeypatch.setattr(DecisionLog, "_follow_path", lambda log: may_write.wait())
    log = DecisionLog(tmp_path / "log", lambda: lost.append(None))
    fleet = fleet_of(worker("a"))
    for _ in range(9):
        line = record()
        log.note_fleet(fleet, line)
        log.write(line, None)
    may_write.set()
    log.close()
    found = DecisionFile(tmp_path / "log")
    assert sum(x.fleet is not None for x in found) == 9 - len(lost)
    assert lost


def test_each_time_that_a_disk_is_full_is_a_warning_and_each_line_lost_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost = tmp_path / "log", list[None]()
    path.symlink_to("/dev/full")
    log = DecisionLog(path, lambda: lost.append(None))
    for times in (1, 2):
        for _ in range(3):
            log.write(record(), None)
        until(lambda times=times: len(lost) == 3 * times)
        path.unlink()
        log.write(record(), None)
        until(lambda: path.exists() and path.read_bytes())
        path.unlink()
        path.symlink_to("/dev/full")
        until(lambda times=times: caplog.text.count("again") == times)
    log.close()
    assert caplog.text.count("are not all in") == 2


def test_chunks_are_numbered_as_they_are_met() -> None:
    numbers = ChunkNumbers(100)
    keys = [ChunkKey(bytes([n])) for n in range(200)]
    assert numbers.runs(keys[:4]) == [(0, 4)]
    assert numbers.runs([*keys[:2], keys[9], *keys[2:4]]) == [(0, 2), (4, 1), (2, 2)]
    assert numbers.runs([]) == []
    for n in range(0, 200, 10):
        assert numbers.runs(keys[:2]) == [(0, 2)], "what is used again is remembered"
        numbers.runs(keys[n : n + 10])
    assert len(numbers) <= 100
