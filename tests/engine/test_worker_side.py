"""One rank's copies against vLLM's order of calls, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.devices import HostDevice
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    PageCopy,
    Save,
    StepMetadata,
)
from hetero_connector.engine.worker_side import WorkerSide
from hetero_connector.errors import StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.arena import Arena
from tests.engine.fakes import DENSE, layer

KV = StateType.DENSE_KV
CHUNK, BLOCK, NUM_BLOCKS = 64, 16, 32
LAYERS = ("target", "draft")
MODEL = ModelSpec(tuple(layer(name, 0) for name in LAYERS), alignment=BLOCK)
LAYOUT = ArtifactLayout(MODEL, CHUNK)
SIZE = LAYOUT.artifact_bytes(KV, 0, CHUNK)
STORED, FRESH, OLD = 7, 99, 50
"""Bytes of what the store holds, the forward writes, and an earlier request left."""


class Worker:
    """A worker side whose second thread is busy: a load is late wherever it may be."""

    def __init__(self, layerwise: str = "on", *, microbatches: bool = False) -> None:
        self.arena = Arena.create(4 * SIZE, shared=False)
        self.side = WorkerSide(
            LAYOUT, 0, NUM_BLOCKS, layerwise, Recorder(), microbatches=microbatches
        )
        self.caches = {
            name: torch.full((NUM_BLOCKS, BLOCK, 16), OLD, dtype=torch.uint8) for name in LAYERS
        }
        self.side.register(self.caches)
        self.side._pipeline._executor.submit = _never  # type: ignore[method-assign]
        self.step(StepMetadata())  # an earlier one, in which both layers ask

    def step(self, meta: StepMetadata, layers: Sequence[str] = LAYERS) -> None:
        """A step that writes nothing."""
        self.begin(meta)
        for name in layers:
            self.side.layer_wanted(name)
            self.side.layer_written(meta, name)
        self.side.end_step(meta)

    def begin(self, meta: StepMetadata) -> None:
        meta.arena = self.arena.handle
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
    """Of the first `tokens` tokens, in chunks that lie one behind another."""
    offsets = range(0, -(-tokens // CHUNK) * SIZE, SIZE)
    span = ArtifactSpan(KV, 0, tokens, CHUNK, offsets)
    return Load("r", [span], {(KV, 0): Blocks(0, blocks)}, parked=False)


def save(save_id: int, blocks: list[int]) -> Save:
    artifact = ArtifactCopy(KV, 0, CHUNK, (save_id - 1) * SIZE)
    return Save([save_id], PageCopy([artifact], {(KV, 0): Blocks(0, blocks)}))


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.flatten().tolist())


@pytest.mark.parametrize("boundary", [21, 64, 90])
def test_tokens_computed_in_a_page_that_is_loaded_too_are_kept(
    worker: Worker, boundary: int
) -> None:
    """vLLM writes a layer's new keys and values before it asks for the layer."""
    blocks = list(range(3, 9))
    page, rows = blocks[boundary // BLOCK], boundary % BLOCK
    meta = StepMetadata(loads=[load(boundary, blocks[: -(-boundary // BLOCK)])])
    worker.begin(meta)
    for name in LAYERS:
        worker.caches[name][page, rows:] = FRESH
        worker.side.layer_wanted(name)
        assert values(worker.caches[name][blocks[: boundary // BLOCK]]) == {STORED}
        assert values(worker.caches[name][page, :rows]) <= {STORED}
        assert values(worker.caches[name][page, rows:]) == {FRESH}
    worker.side.end_step(meta)


def test_whole_pages_are_still_loaded_layer_by_layer(worker: Worker) -> None:
    worker.begin(meta := StepMetadata(loads=[load(90, [3, 4, 5, 6, 7, 8])]))
    assert values(worker.caches["draft"][[3, 4, 5, 6, 7]]) == {OLD}
    assert values(worker.caches["draft"][8]) == {STORED}
    worker.side.layer_wanted("draft")
    assert values(worker.caches["draft"][[3, 4, 5, 6, 7, 8]]) == {STORED}
    worker.side.end_step(meta)


def test_a_forward_that_calls_no_hooks_finds_everything_loaded(worker: Worker) -> None:
    meta = StepMetadata(arena=worker.arena.handle, loads=[load(64, [3, 4, 5, 6])])
    worker.side.begin_step(meta)
    worker.side.start_loads(meta, hooks_called=False)
    for name in LAYERS:
        assert values(worker.caches[name][[3, 4, 5, 6]]) == {STORED}
    worker.side.end_step(meta)


def test_a_drafter_that_is_left_out_finds_its_pages_loaded_in_the_next_step(
    worker: Worker,
) -> None:
    """vLLM runs none near the end of a request's length, although it did before."""
    blocks = [3, 4, 5, 6]
    worker.step(StepMetadata(loads=[load(64, blocks)]), layers=["target"])
    for name in LAYERS:
        assert values(worker.caches[name][blocks]) == {STORED}
    report = worker.side.take_report()
    assert report is not None
    assert report.loaded["r"] == 1


@pytest.mark.parametrize("told", [True, False])
def test_pages_are_saved_once_the_last_microbatch_has_written_them(told: bool) -> None:
    """vLLM calls every layer hook once for each; told of them or not."""
    worker = Worker(microbatches=told)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    meta = StepMetadata(saves=[save(1, first), save(2, second)])
    worker.begin(meta)
    for name in LAYERS:
        for blocks in (first, second):
            worker.side.layer_wanted(name)
            worker.caches[name][blocks] = FRESH
            worker.side.layer_written(meta, name)
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


def test_a_worker_that_ends_lets_go_of_the_arena() -> None:
    """Else an engine in this process would keep its whole DRAM tier after its end."""
    arena = Arena.create(1 << 20, shared=False)
    worker = WorkerSide(ArtifactLayout(DENSE, 64), 0, 8, "auto", Recorder())
    worker._device = HostDevice()
    assert worker._arena_view(StepMetadata(arena=arena.handle)).nbytes == 1 << 20
    arena.close()
    assert arena.view.nbytes == 1 << 20, "the worker has it"
    worker.close()
    with pytest.raises(StoreError, match="closed"):
        _ = arena.view
    worker.close()
