"""A request whose read has failed is planned without that artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier, distinct_tiers
from hetero_connector.engine.scheduler.request_params import ALL_TIERS, DRAM_ALONE
from hetero_connector.engine.scheduler.restorer import without
from hetero_connector.metrics import COUNTERS, HISTOGRAMS
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.planner import Mode
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, Wanted
from tests.clock import Clock
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import CHUNK, LOAD_DEADLINE_S, Engine, in_use, tokens
from tests.planner.chains import KV, SWA, chain_of

IN_DRAM, ON_SSD = {KV: Tier.DRAM, SWA: Tier.DRAM}, {KV: Tier.SSD, SWA: Tier.DRAM}


@pytest.fixture
def chunks() -> list[StoredChunk]:
    return chain_of([IN_DRAM] * 30 + [ON_SSD] * 30)


def test_failed_artifacts_are_excluded_and_other_chunks_unchanged(
    chunks: list[StoredChunk],
) -> None:
    left = without(chunks, {ArtifactId(chunks[40].chunk.key, KV)}, ALL_TIERS)
    assert left[40] == StoredChunk(chunks[40].chunk, {SWA: Tier.DRAM})
    assert all(a is b for a, b in zip(left, chunks, strict=True) if a is not left[40])


def test_after_the_last_attempt_only_dram_counts(
    chunks: list[StoredChunk],
) -> None:
    left = without(chunks, {ArtifactId(chunks[10].chunk.key, SWA)}, DRAM_ALONE)
    tiers = [stored.tiers for stored in left]
    assert tiers == [IN_DRAM] * 10 + [{KV: Tier.DRAM}] + [IN_DRAM] * 19 + [{SWA: Tier.DRAM}] * 30
    assert len(distinct_tiers(left)) == 3


def on_ssd(directory: Path, mode: Mode = "always_load") -> Engine:
    """Return a restarted engine with 384 of 400 tokens stored, none of them in DRAM."""
    tiers = {"ssd_dir": directory, "ssd_bytes": 1 << 20, "spill_delay_s": 0.0}
    before = Engine(DENSE, **tiers)
    before.run(FakeRequest("a", tokens(400)))
    assert before.store.flush(20.0)
    before.side.close()
    return Engine(DENSE, mode=mode, **tiers)


class OneLost:
    """A `begin_restore` in which the last artifact of the named restores fails although it is
    stored."""

    def __init__(self, store: ArtifactStore, losing: set[int]) -> None:
        self.begun = 0
        self.limits_s: list[float] = []
        """The seconds that each restore was given."""
        self.on_lost: Callable[[], None] = lambda: None
        self._begin = store.begin_restore
        self._losing = losing

    def __call__(self, wanted: Sequence[Wanted], copies: Any, within_s: float) -> Any:
        self.begun += 1
        self.limits_s.append(within_s)
        restore = self._begin(wanted, copies, within_s)
        if self.begun not in self._losing:
            return restore
        kind, chunks = wanted[0]
        failed = {ArtifactId(chunks[-1].chunk.key, kind): Failure.IO_ERROR}
        self.on_lost()
        return SimpleNamespace(poll=lambda: True, failed=failed, abandon=restore.abandon)


class FailingReads:
    """A `begin_restore` in which every restore fails completely at the deadline."""

    def __init__(self, failing: Callable[[], None] = lambda: None) -> None:
        self.begun = 0
        self._failing = failing

    def __call__(self, wanted: Sequence[Wanted], copies: object, within_s: float) -> Any:
        self.begun += 1
        self._failing()
        lost = [ArtifactId(x.chunk.key, kind) for kind, chunks in wanted for x in chunks]
        failed = dict.fromkeys(lost, Failure.DEADLINE)
        return SimpleNamespace(poll=lambda: True, failed=failed, abandon=lambda: None)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Return an engine with 192 of 200 tokens stored, and a planner by cost."""
    engine = Engine(DENSE, mode="cost")
    engine.run(FakeRequest("a", tokens(200)))
    engine.recorder.drain()
    yield engine
    engine.side.close()


def test_a_failed_artifact_is_not_tried_again_while_pages_are_missing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = FailingReads()
    monkeypatch.setattr(engine.store, "begin_restore", reads)
    request = FakeRequest("b", tokens(200))
    assert [engine.ask(request) for _ in range(5)] == [0] * 5
    assert reads.begun == 1
    assert engine.admit(request) == 0
    request.num_computed_tokens = 0  # preempted
    assert engine.ask(request) == 0
    assert reads.begun == 2, "it may have been a passing trouble"


def test_a_dropped_restore_is_not_used_again_after_a_lookup(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, found = FakeRequest("b", tokens(200)), iter([False, True])
    assert engine.ask(request) == 192
    monkeypatch.setattr(engine.side._peers, "search", lambda *_: next(found))
    assert engine.ask(request, local=192) is None
    assert not in_use(engine), "the engine's own cache has as much"
    assert engine.ask(request, local=0) == 192, "it has been evicted there"
    assert len(in_use(engine)) == 3
    engine.finish(request)


@pytest.mark.parametrize("losing", [{2}, {1, 3}], ids=["at first all is well", "one is lost"])
def test_waiting_for_pages_does_not_shorten_a_new_restores_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, losing: set[int]
) -> None:
    """vLLM evicts local pages before the second match, so more must be restored from SSD."""
    engine = on_ssd(tmp_path)
    monkeypatch.setattr(engine.side._restorer, "_clock", clock := Clock(0.0))
    reads = OneLost(engine.store, losing)
    monkeypatch.setattr(engine.store, "begin_restore", reads)
    request = FakeRequest("b", tokens(400))
    engine.answered(request, local=128)
    clock.passes(12 * LOAD_DEADLINE_S)
    restored = engine.answered(request)
    assert restored == 384 - 64 * len(losing)
    assert reads.begun == len(losing) + 2
    timings = (engine.recorder.drain() or {})[HISTOGRAMS]
    assert timings["heterocache_stage_seconds{}"] == [0.0, 0.0]
    engine.side.close()


def one_lost_late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> OneLost:
    """Let the engine lose an artifact after three quarters of a request's time."""
    monkeypatch.setattr(engine.side._restorer, "_clock", clock := Clock(0.0))
    reads = OneLost(engine.store, {1})
    reads.on_lost = partial(clock.passes, 0.75 * LOAD_DEADLINE_S)
    monkeypatch.setattr(engine.store, "begin_restore", reads)
    return reads


def test_all_attempts_of_a_request_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first attempt loses an artifact after most of the time."""
    engine = on_ssd(tmp_path)
    reads = one_lost_late(engine, monkeypatch)
    assert engine.answered(FakeRequest("b", tokens(400))) == 320
    assert reads.limits_s == [LOAD_DEADLINE_S, 0.25 * LOAD_DEADLINE_S]
    engine.side.close()


def test_a_later_attempt_is_planned_for_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading a chunk takes a tenth of the time, and computing it much longer."""
    engine = on_ssd(tmp_path, "cost")
    byte_s = 0.1 * LOAD_DEADLINE_S / engine.layout.artifact_bytes(KV, 0, CHUNK)
    engine.costs.load = LoadModel([KV], {Tier.SSD: TierRates(0.0, {KV: byte_s}, byte_s)})
    engine.costs.compute = ComputeRegression(ComputeCoefficients(0.0, 10.0 * LOAD_DEADLINE_S, 0.0))
    reads = one_lost_late(engine, monkeypatch)
    assert engine.answered(FakeRequest("b", tokens(400))) == 128, "two chunks"
    assert reads.begun == 2
    engine.side.close()


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_decision_without_a_load_is_recorded_as_computing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, overtaken: bool
) -> None:
    request = FakeRequest("b", tokens(200))
    if overtaken:
        assert engine.ask(request) == 192
    else:
        monkeypatch.setattr(engine.store, "begin_restore", FailingReads(engine.store.reset))
    assert engine.admit(request, local=192 if overtaken else 0) == 0
    engine.step(b=8 if overtaken else 200)
    request.all_token_ids.append(7)
    engine.step(b=1)
    payload = engine.recorder.drain() or {}
    counted = payload[COUNTERS]
    decisions = {n for n in counted if n.startswith("heterocache_decisions")}
    assert decisions == {"heterocache_decisions{choice=compute}"}
    assert "heterocache_reuse_benefit_seconds{kind=predicted}" not in payload[HISTOGRAMS]


def test_what_another_request_is_reading_of_the_same_chain_is_no_queue(tmp_path: Path) -> None:
    """Two agents with one prefix: the second would compute what is just being read."""
    on_ssd(tmp_path).side.close()
    engine = Engine(
        DENSE, mode="cost", ssd_dir=tmp_path, ssd_bytes=1 << 20, spill_delay_s=0.0, run_io=False
    )
    read_s, end = 0.1 * LOAD_DEADLINE_S, 384
    byte_s = read_s / engine.layout.artifact_bytes(KV, 0, end)
    engine.costs.load = LoadModel([KV], {Tier.SSD: TierRates(0.0, {KV: byte_s}, byte_s)})
    engine.costs.compute = ComputeRegression(ComputeCoefficients(0.0, 1.5 * read_s / end, 0.0))
    for name in "abc":
        assert engine.ask(FakeRequest(name, tokens(400))) is None
        restore = engine.side._trackers[name].restore
        assert restore is not None, name
        assert restore.plan.boundary == end
    wait = engine.side._trackers["c"].wait
    assert wait is not None
    assert wait.decision is not None
    assert wait.decision.predicted.load_s == pytest.approx(read_s, rel=0.1)
    engine.ask(FakeRequest("d", tokens(400, seed=5)))
    other = engine.side._engine_load(engine.side._trackers["d"], [])
    assert other.in_flight_bytes[Tier.SSD] == engine.layout.artifact_bytes(KV, 0, end)
    assert engine.store.io_thread is not None
    engine.store.io_thread.start()
    engine.side.close()
