"""Pages in host memory (the CPU backend): numpy copies them on the thread that asks."""

from __future__ import annotations

import time as clock
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hetero_connector.artifacts.tensor_parallel import PageRun
from hetero_connector.engine.worker.copy_plan import Copies, IndexArray
from hetero_connector.engine.worker.devices import SaveLayers, StartTimer, Wait
from hetero_connector.engine.worker.pages import (
    ArenaRows,
    BlockIds,
    ByteArray,
    HostPages,
    as_slice,
    run_views,
)
from hetero_connector.spec import LayerSpec

_LayerCopies = list[tuple[HostPages, ArenaRows, BlockIds]]


class HostDevice:
    """Pages in host memory. Copies are synchronous, so they are always in order.

    It also asks the kernel for the CPU's AMX tiles, if there are any. vLLM 0.32.0 asks only at its
    first large matrix product. A process that begins with the few tokens after a restored prefix
    uses the tiles earlier, and would end with an illegal instruction.
    """

    overlaps_by_thread = True
    layers_per_copy = 1

    def __init__(self) -> None:
        torch.cpu._init_amx()
        self._layers: dict[str, tuple[LayerSpec, list[tuple[HostPages, PageRun]]]] = {}
        self._arena: ByteArray | None = None

    def add_layer(self, spec: LayerSpec, view: torch.Tensor, runs: Sequence[PageRun]) -> None:
        views = run_views(spec, view, runs)
        pages = [(HostPages(v), run) for v, run in zip(views, runs, strict=True)]
        self._layers[spec.layer] = spec, pages

    def warm_up(self) -> None:
        pass

    def attach(self, arena: ByteArray, largest_artifact_bytes: int) -> None:
        self._arena = arena

    def detach(self) -> None:
        self._arena = None

    def load(
        self, copies: Sequence[Copies], batches: Sequence[Sequence[str]], time: StartTimer
    ) -> list[Wait]:
        by_layer = self._by_layer(copies)
        return [partial(self._load, by_layer, batch, time) for batch in batches]

    def load_parked(self, copies: Sequence[Copies], time: StartTimer) -> Callable[[], bool]:
        self._load(self._by_layer(copies), list(self._layers), time)
        return _has_ended

    def prepare_saves(self, copies: Sequence[Copies]) -> SaveLayers:
        return partial(self._save, self._by_layer(copies))

    def make_forward_wait_for_saves(self) -> None:
        pass

    def clear(self, blocks: Mapping[int, Sequence[int]]) -> None:
        for spec, pages_of_runs in self._layers.values():
            if ids := blocks.get(spec.group):
                for pages, _ in pages_of_runs:
                    pages.clear(np.array(ids, dtype=np.int64))

    def finish(self) -> None:
        pass

    def fence(self) -> Callable[[], bool]:
        return _has_ended

    def time_forward(self) -> HostStopwatch:
        return HostStopwatch()

    def time_copies(self) -> HostStopwatch:
        return HostStopwatch()

    def _load(
        self, by_layer: Mapping[str, _LayerCopies], layers: Sequence[str], time: StartTimer
    ) -> None:
        assert self._arena is not None
        end = time()
        for layer in layers:
            for pages, rows, blocks in by_layer.get(layer, ()):
                pages.load(self._arena, rows, blocks)
        end()

    def _save(self, by_layer: Mapping[str, _LayerCopies], layers: Sequence[str]) -> None:
        assert self._arena is not None
        for layer in layers:
            for pages, rows, blocks in by_layer.get(layer, ()):
                pages.save(self._arena, rows, blocks)

    def _by_layer(self, copies: Sequence[Copies]) -> Mapping[str, _LayerCopies]:
        """Return the copies of each layer, as few as strides can express."""
        found: defaultdict[str, _LayerCopies] = defaultdict(list)
        for some in copies:
            by_table = [list(_copies(ids, some.offsets)) for ids in some.block_ids]
            for segment, index in zip(some.segments, some.pages_of, strict=True):
                name, pitch = segment.layer.layer, segment.layer.whole_page_bytes
                for pages, run in self._layers[name][1]:
                    start = segment.offset + run.whole_start
                    for offset, first, stride, artifacts, count, blocks in by_table[index]:
                        at = start + offset + first * pitch
                        rows = ArenaRows(at, stride, artifacts, count, pitch)
                        found[name].append((pages, rows, blocks))
        return found


class HostStopwatch:
    """Measures work that has ended when its call returns."""

    def __init__(self) -> None:
        self._stretches_s: list[float] = []

    def start(self) -> Callable[[], None]:
        started_s = clock.perf_counter()
        return lambda: self._stretches_s.append(clock.perf_counter() - started_s)

    def seconds(self) -> float | None:
        return sum(self._stretches_s)


def _has_ended() -> bool:
    return True


class _Copy(NamedTuple):
    """One copy, which is made for each layer with the same table."""

    offset: int
    """Bytes from the arena's start to the first artifact."""
    first_page: int
    """In each artifact."""
    stride: int
    """Bytes from one artifact to the next; 0 of a single one."""
    artifacts: int
    pages: int
    """The pages of each artifact that are copied."""
    blocks: BlockIds


def _copies(ids: IndexArray, offsets: IndexArray) -> Iterator[_Copy]:
    """Yield the copies of artifacts at these offsets. `ids`: `[artifacts, pages]`, 0 for none."""
    pages = ids.shape[1]
    for first, stop, stride in _evenly_spaced(offsets):
        if ids[first:stop].all():
            blocks = as_slice(ids[first:stop].reshape(-1))
            yield _Copy(int(offsets[first]), 0, stride, stop - first, pages, blocks)
            continue
        for index in range(first, stop):
            valid = np.flatnonzero(ids[index])
            for some in np.split(valid, np.flatnonzero(np.diff(valid) > 1) + 1):
                if len(some):
                    blocks = as_slice(ids[index, some])
                    yield _Copy(int(offsets[index]), int(some[0]), 0, 1, len(some), blocks)


def _evenly_spaced(offsets: IndexArray) -> Iterator[tuple[int, int, int]]:
    """Yield (first, stop, stride) of artifacts at rising offsets with one distance."""
    steps = (offsets[1:] - offsets[:-1]).tolist()
    first = 0
    while first < len(offsets):
        stop = first + 1
        stride = steps[first] if first < len(steps) and steps[first] > 0 else 0
        while stride and stop < len(offsets) and steps[stop - 1] == stride:
            stop += 1
        yield first, stop, stride
        first = stop
