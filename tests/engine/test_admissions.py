"""Tokens that vLLM counts as computed are loaded, or reported as lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.request import RequestStatus

from hetero_connector.engine.messages import LostLoad, StepMetadata, WorkerReport
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.spec import ModelSpec, StateType
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, layer, scheduled
from tests.engine.stepped import Engine, artifacts_of, in_use, tokens

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
Engines = Any


@pytest.fixture
def engine_of() -> Iterator[Engines]:
    """Engines that have stored 192 tokens, in chunks of 64 with a checkpoint at each."""
    engines: list[Engine] = []

    def make(model: ModelSpec, **options: Any) -> Engine:
        engines.append(engine := Engine(model, **options))
        engine.run(FakeRequest("a", tokens(200)))
        engine.recorder.drain()
        return engine

    yield make
    for engine in engines:
        assert in_use(engine) == []
        assert (engine.side._admissions.loading, engine.side._admissions.admitted) == ({}, [])
        assert not engine.side.has_work
        engine.store.check_integrity()
        engine.side.close()


def admitted(engine: Engine, request: FakeRequest, answered: int, num_tokens: int) -> StepMetadata:
    """The restorer answers `answered` tokens; vLLM admits `num_tokens` and computes the rest."""
    assert engine.ask(request) == answered
    engine.requests[request.request_id] = request
    engine.grow_table(request)
    engine.side.on_allocated(request, num_tokens)  # type: ignore[arg-type]
    request.num_computed_tokens = num_tokens
    return engine.step(**{request.request_id: request.num_tokens - num_tokens})


def end(engine: Engine, request: FakeRequest) -> StepMetadata:
    engine.finish(request)
    return engine.step()


@pytest.mark.parametrize("num_tokens", [1, 64, 100, 191])
def test_if_vllm_admits_fewer_tokens_only_those_are_loaded(
    engine_of: Engines, num_tokens: int
) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    (load,) = admitted(engine, request, 192, num_tokens).loads
    pages = -(-num_tokens // 16)
    assert load.blocks[KV, 0].ids == engine.tables.ids["b"][0][:pages]
    assert load.resume_tokens == num_tokens
    ends = [artifact.end for artifact in artifacts_of(load)]
    assert ends == [64, 128, 192][: -(-num_tokens // 64)], "chunks lie as they were stored"
    assert engine.counters()["heterocache_hit_tokens{tier=dram}"] == num_tokens
    end(engine, request)


def test_boundary_state_is_loaded_of_the_boundary_that_was_admitted(engine_of: Engines) -> None:
    engine, request = engine_of(HYBRID), FakeRequest("b", tokens(200))
    (load,) = admitted(engine, request, 192, 128).loads
    assert [(x.state_type, x.end) for x in artifacts_of(load)] == [
        (KV, 64), (KV, 128), (SWA, 128),
    ]  # fmt: skip
    end(engine, request)


def test_tokens_without_boundary_state_are_reported_lost_and_not_saved(
    engine_of: Engines,
) -> None:
    engine, request = engine_of(HYBRID), FakeRequest("b", [*tokens(192), *tokens(100, seed=4)])
    meta = admitted(engine, request, 192, 96)
    assert (meta.loads, meta.saves) == ([], [])
    assert meta.lost == [LostLoad("b", engine.tables.ids["b"][0], parked=False)]
    counted = engine.counters()
    assert counted["heterocache_hook_errors{hook=admission}"] == 1
    assert "heterocache_hits{}" not in counted
    assert end(engine, request).early_saves == []


def park(engine: Engine, request: FakeRequest) -> StepMetadata:
    """Admit a request whose load parks it, and return the step that orders the load."""
    assert engine.ask(request) == 192
    engine.requests[request.request_id] = request
    engine.grow_table(request)
    engine.side.on_allocated(request, 192)  # type: ignore[arg-type]
    request.num_computed_tokens = 192
    return engine.order()


def unpark(engine: Engine, request: FakeRequest) -> None:
    """Admit a parked request whose load has ended, and compute the rest."""
    engine.side.on_allocated(request, 0)  # type: ignore[arg-type]
    request.status = RequestStatus.RUNNING
    engine.step(**{request.request_id: request.num_tokens - 192})


def test_a_parked_load_runs_before_the_forward_that_does_not_wait_for_it(
    engine_of: Engines,
) -> None:
    engine = engine_of(DENSE, parking="always")
    request = FakeRequest("b", tokens(200))
    engine.ask(request)
    engine.grow_table(request)
    engine.side.on_allocated(request, 192)  # type: ignore[arg-type]
    output = scheduled()
    (load,) = engine.side.order_step(output).loads  # type: ignore[arg-type]
    assert load.parked
    assert output.has_sync_kv_loads, "else vLLM starts it after the forward"
    engine.side.on_report(WorkerReport(loaded=Counter({load.load_id: 1})))
    end(engine, request)


def test_what_is_loaded_for_an_aborted_request_stays_pinned_until_the_report(
    engine_of: Engines,
) -> None:
    """vLLM keeps its blocks until then, too."""
    engine, request = engine_of(DENSE, parking="always"), FakeRequest("b", tokens(200))
    meta = park(engine, request)
    assert end(engine, request).early_saves == [], "its pages may not be loaded yet"
    assert in_use(engine)
    engine.report(meta)
    assert not in_use(engine)


def test_a_request_waits_for_a_parked_one_that_loads_the_same(engine_of: Engines) -> None:
    """vLLM shares the pages when the load has ended."""
    engine = engine_of(DENSE, parking="always")
    first, same = FakeRequest("b", tokens(200)), FakeRequest("c", tokens(210))
    meta = park(engine, first)
    assert engine.ask(same) is None
    engine.report(meta)
    assert engine.ask(same) is None, "vLLM has not published the pages yet"
    unpark(engine, first)
    assert engine.ask(same, local=192) == 0
    end(engine, first)
    end(engine, same)


@pytest.mark.parametrize("how", ["admitted", "aborted"])
def test_a_request_waits_once_whether_pages_are_shared_or_not(engine_of: Engines, how: str) -> None:
    engine = engine_of(DENSE, parking="always")
    requests = [FakeRequest(name, tokens(200)) for name in "bcd"]
    first, second, third = requests
    meta = park(engine, first)
    assert [engine.ask(x) for x in (second, third)] == [None, None]
    engine.report(meta)
    if how == "admitted":
        unpark(engine, first)
    else:
        engine.finish(first)
    later = park(engine, second)
    assert engine.ask(third) == 192
    engine.report(later)
    for request in requests:
        end(engine, request)


def test_a_parked_request_that_vllm_asks_about_again_does_not_wait_for_itself(
    engine_of: Engines,
) -> None:
    """vLLM does so after a failed load."""
    engine, request = engine_of(DENSE, parking="always"), FakeRequest("b", tokens(200))
    for _ in range(2):
        engine.report(park(engine, request))
    end(engine, request)


def test_a_request_that_loads_something_else_does_not_wait(engine_of: Engines) -> None:
    engine = engine_of(DENSE, parking="always")
    first, other = FakeRequest("b", tokens(200)), FakeRequest("c", tokens(150))
    meta = park(engine, first)
    assert engine.ask(other) == 128
    engine.report(meta)
    for request in (first, other):
        end(engine, request)


@pytest.mark.parametrize("hook", ["admit", "build_load"])
def test_a_parked_load_that_cannot_be_made_is_reported_as_lost(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    engine, request = engine_of(DENSE, parking="always"), FakeRequest("b", tokens(200))

    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(engine.side._restorer, hook, broken)
    meta = park(engine, request)
    assert (meta.loads, [x.parked for x in meta.lost]) == ([], [True])
    monkeypatch.undo()
    assert engine.ask(FakeRequest("c", tokens(200))) == 192, "nothing is awaited"
    end(engine, FakeRequest("c", []))
    request.num_computed_tokens = 0  # vLLM computes it again, by `kv_load_failure_policy`
    assert engine.ask(request) == 0, "what failed would fail again, in every step"
    end(engine, request)


def test_a_load_is_not_both_ordered_and_lost(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would give the pages to another request while they are still filled."""
    engine, request = engine_of(DENSE, parking="always"), FakeRequest("b", tokens(200))

    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(engine.side._saver, "on_restored", broken)
    meta = park(engine, request)
    assert (meta.loads, [x.request_id for x in meta.lost]) == ([], ["b"])
    end(engine, request)


@pytest.mark.parametrize(
    ("part", "hook", "saves"),
    [
        ("predictions.on_admitted", "update_state_after_alloc", 1),
        ("root.may_be_outdated", "update_state_after_alloc", 0),
        ("idle_steps.on_step", "build_connector_meta", 0),
    ],
)
def test_an_error_in_the_bookkeeping_of_an_admission_loses_no_load(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch, part: str, hook: str, saves: int
) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", [*tokens(200), *tokens(100, seed=2)])
    owner, name = part.split(".")
    monkeypatch.setattr(getattr(engine.side, owner), name, Mock(side_effect=RuntimeError))
    meta = admitted(engine, request, 192, 192)
    assert [x.resume_tokens for x in meta.loads] == [192]
    assert (meta.lost, len(meta.saves)) == ([], saves)
    assert engine.counters()[f"heterocache_hook_errors{{hook={hook}}}"] == 1
    end(engine, request)


def test_a_replay_that_begins_earlier_is_as_exact(engine_of: Engines) -> None:
    windows = [layer(f"swa.{i}", 1, SWA, window=32) for i in range(3)]
    model = ModelSpec((layer("full", 0), *windows), alignment=16)
    engine = Engine(model, window_replay=WindowReplay.of(model))
    engine.side.planner.replay_when_missing = True
    engine.run(FakeRequest("a", tokens(400)))
    with engine.store.catalog.locked():
        for artifact in list(engine.store.catalog.tiers.index.artifacts()):
            if artifact.state_type is SWA:
                engine.store.catalog.tiers.forget(artifact)
    request = FakeRequest("b", tokens(420))
    meta = admitted(engine, request, 304, 256)
    (load,) = meta.loads
    table = engine.tables.ids["b"][0]
    assert load.blocks[KV, 0].ids == table[: 400 // 16]
    assert set(meta.protected[0]) == set(table[256 // 16 : 400 // 16])
    end(engine, request)
    engine.side.close()


def test_a_load_that_cannot_be_ordered_is_reported_as_lost(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(250))

    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(engine.side._restorer, "_spans", broken)
    meta = admitted(engine, request, 192, 192)
    assert (meta.loads, meta.saves) == ([], [])
    assert meta.lost == [LostLoad("b", engine.tables.ids["b"][0], parked=False)]
    assert engine.counters()["heterocache_hook_errors{hook=load}"] == 1
    end(engine, request)


@pytest.mark.parametrize("num_tokens", [128, 192])
def test_what_was_answered_before_the_store_is_closed_is_loaded_or_lost(
    engine_of: Engines, num_tokens: int
) -> None:
    """The thread that watches the parent closes it at any moment."""
    engine, request = engine_of(HYBRID), FakeRequest("b", tokens(200))
    assert engine.ask(request) == 192
    engine.side.close()
    engine.requests["b"] = request
    engine.grow_table(request)
    engine.side.on_allocated(request, num_tokens)  # type: ignore[arg-type]
    request.num_computed_tokens = num_tokens
    meta = engine.step(b=200 - num_tokens)
    assert [load.resume_tokens for load in meta.loads] == [192] * (num_tokens == 192)
    assert [load.request_id for load in meta.lost] == ["b"] * (num_tokens == 128)
    assert not meta.saves
    assert engine.ask(FakeRequest("c", tokens(200))) == 0
    end(engine, request)


def test_once_a_worker_is_broken_nothing_is_restored_or_saved(engine_of: Engines) -> None:
    engine = engine_of(DENSE)
    engine.side.on_report(WorkerReport(broken=True))
    request = FakeRequest("b", [*tokens(192), *tokens(100, seed=4)])
    assert engine.admit(request) == 0
    meta = engine.step(b=292)
    assert (meta.loads, meta.saves) == ([], [])
    assert end(engine, request).early_saves == []


def test_a_save_of_which_a_rank_copied_nothing_is_not_sealed(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(64, seed=4))
    engine.admit(request)
    meta = engine.side.order_step(scheduled(b=64))
    (save,) = meta.saves
    report = WorkerReport()
    report.unsaved.update(save.save_ids)
    engine.side.on_report(report)
    assert not engine.side.has_work
    assert engine.ask(FakeRequest("c", tokens(65, seed=4))) == 0
    request.num_computed_tokens = 64
    end(engine, request)


@pytest.mark.parametrize("call", ["missing", "begin_save"])
def test_an_error_between_two_reservations_reserves_nothing(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = engine_of(DENSE)
    real, calls = getattr(engine.store, call), iter(range(100))

    def broken(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise ValueError("broken")
        return real(*arguments)

    monkeypatch.setattr(engine.store, call, broken)
    request = FakeRequest("b", tokens(200, seed=4))
    engine.admit(request)
    assert engine.step(b=200).saves == []
    assert in_use(engine) == []
    assert engine.counters()["heterocache_hook_errors{hook=save}"] == 1
    end(engine, request)


def test_a_rank_may_report_a_second_load_before_another_reports_the_first(
    engine_of: Engines,
) -> None:
    """On CUDA reports come when copies have ended; the request was preempted in between."""
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.side._admissions._num_ranks = 2
    numbers = []
    for _ in range(2):
        request.num_computed_tokens = 0
        assert engine.admit(request) == 192
        (load,) = engine.order(b=8).loads
        numbers.append(load.load_id)
    first, second = numbers
    pinned = in_use(engine)
    engine.side.on_report(WorkerReport(loaded=Counter({first: 1, second: 1})))
    assert in_use(engine) == pinned, "the other rank may still read it"
    engine.side.on_report(WorkerReport(loaded=Counter({first: 1})))
    engine.side.on_report(WorkerReport(loaded=Counter({second: 1})))
    assert in_use(engine) == []
    assert not engine.side._admissions.loading
    end(engine, request)
