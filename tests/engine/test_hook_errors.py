"""No exception of the connector leaves a hook, in any order and number of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from hetero_connector import connector as connector_module
from hetero_connector.connector import HeteroConnector
from hetero_connector.engine.messages import StepMetadata
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.errors import LoadLostError
from hetero_connector.metrics import COUNTERS
from hetero_connector.spec import ModelSpec
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, scheduled
from tests.engine.stepped import Engine, in_use, tokens

NUM_BLOCKS = 512
CONTEXT: Any = SimpleNamespace(attn_metadata={"layer": object()}, slot_mapping={})
BOOM = RuntimeError("boom")


@dataclass
class Both:
    """Both roles of the connector over one store, as in vLLM."""

    engine: Engine
    scheduler: HeteroConnector
    worker: HeteroConnector
    caches: dict[str, torch.Tensor]

    @classmethod
    def make(cls, model: ModelSpec = DENSE, directory: str = "") -> Both:
        engine = Engine(model)
        recovers = len({x.group for x in model.layers}) == 1
        side = WorkerSide(engine.layout, 0, NUM_BLOCKS, "on", engine.recorder, recovers=recovers)
        names = [x.layer for x in model.layers]
        caches = {x: torch.zeros((NUM_BLOCKS, 256), dtype=torch.uint8) for x in names}
        extra = {"dram_gib": 0.01, "directory": directory}
        transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="engine")
        config: Any = SimpleNamespace(kv_transfer_config=transfer, instance_id="1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connector_module, "open_scheduler_side", lambda *_: engine.side)
            patch.setattr(connector_module, "open_worker_side", lambda *_: side)
            none: Any = None
            scheduler = HeteroConnector(config, KVConnectorRole.SCHEDULER, none)
            worker = HeteroConnector(config, KVConnectorRole.WORKER, none)
        tables: Any = engine.tables
        scheduler.bind_kv_cache_manager(tables)
        worker.register_kv_caches(caches)
        worker.get_handshake_metadata()
        return cls(engine, scheduler, worker, caches)

    def step(self, rng: Random | None = None, **num_tokens: int) -> KVConnectorOutput:
        """Run one step in vLLM's order; with `rng` leave hooks out, repeat them or swap their
        arguments."""
        output: Any = scheduled(**num_tokens)
        meta: Any = self.scheduler.build_connector_meta(output)

        def times() -> range:
            return range(1 if rng is None else rng.choice([0, 1, 1, 1, 2]))

        for _ in times():
            self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        # A load that no hook starts is lost, with all later ones: another test has that case.
        for _ in range(max(1, len(times()))):
            self.worker.start_load_kv(CONTEXT)
        for layer in [*self.caches, "of another model"]:
            for _ in times():
                self.worker.wait_for_layer_load(layer)
            for _ in times():
                self.worker.save_kv_layer(layer, self.caches.get(layer), None)  # type: ignore[arg-type]
        for _ in times():
            self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        if rng is None or rng.random() < 0.9:
            self.worker.clear_connector_metadata()
        for _ in range(max(1, len(times()))):
            self.scheduler.update_connector_output(output)
        return output

    def errors(self) -> dict[str, float]:
        """Return the errors in hooks of both roles since the last call."""
        counted: dict[str, float] = {}
        for recorder in (self.engine.recorder, self.scheduler._recorder, self.worker._recorder):
            counted |= (recorder.drain() or {COUNTERS: {}})[COUNTERS]
        return {name: x for name, x in counted.items() if "hook_errors" in name}

    def close(self) -> None:
        for role in (self.worker, self.scheduler):
            role.shutdown()


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """Both roles, in the directory that a test may name as the fixture's parameter."""
    both = Both.make(directory=getattr(request, "param", ""))
    yield both
    both.close()


REQUEST: Any = FakeRequest("a", tokens(100))
SCHEDULER_HOOKS: list[tuple[str, str, Callable[[HeteroConnector], Any], Any]] = [
    ("on_new_request", "identifier.begin", lambda x: x.on_new_request(REQUEST), None),
    (
        "get_num_new_matched_tokens",
        "match",
        lambda x: x.get_num_new_matched_tokens(REQUEST, 0),
        (0, False),
    ),
    (
        "update_state_after_alloc",
        "on_allocated",
        lambda x: x.update_state_after_alloc(REQUEST, None, 0),  # type: ignore[arg-type]
        None,
    ),
    (
        "get_external_cache_hit_sources",
        "hit_sources",
        lambda x: x.get_external_cache_hit_sources(REQUEST, 1),
        {},
    ),
    (
        "build_connector_meta",
        "order_step",
        lambda x: x.build_connector_meta(scheduled()),  # type: ignore[arg-type]
        StepMetadata(),
    ),
    (
        "update_connector_output",
        "on_report",
        lambda x: x.update_connector_output(KVConnectorOutput()),
        None,
    ),
    (
        "request_finished_all_groups",
        "on_finished",
        lambda x: x.request_finished_all_groups(REQUEST, ([],)),
        (False, None),
    ),
    (
        "request_finished_all_groups",
        "on_finished",
        lambda x: x.request_finished(REQUEST, []),
        (False, None),
    ),
    ("reset_cache", "reset", lambda x: x.reset_cache(), False),
]


@pytest.mark.parametrize(("hook", "method", "call", "answer"), SCHEDULER_HOOKS)
def test_an_error_on_the_scheduler_side_is_a_miss(
    both: Both,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    method: str,
    call: Callable[[HeteroConnector], Any],
    answer: Any,
) -> None:
    monkeypatch.setattr(f"{SIDE}.{method}" if "." not in method else IDENTIFIER, _boom)
    for _ in range(3):
        assert call(both.scheduler) == answer
    assert both.errors() == {f"heterocache_hook_errors{{hook={hook}}}": 3}
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info[1] for record in logged if record.exc_info] == [BOOM], "once"


SIDE = "hetero_connector.engine.scheduler.scheduler_side.SchedulerSide"
IDENTIFIER = "hetero_connector.engine.scheduler.request_identifier.RequestIdentifier.begin"
WORKER = "hetero_connector.engine.worker.worker_side.WorkerSide"


def _boom(*_: object, **__: object) -> None:
    raise BOOM


@pytest.mark.parametrize(
    ("hook", "method", "call"),
    [
        ("handle_preemptions", "begin_step", lambda x: x.handle_preemptions(StepMetadata())),
        ("start_load_kv", "start_loads", lambda x: x.start_load_kv(CONTEXT)),
        ("wait_for_layer_load", "ensure_loaded", lambda x: x.wait_for_layer_load("full")),
        ("save_kv_layer", "on_layer_written", lambda x: x.save_kv_layer("full", None, None)),
        ("wait_for_save", "end_step", lambda x: x.wait_for_save()),
        ("build_connector_worker_meta", "take_report", lambda x: x.build_connector_worker_meta()),
    ],
)
def test_an_error_on_the_worker_side_is_a_miss(
    both: Both,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    method: str,
    call: Callable[[HeteroConnector], Any],
) -> None:
    monkeypatch.setattr(f"{WORKER}.{method}", _boom)
    both.worker.bind_connector_metadata(StepMetadata())
    assert call(both.worker) is None
    assert both.errors() == {f"heterocache_hook_errors{{hook={hook}}}": 1}


def test_pages_that_a_copy_may_still_touch_are_not_released(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{WORKER}.finish_copies", _boom)
    with pytest.raises(RuntimeError, match="boom"):
        both.worker.unregister_kv_caches()


@pytest.mark.parametrize(
    "method", ["_queue.remove", "predictions.on_progress", "reports.on_finished"]
)
def test_a_request_whose_end_cannot_be_noted_is_saved_and_keeps_no_pins(
    both: Both, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine, waiting = both.engine, FakeRequest("c", tokens(200))
    engine.run(FakeRequest("a", tokens(200)))
    engine.admit(running := FakeRequest("b", tokens(100, seed=1)))
    both.step(b=100)
    running.num_computed_tokens = 100
    assert engine.ask(waiting) == 192
    owner, name = method.split(".")
    monkeypatch.setattr(getattr(engine.side, owner), name, _boom)
    both.scheduler.request_finished_all_groups(waiting, ([],))  # type: ignore[arg-type]
    assert in_use(engine) == []
    both.scheduler.request_finished_all_groups(running, engine.tables.ids["b"])  # type: ignore[arg-type]
    assert both.errors() == {"heterocache_hook_errors{hook=request_finished_all_groups}": 2}
    monkeypatch.undo()
    both.step()
    assert engine.ask(FakeRequest("d", tokens(100, seed=1))) == 96


def test_hooks_without_metadata_and_after_the_end_are_misses(both: Both) -> None:
    for _ in range(2):
        both.worker.unregister_kv_caches()
        both.worker.start_load_kv(CONTEXT)
        both.worker.wait_for_layer_load("full")
        both.worker.save_kv_layer("full", None, None)  # type: ignore[arg-type]
        both.worker.wait_for_save()
        both.step()
        assert both.scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
        both.scheduler.request_finished(REQUEST, [])
        assert not both.scheduler.has_pending_push_work()
        both.close()


def test_a_lost_load_alone_leaves_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both.make(HYBRID)
    for name, hybrid in (("a", False), ("b", True)):
        request = FakeRequest(name, tokens(200))
        both.engine.requests[name] = request
        restored = both.scheduler.get_num_new_matched_tokens(request, 0)[0]  # type: ignore[arg-type]
        assert restored == 192 * hybrid
        both.engine.grow_table(request)
        both.scheduler.update_state_after_alloc(request, None, restored)  # type: ignore[arg-type]
        request.num_computed_tokens = restored
        if hybrid:
            monkeypatch.setattr("hetero_connector.engine.worker.pages.HostPages.load", _boom)
            with pytest.raises(LoadLostError, match="'b'"):
                both.step(b=8)
        else:
            both.step(a=200)
    both.close()


class Fuzz:
    """Requests arrive, run, are preempted, aborted and finished, with hooks in random order."""

    def __init__(self, both: Both, rng: Random) -> None:
        self.both, self.rng = both, rng
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.count = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._come()
            self._admit()
            shares = {x.request_id: self._share(x) for x in self.running}
            shares = {name: count for name, count in shares.items() if count}
            if self.rng.random() < 0.05:
                shares["unknown"] = 1
            self.both.step(self.rng, **shares)
            for request in self.running:
                request.num_computed_tokens += shares.get(request.request_id, 0)
            self._go()
        for request in [*self.running, *self.waiting]:
            self._finish(request)
        for _ in range(4):
            self.both.step()

    def _come(self) -> None:
        if self.rng.random() < 0.8:
            length, seed = self.rng.choice([10, 64, 90, 200]), self.rng.randrange(2)
            request = FakeRequest(f"r{self.count}", tokens(length, seed))
            self.count += 1
            self.both.engine.requests[request.request_id] = request
            self.waiting.append(request)
            if self.rng.random() < 0.8:
                self.both.scheduler.on_new_request(request)  # type: ignore[arg-type]

    def _admit(self) -> None:
        for request in list(self.waiting):
            answer = 0
            for _ in range(self.rng.choice([0, 1, 1, 2])):
                local = self.rng.choice([0, 0, 16, 64])
                answer = self._ask(request, min(local, request.num_tokens - 1))
            if self.rng.random() < 0.3:
                continue
            granted = self.rng.choice([answer, answer, answer, 0, answer // 2, max(0, answer - 1)])
            self.waiting.remove(request)
            self.running.append(request)
            self.both.engine.grow_table(request)
            for _ in range(self.rng.choice([0, 1, 1, 1]) if not granted else 1):
                self.both.scheduler.update_state_after_alloc(request, None, granted)  # type: ignore[arg-type]
            self.both.scheduler.get_external_cache_hit_sources(request, granted)  # type: ignore[arg-type]
            request.num_computed_tokens = granted
            request.status = RequestStatus.RUNNING

    def _ask(self, request: FakeRequest, local: int) -> int:
        tokens, parked = self.both.scheduler.get_num_new_matched_tokens(request, local)  # type: ignore[arg-type]
        assert not parked
        return tokens or 0

    def _share(self, request: FakeRequest) -> int:
        left = request.num_tokens - request.num_computed_tokens
        if not left:
            request.all_token_ids.append(self.rng.randrange(250))
            self.both.engine.grow_table(request)
            left = 1
        return min(left, self.rng.choice([0, 1, 50, 200]))

    def _go(self) -> None:
        for request in [*self.running, *self.waiting]:
            chance = self.rng.random()
            if chance < 0.15:
                self._finish(request)
            elif chance < 0.2 and request in self.running:  # preempted
                self.running.remove(request)
                self.waiting.append(request)
                request.num_computed_tokens = 0
        if self.rng.random() < 0.05:
            self.both.scheduler.reset_cache()
        if self.rng.random() < 0.1:
            unknown: Any = FakeRequest("never seen", tokens(30))
            self.both.scheduler.request_finished(unknown, [])
            self.both.scheduler.update_state_after_alloc(unknown, None, 16)  # type: ignore[arg-type]

    def _finish(self, request: FakeRequest) -> None:
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
        blocks: Any = self.both.engine.tables.ids.get(request.request_id, ([], []))
        for _ in range(self.rng.choice([1, 1, 2])):
            self.both.scheduler.request_finished_all_groups(request, blocks)  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_any_order_of_hooks_raises_nothing_and_leaves_no_pins(seed: int) -> None:
    both = Both.make()
    try:
        Fuzz(both, Random(seed)).run(steps=12)
        assert both.errors() == {}
        side = both.engine.side
        assert in_use(both.engine) == []
        assert (side._trackers, side._admissions.loading, side._admissions.admitted) == ({}, {}, [])
        assert not side.has_work
        both.engine.store.check_integrity()
    finally:
        both.close()


@pytest.mark.parametrize("both", ["redis://127.0.0.1:1/0"], indirect=True)
def test_a_report_leaves_a_handoff_as_it_is(both: Both) -> None:
    asked = {"do_remote_decode": True, "heterocache": {"report": True}}
    request: Any = FakeRequest("a", tokens(100), kv_transfer_params=asked)
    _, answer = both.scheduler.request_finished_all_groups(request, ([],))
    assert answer is not None
    report = answer.pop("heterocache")["report"]
    assert report["request_id"] == "a"
    assert answer == {"do_remote_prefill": True, "prefilled_tokens": 0}
