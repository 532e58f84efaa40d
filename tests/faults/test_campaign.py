"""The machine finds what it is there for: shown with stores that are broken on purpose."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock, patch

import pytest

from hetero_connector.engine.scheduler import requests
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.checksums import Checksums
from hetero_connector.store.peers.reader import PeerReads
from hetero_connector.store.ssd import reader
from ownership.directory.memory import MemoryDirectory
from ownership.member.record_audit import RecordAudit
from tests.engine.adversarial_device import AdversarialDevice
from tests.faults import campaign, fleet_round
from tests.faults.campaign import run_campaign, seed_of_the_day
from tests.faults.disk import Cut, Fate
from tests.faults.engine_round import EngineRound
from tests.faults.failpoints import MOMENTS
from tests.faults.fleet_round import FleetRound
from tests.faults.kill_round import KillRound
from tests.faults.life import Life
from tests.faults.store_round import StoreRound

ROUNDS = 100


def store_round(seed: int) -> StoreRound:
    return StoreRound(seed, threaded=False)


def found(round_of: Callable[[int], Life] = store_round) -> set[str]:
    """The kinds of findings of the first round that has any."""
    for seed in range(1, ROUNDS):
        verdict = round_of(seed).run()
        if not verdict.is_good:
            return {
                kind
                for kind in ("wrong_answers", "engine_deaths", "stuck")
                if getattr(verdict, kind)
            }
    return set()


def test_a_campaign_adds_up_its_rounds_and_says_which_failed() -> None:
    with patch.object(ArtifactStore, "begin_save", side_effect=RuntimeError("a bug")):
        result = run_campaign(3, seed=1)
    assert (result.rounds, result.engine_deaths, result.failed) == (3, 3, [1, 2, 3])
    assert json.loads(result.as_json())["engine_deaths"] == 3


def test_a_round_that_does_not_end_is_a_hang() -> None:
    goes_on = threading.Event()
    with (
        patch.object(campaign, "PATIENCE_S", 0.1),
        patch.object(campaign, "round_of", lambda seed: Mock(run=goes_on.wait)),
    ):
        result = run_campaign(1, seed=1)
    goes_on.set()
    assert (result.rounds, result.hangs, result.failed) == (1, 1, [1])


@pytest.mark.parametrize("round_of", [store_round, EngineRound])
def test_a_round_by_hand_is_the_same_each_time(round_of: Callable[[int], Life]) -> None:
    for seed in range(1, 6):
        first, again = (round_of(seed).run() for _ in range(2))
        assert first == again


@pytest.mark.parametrize("round_of", [store_round, EngineRound])
def test_a_round_leaves_no_file_open(round_of: Callable[[int], Life]) -> None:
    before = _open_files()
    for seed in range(1, 6):
        round_of(seed).run()
    assert _open_files() <= before, "each round has a folder of its own"


def _open_files() -> set[str]:
    """Return the files of rounds that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {path for path in found if "fault-round" in path}


def test_bytes_that_nobody_checks_are_found() -> None:
    with patch.object(Checksums, "is_intact", lambda *_: True):
        assert "wrong_answers" in found()


def test_a_reset_that_forgets_nothing_is_found() -> None:
    with patch.object(ArtifactStore, "reset", lambda _: None):
        assert "wrong_answers" in found()


def test_reads_that_are_never_begun_are_found() -> None:
    with patch.object(reader, "_IN_FLIGHT_BYTES", 0):
        assert "stuck" in found()


def test_an_error_that_reaches_the_scheduler_is_found() -> None:
    with patch.object(ArtifactStore, "begin_restore", side_effect=RuntimeError("a bug")):
        assert "engine_deaths" in found()


def test_state_of_another_tenant_in_a_page_is_found() -> None:
    with patch.object(requests, "extra_keys", lambda *_: lambda first, last: b""):
        assert "wrong_answers" in found(EngineRound)


def test_pages_that_are_reported_before_they_are_copied_are_found() -> None:
    """Neither the scheduler nor later work waits for a save: its slot's next user may read it."""
    with (
        patch.object(AdversarialDevice, "fence", lambda _: lambda: True),
        patch.object(AdversarialDevice, "make_forward_wait_for_saves", lambda _: None),
    ):
        assert "wrong_answers" in found(EngineRound)


def test_a_parked_request_that_goes_on_too_early_is_found() -> None:
    """Before its load has ended."""
    load = AdversarialDevice.load_parked

    def unfenced(device: AdversarialDevice, *arguments: Any) -> Callable[[], bool]:
        load(device, *arguments)
        return lambda: True

    with patch.object(AdversarialDevice, "load_parked", unfenced):
        assert "wrong_answers" in found(EngineRound)


def test_an_error_of_ours_in_a_hook_is_found() -> None:
    with patch.object(Restorer, "_begin", side_effect=RuntimeError("a bug")):
        assert "engine_deaths" in found(EngineRound)


def test_a_request_that_is_asked_about_for_ever_is_found() -> None:
    with patch.object(Restorer, "stage", lambda *_: None):
        assert "stuck" in found(EngineRound)


@pytest.mark.slow
def test_records_that_nobody_claims_again_are_found() -> None:
    with (
        patch.object(RecordAudit, "run_due", lambda _: 60.0),
        patch.object(fleet_round, "SETTLING_S", 4.0),
    ):
        assert any(FleetRound(seed).run().stuck for seed in range(1, 9))


@pytest.mark.slow
def test_a_fleet_that_reads_what_lies_anywhere_is_found() -> None:
    with patch.object(PeerReads, "_verify", lambda *_: None):
        assert any(FleetRound(seed).run().wrong_answers for seed in range(1, 30))


@pytest.mark.slow
def test_a_token_that_is_given_to_two_owners_is_found() -> None:
    with patch.object(MemoryDirectory, "_next_token", lambda directory: directory._sequence):
        assert any("the token was" in what for what in FleetRound(1).run().wrong_answers)


@pytest.mark.long
def test_every_failpoint_and_every_fault_is_met() -> None:
    """Check the rounds without threads, which are the same each time."""
    reached, injected = Counter[str](), Counter[str]()
    for seed in range(1, 60):
        verdict = StoreRound(seed, threaded=False).run()
        reached += verdict.reached
        injected += verdict.injected
    assert set(MOMENTS) <= set(reached)
    assert {f"cut:{how}" for how in Cut} <= set(injected)
    assert {name.rpartition(":")[2] for name in injected} >= set(Fate) - {Fate.WORKS}


@pytest.mark.long
def test_some_rounds() -> None:
    """The same each time, one of a fleet and one of killed processes among them."""
    result = run_campaign(rounds=60, seed=1)
    assert result.is_clean, result.report()
    assert result.rounds == 60


@pytest.mark.slow
def test_some_rounds_of_today() -> None:
    """Others each day: what they find is real, and `make test-faults` goes on from here."""
    result = run_campaign(rounds=1_000, seed=seed_of_the_day(), budget_s=60.0)
    assert result.is_clean, result.report()
    assert result.rounds


@pytest.mark.slow
def test_processes_killed_at_any_moment_leave_only_what_is_right() -> None:
    verdicts = [KillRound(seed).run() for seed in range(1, 6)]
    assert all(verdict.is_good for verdict in verdicts), [v for v in verdicts if not v.is_good]
    assert sum(sum(verdict.injected.values()) for verdict in verdicts) > 5
