"""One rank copies in vLLM's order of calls, without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    LostLoad,
    PageCopy,
    Save,
    StepMetadata,
    WorkerReport,
)
from hetero_connector.engine.startup.geometry import merge_stages
from hetero_connector.engine.worker import worker_side
from hetero_connector.engine.worker.host_device import HostDevice
from hetero_connector.engine.worker.pages import HostPages
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.errors import LoadLostError, StoreError
from hetero_connector.metrics import COUNTERS, HISTOGRAMS, Recorder
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.arena import Arena, ArenaHandle
from tests.engine.adversarial_device import AdversarialDevice
from tests.engine.fakes import DENSE, layer

KV = StateType.DENSE_KV
CHUNK, BLOCK, NUM_BLOCKS = 64, 16, 32
LAYERS = ("target", "draft")
MODEL = ModelSpec(tuple(layer(name, 0) for name in LAYERS), alignment=BLOCK)
LAYOUT = ArtifactLayout(MODEL, CHUNK)
SIZE = LAYOUT.artifact_bytes(KV, 0, CHUNK)
STORED, FRESH, OLD = 7, 99, 50
"""Bytes of stored state, of the forward's writes, and of an earlier request."""


class Worker:
    """A worker side whose second thread is busy, so that every load that may be late is late."""

    def __init__(
        self,
        layerwise: str = "on",
        *,
        model: ModelSpec = MODEL,
        first_step: Sequence[str] = LAYERS,
        **settings: bool,
    ) -> None:
        """`first_step`: the layers that call their hooks in an earlier step."""
        self.arena = Arena.create(4 * SIZE, shared=False)
        self.recorder = Recorder()
        layout = ArtifactLayout(model, CHUNK)
        self.side = WorkerSide(layout, 0, NUM_BLOCKS, layerwise, self.recorder, **settings)
        self.caches = {
            x.layer: torch.full((NUM_BLOCKS, BLOCK, 16), OLD, dtype=torch.uint8)
            for x in model.layers
        }
        self.side.register(self.caches)
        self.side.attach(self.arena.handle, layout)
        self.side._pipeline._executor.submit = _never  # type: ignore[method-assign]
        self.step(StepMetadata(), first_step)

    def step(self, meta: StepMetadata, layers: Sequence[str] = LAYERS) -> None:
        """Run a step that writes nothing."""
        self.begin(meta)
        for name in layers:
            self.side.ensure_loaded(name)
            self.side.on_layer_written(meta, name)
        self.side.end_step(meta)

    def begin(self, meta: StepMetadata) -> None:
        self.side.begin_step(meta)
        self.side.start_loads(meta)

    def close(self) -> None:
        self.side.close()
        self.arena.close()


def _never(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    worker.arena.view[:] = STORED
    yield worker
    worker.close()


def load(tokens: int, blocks: list[int]) -> Load:
    """Return a load of the first `tokens` tokens, in chunks that follow each other."""
    offsets = range(0, -(-tokens // CHUNK) * SIZE, SIZE)
    span = ArtifactSpan(KV, 0, tokens, CHUNK, offsets)
    return Load("r", [span], {(KV, 0): Blocks(0, blocks)}, False, tokens, load_id=5)


def save(save_id: int, blocks: list[int]) -> Save:
    artifact = ArtifactCopy(KV, 0, CHUNK, (save_id - 1) * SIZE)
    return Save([save_id], PageCopy([artifact], {(KV, 0): Blocks(0, blocks)}))


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.flatten().tolist())


@pytest.mark.parametrize("boundary", [21, 64, 90])
def test_tokens_computed_in_a_page_that_is_loaded_too_are_kept(
    worker: Worker, boundary: int
) -> None:
    """vLLM writes a layer's new keys and values before it calls the layer's load hook."""
    blocks = list(range(3, 9))
    page, rows = blocks[boundary // BLOCK], boundary % BLOCK
    meta = StepMetadata(loads=[load(boundary, blocks[: -(-boundary // BLOCK)])])
    worker.begin(meta)
    for name in LAYERS:
        worker.caches[name][page, rows:] = FRESH
        worker.side.ensure_loaded(name)
        assert values(worker.caches[name][blocks[: boundary // BLOCK]]) == {STORED}
        assert values(worker.caches[name][page, :rows]) <= {STORED}
        assert values(worker.caches[name][page, rows:]) == {FRESH}
    worker.side.end_step(meta)


def test_whole_pages_are_still_loaded_layer_by_layer(worker: Worker) -> None:
    worker.begin(meta := StepMetadata(loads=[load(90, [3, 4, 5, 6, 7, 8])]))
    assert values(worker.caches["draft"][[3, 4, 5, 6, 7]]) == {OLD}
    assert values(worker.caches["draft"][8]) == {STORED}
    worker.side.ensure_loaded("draft")
    assert values(worker.caches["draft"][[3, 4, 5, 6, 7, 8]]) == {STORED}
    worker.side.end_step(meta)


def test_a_forward_that_calls_no_hooks_finds_everything_loaded(worker: Worker) -> None:
    meta = StepMetadata(loads=[load(64, [3, 4, 5, 6])])
    worker.side.begin_step(meta)
    worker.side.start_loads(meta, hooks_called=False)
    for name in LAYERS:
        assert values(worker.caches[name][[3, 4, 5, 6]]) == {STORED}
    worker.side.end_step(meta)


def test_a_drafter_that_is_left_out_finds_its_pages_loaded_in_the_next_step(
    worker: Worker,
) -> None:
    """vLLM leaves the drafter out near the end of a request's length."""
    blocks = [3, 4, 5, 6]
    worker.step(StepMetadata(loads=[load(64, blocks)]), layers=["target"])
    for name in LAYERS:
        assert values(worker.caches[name][blocks]) == {STORED}
    report = worker.side.take_report()
    assert report is not None
    assert report.loaded[5] == 1


@pytest.mark.parametrize(
    ("hooked", "share"),
    [(LAYERS, 1.0), (["target"], 0.5), ([], 0.0)],
    ids=["all", "the model's", "none"],
)
def test_the_share_of_a_load_that_the_forward_hides_is_reported_once(
    hooked: Sequence[str], share: float
) -> None:
    worker = Worker(first_step=hooked)
    assert worker.side.take_report() is None, "not known before the forward has run"
    worker.step(StepMetadata(), layers=hooked)
    assert report(worker).hidden_share == share
    worker.step(StepMetadata(), layers=hooked)
    assert worker.side.take_report() is None
    worker.close()


def test_a_worker_that_loads_before_the_forward_reports_no_hidden_share() -> None:
    worker = Worker("off")
    worker.step(StepMetadata())
    assert worker.side.take_report() is None
    worker.close()


def test_a_load_is_reported_once_all_layers_are_copied(worker: Worker) -> None:
    """With a drafter vLLM asks for the report before the step's end."""
    blocks = [3, 4, 5, 6]
    worker.begin(StepMetadata(loads=[load(64, blocks)]))
    worker.side.ensure_loaded("target")
    early = worker.side.take_report()
    assert early is None or not early.loaded, "the scheduler would unpin what is not copied yet"
    assert values(worker.caches["draft"][blocks]) == {OLD}
    worker.begin(StepMetadata())  # the drafter was left out, and so was the step's end
    report = worker.side.take_report()
    assert report is not None
    assert report.loaded[5] == 1
    assert values(worker.caches["draft"][blocks]) == {STORED}


def test_a_failed_load_is_known_when_a_step_with_a_drafter_gives_its_results(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks before the step's end, and answers from what is reported later."""
    worker.begin(meta := StepMetadata(loads=[load(64, blocks := [3, 4, 5, 6])]))
    broken_copies(monkeypatch, "load")
    worker.side.ensure_loaded("target")
    assert worker.side.take_transfers() == (set(), set())
    assert worker.side.outcome.take_invalid_blocks() == set(blocks)
    worker.side.end_step(meta)
    assert worker.side.outcome.take_invalid_blocks() == set(), "reported twice"
    assert dict(report(worker).loaded) == {5: 1}


def test_a_failed_load_leaves_a_parked_one_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy may still be under way, so its pages must not be freed."""
    ended: list[bool] = []
    monkeypatch.setattr(worker.side._device, "load_parked", lambda *_: lambda: bool(ended))
    parked = replace(load(64, [11, 12, 13, 14]), request_id="p", parked=True, load_id=6)
    worker.begin(meta := StepMetadata(loads=[load(64, [3, 4, 5, 6]), parked]))
    broken_copies(monkeypatch, "load")
    worker.side.ensure_loaded("target")
    worker.side.end_step(meta)
    assert worker.side.outcome.take_invalid_blocks() == {3, 4, 5, 6}
    assert worker.side.take_transfers() == (set(), set())
    assert dict(report(worker).loaded) == {5: 1}
    ended.append(True)
    assert worker.side.take_transfers() == ({"p"}, set())
    assert dict(report(worker).loaded) == {6: 1}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_reported_before_its_copies_have_ended_also_after_an_error(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """On a CUDA device copies end later: the slots of reported ones are given to others."""
    ended: list[bool] = []
    device = worker.side._device
    monkeypatch.setattr(device, "fence", lambda: lambda: bool(ended))
    monkeypatch.setattr(device, "load_parked", lambda *_: lambda: bool(ended))
    if fails:
        broken_copies(monkeypatch, "save")
    parked = replace(load(64, [11, 12, 13, 14]), request_id="p", parked=True, load_id=6)
    worker.begin(
        meta := StepMetadata(loads=[load(64, [3, 4, 5, 6]), parked], saves=[save(1, [1, 2, 7, 8])])
    )
    worker.side.end_step(meta)
    assert worker.side.take_transfers() == (set(), set())
    assert worker.side.take_report() == WorkerReport(hidden_share=1.0), "of the step before"
    worker.step(StepMetadata())
    assert worker.side.take_report() is None
    ended.append(True)
    assert worker.side.take_transfers() == ({"p"}, set())
    reported = report(worker)
    assert dict(reported.loaded) == {5: 1, 6: 1}
    assert dict(reported.unsaved if fails else reported.saved) == {1: 1}
    assert worker.side.take_report() is None


@pytest.mark.parametrize("known", [True, False])
def test_pages_are_saved_once_the_last_microbatch_has_written_them(known: bool) -> None:
    """vLLM calls every layer hook once per microbatch, whether microbatches are known or not."""
    worker = Worker(microbatches=known)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    meta = StepMetadata(saves=[save(1, first), save(2, second)])
    worker.begin(meta)
    for name in LAYERS:
        for blocks in (first, second):
            worker.side.ensure_loaded(name)
            worker.caches[name][blocks] = FRESH
            worker.side.on_layer_written(meta, name)
    worker.side.end_step(meta)
    assert set(worker.arena.view[: 2 * SIZE].tolist()) == {FRESH}
    report = worker.side.take_report()
    assert report is not None
    assert dict(report.saved) == {1: 1, 2: 1}
    worker.close()


def test_with_microbatches_everything_is_loaded_before_the_forward() -> None:
    worker = Worker(microbatches=True)
    worker.arena.view[:] = STORED
    worker.begin(meta := StepMetadata(loads=[load(64, [3, 4, 5, 6])]))
    for name in LAYERS:
        assert values(worker.caches[name][[3, 4, 5, 6]]) == {STORED}
    worker.side.end_step(meta)
    worker.close()


# Failures


def broken_copies(
    monkeypatch: pytest.MonkeyPatch, call: str, times: int = 1, skip: int = 0
) -> None:
    """Let the next copies of pages after `skip` raise; later ones work again."""
    real, made = getattr(HostPages, call), count()

    def copy(*arguments: Any) -> None:
        if skip <= next(made) < skip + times:
            raise OSError("broken")
        real(*arguments)

    monkeypatch.setattr(HostPages, call, copy)


def report(worker: Worker) -> WorkerReport:
    taken = worker.side.take_report()
    assert taken is not None
    return taken


def counted(worker: Worker) -> dict[str, float]:
    payload = worker.recorder.drain()
    counters: dict[str, float] = payload[COUNTERS] if payload else {}
    return {name: value for name, value in counters.items() if "hook_errors" in name}


def test_a_failed_save_is_reported_and_the_next_one_is_made(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_copies(monkeypatch, "save", times=2)
    worker.step(StepMetadata(saves=[save(1, [1, 2, 3, 4])]))
    worker.step(StepMetadata(early_saves=[save(2, [1, 2, 3, 4])]))
    reported = report(worker)
    assert (dict(reported.saved), dict(reported.unsaved)) == ({}, {1: 1, 2: 1})
    assert counted(worker) == {"heterocache_hook_errors{hook=save}": 2}
    worker.step(StepMetadata(saves=[save(3, [1, 2, 3, 4])]))
    reported = report(worker)
    assert (dict(reported.saved), dict(reported.unsaved)) == ({3: 1}, {})


@pytest.mark.parametrize(
    "hooks_called", [True, False], ids=["during the forward", "before the forward"]
)
def test_a_failed_load_is_reported_and_the_worker_copies_nothing_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, hooks_called: bool
) -> None:
    """The pages have no state, so state computed from them must not be kept."""
    broken_copies(monkeypatch, "load")
    blocks = [3, 4, 5, 6]
    meta = StepMetadata(loads=[load(64, blocks)], saves=[save(1, [7, 8, 9, 10])])
    worker.side.begin_step(meta)
    worker.side.start_loads(meta, hooks_called=hooks_called)
    for name in LAYERS:
        worker.side.ensure_loaded(name)
        worker.side.on_layer_written(meta, name)
    worker.side.end_step(meta)
    assert worker.side.outcome.take_invalid_blocks() == set(blocks)
    reported = report(worker)
    assert (reported.broken, dict(reported.loaded), dict(reported.unsaved)) == (
        True,
        {5: 1},
        {1: 1},
    )
    worker.step(StepMetadata(loads=[load(64, blocks)], early_saves=[save(2, [1, 2, 3, 4])]))
    assert worker.side.outcome.take_invalid_blocks() == set(blocks)
    reported = report(worker)
    assert (dict(reported.loaded), dict(reported.unsaved)) == ({5: 1}, {2: 1})


def test_a_failed_load_between_steps_is_reported_as_failed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_copies(monkeypatch, "load")
    worker.step(StepMetadata(loads=[replace(load(64, [3, 4, 5, 6]), parked=True)]))
    assert worker.side.outcome.take_transfers() == ({"r"}, {"r"})
    assert worker.side.outcome.take_invalid_blocks() == set()


def test_a_parked_load_is_reported_after_the_scheduler_side_lost_one_of_the_same_id(
    worker: Worker,
) -> None:
    """vLLM uses ids again if it is told not to make them unique. Else the request would hang."""
    worker.step(StepMetadata(lost=[LostLoad("r", [3, 4], parked=True)]))
    assert worker.side.take_transfers() == ({"r"}, {"r"})
    worker.step(StepMetadata(loads=[replace(load(64, [3, 4, 5, 6]), parked=True)]))
    assert worker.side.take_transfers() == ({"r"}, set())


def test_a_parked_load_whose_step_fails_to_load_for_another_request_is_reported_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies have been started, so their end is reported, too."""
    broken_copies(monkeypatch, "load", skip=len(LAYERS))
    parked = replace(load(64, [3, 4, 5, 6]), request_id="p", parked=True, load_id=6)
    meta = StepMetadata(loads=[parked, load(64, [7, 8, 9, 10])])
    worker.side.begin_step(meta)
    worker.side.start_loads(meta, hooks_called=False)
    worker.side.end_step(meta)
    assert worker.side.take_transfers() == ({"p"}, {"p"})
    assert worker.side.outcome.take_invalid_blocks() == {7, 8, 9, 10}
    assert dict(report(worker).loaded) == {5: 1, 6: 1}
    assert worker.side.take_transfers() == (set(), set())


def test_a_lost_load_from_which_vllm_does_not_recover_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the error the answer would be wrong."""
    worker = Worker(recovers=False)
    broken_copies(monkeypatch, "load")
    with pytest.raises(LoadLostError, match="'r'"):
        worker.step(StepMetadata(loads=[load(64, [3, 4, 5, 6])]))
    worker.close()


def test_without_an_arena_every_copy_is_a_miss(worker: Worker) -> None:
    meta = StepMetadata(loads=[load(64, [3, 4])], early_saves=[save(1, [1, 2, 3, 4])])
    side = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder())
    side.register(worker.caches)
    assert not side.is_attached
    side.begin_step(meta)
    side.start_loads(meta)
    side.end_step(meta)
    assert side.outcome.take_invalid_blocks() == {3, 4}
    reported = side.take_report()
    assert reported is not None
    assert (reported.broken, dict(reported.saved), dict(reported.unsaved)) == (True, {}, {1: 1})
    side.close()


def test_pages_are_copied_where_they_are_when_the_arena_is_attached(worker: Worker) -> None:
    """In a MultiConnector another connector may move them after they were registered."""
    side = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder())
    caches = {name: torch.full_like(cache, OLD) for name, cache in worker.caches.items()}
    side.register(caches)
    for cache in caches.values():
        moved = torch.full_like(cache, FRESH)
        cache.set_(moved.untyped_storage(), 0, moved.shape, moved.stride())
    side.attach(worker.arena.handle, LAYOUT)
    side.begin_step(StepMetadata(early_saves=[save(1, [1, 2, 3, 4])]))
    side.close()
    assert (worker.arena.view[:SIZE] == FRESH).all()


def test_pipeline_stages_save_and_load_their_layers_of_one_artifact() -> None:
    first, second = (replace(MODEL, layers=(x,)) for x in MODEL.layers)
    whole = ArtifactLayout(merge_stages([first, second]), CHUNK)
    arena = Arena.create(SIZE, shared=False)
    for model, value in ((first, 11), (second, 22)):
        side = WorkerSide(ArtifactLayout(model, CHUNK), 0, NUM_BLOCKS, "off", Recorder())
        cache = torch.full((NUM_BLOCKS, BLOCK, 16), OLD, dtype=torch.uint8)
        cache[1:5] = value
        side.register({model.layers[0].layer: cache})
        side.attach(arena.handle, whole)
        for meta in (
            StepMetadata(saves=[save(1, [1, 2, 3, 4])]),
            StepMetadata(loads=[load(64, [5, 6, 7, 8])]),
        ):
            side.begin_step(meta)
            side.start_loads(meta)
            side.end_step(meta)
        assert [values(cache[first:last]) for first, last in ((5, 9), (9, 32))] == [{value}, {OLD}]
        side.close()
    halves = torch.from_numpy(arena.view[:SIZE].copy()).view(2, -1)
    assert [values(half) for half in halves] == [{11}, {22}]
    arena.close()


def test_an_arena_that_cannot_be_mapped_at_start_is_an_error(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder())
    fresh.register(worker.caches)
    with pytest.raises(StoreError, match="cannot map"):
        fresh.attach(ArenaHandle("/proc/1/fd/999999", 1 << 20), LAYOUT)

    def refused(*_: object) -> None:
        raise StoreError("cudaHostRegister failed")

    monkeypatch.setattr(HostDevice, "attach", refused)
    users = worker.arena._users
    with pytest.raises(StoreError, match="cudaHostRegister"):
        fresh.attach(worker.arena.handle, LAYOUT)
    assert worker.arena._users == users, "what cannot be pinned is not kept mapped"
    fresh.close()


def test_hooks_called_twice_report_once(worker: Worker) -> None:
    meta = StepMetadata(
        loads=[load(64, [3, 4, 5, 6])],
        saves=[save(1, [7, 8, 9, 10])],
        early_saves=[save(2, [1, 2, 3, 4])],
    )
    for call in (worker.side.begin_step, worker.side.start_loads, worker.side.end_step):
        for _ in range(2):
            call(meta)
    reported = report(worker)
    assert (dict(reported.saved), dict(reported.loaded)) == ({1: 1, 2: 1}, {5: 1})


def test_a_step_that_is_never_ended_saves_nothing_and_the_next_one_goes_on(
    worker: Worker,
) -> None:
    worker.begin(StepMetadata(saves=[save(1, [7, 8, 9, 10])], loads=[load(64, [3, 4, 5, 6])]))
    worker.step(StepMetadata(saves=[save(2, [7, 8, 9, 10])]))
    reported = report(worker)
    assert (dict(reported.saved), dict(reported.unsaved)) == ({2: 1}, {1: 1})
    assert values(worker.caches["draft"][[3, 4, 5, 6]]) == {STORED}


def seconds(worker: Worker, name: str) -> list[float]:
    payload = worker.recorder.drain()
    assert payload is not None
    samples: list[float] = payload[HISTOGRAMS].get(f"heterocache_{name}_seconds{{}}", [])
    return samples


def test_the_time_of_a_load_is_that_of_all_its_copies(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward hides two of them, after the one of the page that it computes as well."""
    monkeypatch.setattr(time, "perf_counter", count().__next__)
    worker.step(StepMetadata(loads=[load(90, [3, 4, 5, 6, 7, 8])]))
    assert not report(worker).timings, "the cost model did not ask"
    assert seconds(worker, "load") == [3]


def test_the_time_of_a_steps_saves_has_that_of_its_early_saves(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = [save(1, [1, 2, 3, 4])]
    monkeypatch.setattr(time, "perf_counter", count().__next__)
    worker.step(StepMetadata(early_saves=early))
    assert seconds(worker, "save") == [1]
    worker.step(StepMetadata(early_saves=early, saves=[save(2, [7, 8, 9, 10])]))
    assert seconds(worker, "save") == [4], "one early, one for each layer, one for the rest"


def test_loads_that_no_hook_starts_are_lost(worker: Worker) -> None:
    meta = StepMetadata(loads=[load(64, [3, 4, 5, 6])])
    worker.side.begin_step(meta)
    worker.side.end_step(meta)
    assert worker.side.outcome.take_invalid_blocks() == {3, 4, 5, 6}
    assert dict(report(worker).loaded) == {5: 1}


def test_a_load_lost_by_the_scheduler_side_is_reported_and_others_go_on(worker: Worker) -> None:
    worker.step(StepMetadata(lost=[LostLoad("r", [0, 5, 6], parked=False)]))
    assert worker.side.outcome.take_invalid_blocks() == {5, 6}
    worker.step(StepMetadata(loads=[load(64, [3, 4, 5, 6])]))
    assert not report(worker).broken
    assert worker.side.outcome.take_invalid_blocks() == set()


def test_no_copy_is_left_when_vllm_releases_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that falls asleep says so first; a later copy would find other bytes, or none."""
    monkeypatch.setattr(worker_side, "device_of", lambda *_: AdversarialDevice(lambda: False))
    worker = Worker()
    early = StepMetadata(early_saves=[save(1, [7, 8, 9, 10])])
    worker.side.begin_step(early)
    assert OLD not in values(torch.from_numpy(worker.arena.view[:SIZE])), "the copy is late"
    worker.side.finish_copies()
    for cache in worker.caches.values():
        cache.zero_()
    assert values(torch.from_numpy(worker.arena.view[:SIZE])) == {OLD}
    worker.close()


def test_a_closed_worker_releases_the_arena() -> None:
    """Otherwise an engine in this process would keep its DRAM tier after its end."""
    arena = Arena.create(1 << 20, shared=False)
    layout = ArtifactLayout(DENSE, 64)
    worker = WorkerSide(layout, 0, 8, "auto", Recorder())
    worker._device = HostDevice()
    worker.attach(arena.handle, layout)
    worker.attach(arena.handle, layout)  # once is enough
    arena.close()
    assert arena.view.nbytes == 1 << 20, "the worker has it"
    worker.close()
    with pytest.raises(StoreError, match="closed"):
        _ = arena.view
    worker.close()
