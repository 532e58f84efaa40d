"""A worker on `CudaDevice`: its streams wait for each other, the CPU for none, and bytes are right.

Kernels run in Triton's interpreter, at once. That copies are late is the business of
`adversarial_device`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from heterocache_cuda.driver import Driver
from heterocache_cuda.mover import UPLOADS, LaunchSizes
from heterocache_cuda.pinned import PinnedArena

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    PageCopy,
    Save,
    StepMetadata,
)
from hetero_connector.engine.worker import cuda_device, worker_side
from hetero_connector.engine.worker.cuda_device import CudaDevice
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.errors import LoadLostError, StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.planner.profile import CopyEngines
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.arena import Arena
from tests.engine.cuda_stand_ins import Cuda, NotedMover, cuda_stand_ins
from tests.engine.fakes import layer

KV = StateType.DENSE_KV
CHUNK, BLOCK, NUM_BLOCKS, NUM_LAYERS = 64, 16, 24, 10
MODEL = ModelSpec(tuple(layer(f"layer {i}", 0) for i in range(NUM_LAYERS)), alignment=BLOCK)
LAYOUT = ArtifactLayout(MODEL, CHUNK)
SIZE = LAYOUT.artifact_bytes(KV, 0, CHUNK)
FIRST, SECOND, THIRD = [1, 2, 3, 4], [9, 8, 7, 6], [12, 13, 14, 15]


class Worker:
    """A worker side whose pages are on a stand-in of a CUDA device."""

    def __init__(
        self,
        cuda: Cuda,
        monkeypatch: pytest.MonkeyPatch,
        layout: ArtifactLayout = LAYOUT,
        copy_engines: CopyEngines | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker_side, "device_of", lambda _, x: CudaDevice(cpu, x))
        self.cuda = cuda
        self.arena = Arena.create(4 * layout.artifact_bytes(KV, 0, CHUNK), shared=False)
        self.side = WorkerSide(layout, 0, NUM_BLOCKS, "on", Recorder(), copy_engines=copy_engines)
        rng = np.random.default_rng(3)
        self.caches = {
            x.layer: torch.from_numpy(rng.integers(1, 256, (NUM_BLOCKS, x.page_bytes), np.uint8))
            for x in layout.model.layers
        }
        self.side.register(self.caches)
        self.side.attach(self.arena.handle, layout)
        self.at_start = list(cuda.calls)
        for _ in range(2):
            self.step(StepMetadata())
        report = self.side.take_report()
        assert report is not None
        assert report.hidden_share == 1.0, "each layer's hooks were seen"

    def step(self, meta: StepMetadata, *, hooks: bool = True) -> list[tuple[str, str, str]]:
        """Run a step; return what the streams and the CPU did."""
        self.cuda.calls.clear()
        self.side.begin_step(meta)
        self.side.start_loads(meta, hooks_called=hooks)
        for name in self.caches if hooks else ():
            self.side.ensure_loaded(name)
            self.side.on_layer_written(meta, name)
        self.side.end_step(meta)
        return self.cuda.calls

    def pages(self, blocks: list[int]) -> list[torch.Tensor]:
        return [cache[blocks].clone() for cache in self.caches.values()]

    def close(self) -> None:
        self.side.close()
        self.arena.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    with cuda_stand_ins() as cuda:
        worker = Worker(cuda, monkeypatch)
        yield worker
        worker.close()


def load(blocks: list[int], *, parked: bool = False, resume: int = CHUNK) -> Load:
    span = ArtifactSpan(KV, 0, CHUNK, CHUNK, [SIZE])
    return Load("r", [span], {(KV, 0): Blocks(0, blocks)}, parked, resume, load_id=5)


def save(blocks: list[int]) -> Save:
    return Save([1], PageCopy([ArtifactCopy(KV, 0, CHUNK, SIZE)], {(KV, 0): Blocks(0, blocks)}))


@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "full graph"])
def test_what_is_saved_is_loaded(worker: Worker, hooks: bool) -> None:
    saved, others = worker.pages(FIRST), worker.pages([5, 10, 11])
    worker.step(StepMetadata(saves=[save(FIRST)]), hooks=hooks)
    worker.step(StepMetadata(loads=[load(SECOND)]), hooks=hooks)
    for before, after in zip(saved, worker.pages(SECOND), strict=True):
        assert torch.equal(before, after)
    for before, after in zip(others, worker.pages([5, 10, 11]), strict=True):
        assert torch.equal(before, after)


def test_a_save_waits_for_the_forward_and_later_work_for_the_save(worker: Worker) -> None:
    assert worker.step(StepMetadata(saves=[save(FIRST)])) == [
        ("saves", "waits for", "forward"),
        ("saves", "moves", "8 jobs"),
        ("saves", "waits for", "forward"),
        ("saves", "moves", "2 jobs"),
        ("forward", "waits for", "saves"),
    ]


def test_a_page_that_is_computed_too_is_loaded_before_the_forward(worker: Worker) -> None:
    calls = worker.step(StepMetadata(loads=[load(SECOND, resume=CHUNK - 5)]))
    assert calls[:6] == [
        ("loads", "waits for", "forward"),
        ("loads", "moves", "10 jobs"),
        ("forward", "waits for", "an event"),
        ("loads", "waits for", "forward"),
        ("loads", "moves", "8 jobs"),
        ("loads", "moves", "2 jobs"),
    ]
    assert set(calls[6:]) == {("forward", "waits for", "an event")}


def test_the_forwards_time_stops_once_for_each_batch_of_layers(worker: Worker) -> None:
    worker.cuda.events.clear()
    calls = worker.step(StepMetadata(loads=[load(SECOND)], timed_as=7))
    assert calls.count(("forward", "waits for", "an event")) == NUM_LAYERS
    stretches = sum(event.enable_timing for event in worker.cuda.events) / 2
    batches = 2
    assert stretches == batches + (1 + 1 + batches), "copies, and the forward between its waits"
    report = worker.side.take_report()
    assert report is not None
    assert [timing.step for timing in report.timings] == [7]


@pytest.fixture
def eight_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of a parked load may have eight programs, so the ten layers take two."""
    monkeypatch.setattr(cuda_device, "LAUNCH_SIZES", LaunchSizes(programs=8))


def test_a_parked_load_of_few_layers_is_one_launch(worker: Worker) -> None:
    calls = worker.step(StepMetadata(loads=[load(SECOND, parked=True)]))
    assert calls[-1] == ("parked loads", "moves", "10 jobs")


def test_nothing_waits_for_a_parked_load(eight_programs: None, worker: Worker) -> None:
    worker.cuda.is_busy = True
    parked = replace(load(SECOND, parked=True), request_id="p", load_id=6)
    calls = worker.step(StepMetadata(loads=[parked]))
    assert calls == [
        ("parked loads", "waits for", "forward"),
        ("parked loads", "moves", "8 jobs"),
        ("parked loads", "moves", "2 jobs"),
    ]
    end = worker.cuda.events[-1]
    worker.step(StepMetadata(loads=[load(THIRD)], saves=[save(FIRST)]))
    assert worker.side.take_report() is None
    worker.cuda.finish()
    end.fired = False
    report = worker.side.take_report()
    assert report is not None
    assert (dict(report.saved), dict(report.loaded)) == ({1: 1}, {5: 1}), "they have ended"
    assert worker.side.take_transfers() == (set(), set())
    end.fired = True
    assert worker.side.take_transfers() == ({"p"}, set())
    report = worker.side.take_report()
    assert report is not None
    assert dict(report.loaded) == {6: 1}


def test_parked_loads_are_timed_where_they_run(eight_programs: None, worker: Worker) -> None:
    worker.step(StepMetadata(loads=[load(SECOND, parked=True)], timed_as=3))
    report = worker.side.take_report()
    assert report is not None
    assert [(x.step, x.load_s) for x in report.timings] == [(3, 2e-3)], "two batches"
    timed = [event.stream for event in worker.cuda.events if event.enable_timing]
    assert timed.count("parked loads") == 4
    assert set(timed) == {"forward", "parked loads"}


def test_a_parked_load_brings_what_was_saved(worker: Worker) -> None:
    saved = worker.pages(FIRST)
    worker.step(StepMetadata(saves=[save(FIRST)]))
    worker.step(StepMetadata(loads=[load(SECOND, parked=True)]))
    assert all(map(torch.equal, saved, worker.pages(SECOND)))


def test_the_cpu_never_waits_while_serving(worker: Worker) -> None:
    worker.cuda.is_busy = True
    early = StepMetadata(loads=[load(SECOND)], saves=[save(FIRST)], early_saves=[save([12] * 4)])
    for meta in (early, StepMetadata(cleared={0: [1, 2]}), StepMetadata()):
        assert not [call for call in worker.step(meta) if call[0] == "cpu"]
    assert worker.side.take_report() is None
    worker.cuda.finish()
    report = worker.side.take_report()
    assert report is not None
    assert (dict(report.saved), dict(report.loaded)) == ({1: 2}, {5: 1})


TWO_SIZES = ArtifactLayout(
    ModelSpec(
        tuple(layer(f"layer {i}", 0, page_bytes=256 if i % 2 else 512) for i in range(NUM_LAYERS)),
        alignment=BLOCK,
    ),
    CHUNK,
)
"""Every second layer has large pages."""
LARGE = CopyEngines(load_from_bytes=512, save_from_bytes=512)
COPIED, IN_ORDER = ("loads", "copies", "in any order"), ("saves", "copies", "in stream order")


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1000], ids=["one piece", "edges in pages"])
def test_large_pages_are_moved_by_copy_engines_on_the_same_stream(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    pin = partial(PinnedArena.pin, piece_bytes=piece_bytes)
    monkeypatch.setattr(PinnedArena, "pin", pin)
    with cuda_stand_ins() as cuda:
        worker = Worker(cuda, monkeypatch, TWO_SIZES, LARGE)
        saved, others = worker.pages(FIRST), worker.pages([5, 10, 11])
        calls = worker.step(StepMetadata(saves=[save(FIRST)]))
        assert calls == [
            ("saves", "waits for", "forward"),
            ("saves", "moves", "4 jobs"),
            IN_ORDER,
            ("saves", "waits for", "forward"),
            ("saves", "moves", "1 jobs"),
            IN_ORDER,
            ("forward", "waits for", "saves"),
        ]
        cuda.events.clear()
        calls = worker.step(StepMetadata(loads=[load(SECOND)]))
        batches = [("loads", "moves", "4 jobs"), COPIED, ("loads", "moves", "1 jobs"), COPIED]
        assert calls[:5] == [("loads", "waits for", "forward"), *batches]
        fences = [event for event in cuda.events if not event.enable_timing]
        assert [event.after for event in fences[:2]] == [COPIED, COPIED]
        assert all(map(torch.equal, saved, worker.pages(SECOND)))
        assert all(map(torch.equal, others, worker.pages([5, 10, 11])))
        worker.close()


@pytest.mark.parametrize(
    ("copy_engines", "can_copy_batches", "copied"),
    [
        (LARGE, True, {"loads", "saves"}),
        (CopyEngines(load_from_bytes=256), True, {"loads"}),
        (CopyEngines(save_from_bytes=512), True, {"saves"}),
        (CopyEngines(load_from_bytes=513), True, set()),
        (CopyEngines(), True, set()),
        (None, True, set()),
        (LARGE, False, set()),
    ],
)
def test_copy_engines_are_used_where_they_were_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
    copy_engines: CopyEngines | None,
    can_copy_batches: bool,
    copied: set[str],
) -> None:
    with cuda_stand_ins() as cuda:
        cuda.can_copy_batches = can_copy_batches
        worker = Worker(cuda, monkeypatch, TWO_SIZES, copy_engines)
        saved = worker.pages(FIRST)
        calls = list(worker.step(StepMetadata(saves=[save(FIRST)])))
        calls += worker.step(StepMetadata(loads=[load(SECOND)]))
        assert {stream for stream, does, _ in calls if does == "copies"} == copied
        assert all(map(torch.equal, saved, worker.pages(SECOND)))
        worker.close()


def test_pages_are_cleared_in_the_forwards_stream(worker: Worker) -> None:
    kept = worker.pages([3])
    worker.cuda.calls.clear()
    worker.side.protect_replays(StepMetadata(cleared={0: [1, 2]}), {}, None)
    assert worker.cuda.calls == [("forward", "moves", "10 jobs")]
    assert not any(pages.any() for pages in worker.pages([1, 2]))
    assert all(map(torch.equal, kept, worker.pages([3])))


def test_no_kernel_is_compiled_while_serving(worker: Worker) -> None:
    warm = set(worker.cuda.variants)
    worker.step(StepMetadata(loads=[load(SECOND)], saves=[save(FIRST)]))
    worker.side.protect_replays(StepMetadata(cleared={0: [1, 2]}), {}, None)
    assert len(warm) > 0
    assert set(worker.cuda.variants) == warm


def test_no_upload_is_the_first_of_its_stream_while_serving(worker: Worker) -> None:
    reserved = [stream for stream, does, _ in worker.at_start if does == "reserves"]
    assert reserved == ["loads", "parked loads", "saves", "forward"]
    worker.cuda.uploads.clear()
    loads = [load(SECOND), load(THIRD, parked=True)]
    worker.step(StepMetadata(loads=loads, saves=[save(FIRST)]))
    worker.side.protect_replays(StepMetadata(cleared={0: [1, 2]}), {}, None)
    assert {stream for stream, _ in worker.cuda.uploads} == set(reserved)
    assert all(min(UPLOADS) <= size_bytes <= max(UPLOADS) for _, size_bytes in worker.cuda.uploads)


def test_the_arena_is_unpinned_after_all_copies(worker: Worker) -> None:
    worker.cuda.calls.clear()
    worker.side.close()
    assert worker.cuda.calls == [
        ("cpu", "waits for", "loads"),
        ("cpu", "waits for", "parked loads"),
        ("cpu", "waits for", "saves"),
        ("cpu", "unpins", ""),
    ]


def test_an_arena_that_cannot_be_pinned_is_copied_through_a_buffer(worker: Worker) -> None:
    worker.cuda.refuses_to_pin = True
    worker.cuda._names = iter(("loads", "parked loads", "saves"))
    every_page = CopyEngines(load_from_bytes=1, save_from_bytes=1)
    other = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder(), copy_engines=every_page)
    other.register(worker.caches)
    other.attach(worker.arena.handle, LAYOUT)
    worker.side, pinned = other, worker.side
    saved = worker.pages(FIRST)
    assert ("cpu", "waits for", "saves") in worker.step(StepMetadata(saves=[save(FIRST)]))
    assert ("cpu", "waits for", "loads") in worker.step(StepMetadata(loads=[load(SECOND)]))
    assert all(map(torch.equal, saved, worker.pages(SECOND)))
    parked = StepMetadata(loads=[load(THIRD, parked=True)])
    assert ("cpu", "waits for", "parked loads") in worker.step(parked)
    assert all(map(torch.equal, saved, worker.pages(THIRD)))
    pinned.close()


def test_a_device_that_fails_ends_the_engine_and_forgets_no_load(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would notice it while all requests wait for parked loads."""
    first = replace(load(SECOND, parked=True), request_id="p", load_id=6)
    worker.cuda.is_busy = True
    worker.step(StepMetadata(loads=[first]))
    under_way = list(worker.side._under_way)

    def fail(event: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(type(worker.cuda.events[-1]), "query", fail)
        for _ in range(2):
            with pytest.raises(LoadLostError, match=r"the device has failed.*illegal memory"):
                worker.side.take_report()
    assert worker.side._under_way == under_way
    worker.cuda.finish()
    assert worker.side.take_transfers() == ({"p"}, set())


def test_an_arena_is_not_left_pinned_if_attaching_fails(worker: Worker) -> None:
    worker.cuda._names = iter(("loads", "parked loads", "saves"))
    other = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder())
    other.register(worker.caches)
    full = torch.OutOfMemoryError("CUDA out of memory")
    worker.side.close()
    with (
        patch.object(NotedMover, "reserve_uploads", side_effect=full),
        pytest.raises(StoreError, match="out of memory"),
    ):
        other.attach(worker.arena.handle, LAYOUT)
    assert not worker.cuda.pinned
    other.close()


def test_a_machine_without_a_driver_is_an_error_at_start(worker: Worker) -> None:
    worker.cuda._names = iter(("loads", "parked loads", "saves"))
    other = WorkerSide(LAYOUT, 0, NUM_BLOCKS, "on", Recorder())
    other.register(worker.caches)
    missing = OSError("libcuda.so.1: cannot open shared object file")
    with (
        patch.object(Driver, "open", side_effect=missing),
        pytest.raises(StoreError, match=r"DRAM tier.*libcuda"),
    ):
        other.attach(worker.arena.handle, LAYOUT)
    other.close()
