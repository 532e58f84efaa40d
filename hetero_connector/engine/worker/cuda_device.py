"""Pages on a CUDA device: three streams copy between them and the pinned arena."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from heterocache_cuda.batched import CopyTable, copy_pages, plan_copies, split
from heterocache_cuda.bounce import BounceBuffer
from heterocache_cuda.driver import Driver
from heterocache_cuda.layout import WIDEST_ACCESS, PageLayout
from heterocache_cuda.mover import (
    LAUNCH_SIZES,
    Int64Array,
    Job,
    Mode,
    PageMover,
    Part,
    Tile,
    alignment_of,
    plan_moves,
)
from heterocache_cuda.pinned import PinnedArena

from hetero_connector.artifacts.layout import Segment
from hetero_connector.artifacts.tensor_parallel import PageRun
from hetero_connector.engine.worker.copy_plan import Copies
from hetero_connector.engine.worker.devices import SaveLayers, StartTimer, Wait
from hetero_connector.engine.worker.pages import ByteArray, run_views
from hetero_connector.errors import StoreError
from hetero_connector.planner.profile import CopyEngines
from hetero_connector.spec import LayerSpec

logger = logging.getLogger("vllm.heterocache")

_MOST_SHAPES = 64
"""Shapes of which the jobs are kept. A prompt's last chunk may have any length."""


class _Pages(NamedTuple):
    """A layer's pages, run by run."""

    spec: LayerSpec
    layouts: list[PageLayout]
    runs: Sequence[PageRun]


class _Jobs(NamedTuple):
    """The jobs of one shape of artifacts."""

    rows: Int64Array
    tiles: list[Tile]
    layers: list[str]
    """The layer of each job."""
    segments: Int64Array
    """The segment of each job, by its index."""


class CudaDevice:
    """Pages on a CUDA device.

    Loads, parked loads and saves have a stream each, of the default priority, which is CUDA's
    lowest. The forward's stream waits for loads and saves by events; the CPU never does, unless the
    arena cannot be pinned. A kernel moves pages, or the copy engines do: those that a table
    names.
    """

    overlaps_by_thread = False
    layers_per_copy = 8

    def __init__(self, device: torch.device, copy_engines: CopyEngines | None = None) -> None:
        self._device = device
        self._copy_table = _copy_table(copy_engines)
        self._mover = PageMover(device)
        self._loads = torch.cuda.Stream(device)
        self._parked_loads = torch.cuda.Stream(device)
        self._saves = torch.cuda.Stream(device)
        self._streams = self._loads, self._parked_loads, self._saves
        self._pages: dict[str, _Pages] = {}
        self._jobs: dict[tuple[Hashable, int], _Jobs] = {}
        self._driver: Driver | None = None
        self._pinned: PinnedArena | None = None
        self._bounce: BounceBuffer | None = None
        """None if the arena is pinned."""
        self._address = 0
        """The arena's address, on the host and on the device."""

    def add_layer(self, spec: LayerSpec, view: torch.Tensor, runs: Sequence[PageRun]) -> None:
        layouts = [PageLayout.of(x) for x in run_views(spec, view, runs)]
        self._pages[spec.layer] = _Pages(spec, layouts, runs)

    def warm_up(self) -> None:
        """Compile the kernel. vLLM calls this before it begins to watch for late compilations."""
        self._mover.warm_up(self._tiles())

    def attach(self, arena: ByteArray, largest_artifact_bytes: int) -> None:
        """Page-lock the arena, so that the device reads and writes it by itself.

        If that fails, copies go through a small buffer, and block. It also reserves the memory that
        the first uploads would wait for, also on the forward's stream, which clears pages.
        """
        pinned = None
        try:
            driver = Driver.open(self._device.index or 0)
            pinned = PinnedArena.pin(arena, driver)
            if not pinned.is_complete:
                self._bounce = BounceBuffer.open(self._mover, arena, largest_artifact_bytes)
            # Not before: vLLM has torch release unused memory when it has captured its graphs.
            for stream in (*self._streams, torch.cuda.current_stream()):
                with torch.cuda.stream(stream):
                    self._mover.reserve_uploads()
        except (OSError, RuntimeError) as error:
            self._bounce = None
            if pinned is not None:
                pinned.close()  # the caller unmaps the arena
            raise StoreError(f"the GPU cannot use the DRAM tier's memory: {error}") from error
        self._driver, self._pinned, self._address = driver, pinned, arena.ctypes.data
        if self._copy_table and not driver.can_copy_batches:
            logger.info("the CUDA driver is older than 12.8, so no pages are moved by copy engines")
            self._copy_table = {}

    def detach(self) -> None:
        try:
            self.finish()
        except RuntimeError as error:  # an earlier error of the device: its copies may go on
            logger.warning("the arena stays pinned until exit: %s", error)
        else:
            if self._pinned is not None:
                self._pinned.close()
        self._pinned = self._bounce = None

    def load(
        self, copies: Sequence[Copies], batches: Sequence[Sequence[str]], time: StartTimer
    ) -> list[Wait]:
        return [_wait_for(event) for event in self._load(self._loads, copies, batches, time)]

    def load_parked(self, copies: Sequence[Copies], time: StartTimer) -> Callable[[], bool]:
        # A launch has a program for each job at least. One for all layers would take most of the
        # multiprocessors from the others' decodes.
        jobs = max(len(pages.layouts) for pages in self._pages.values())
        layers, size = list(self._pages), max(1, LAUNCH_SIZES.programs // jobs)
        batches = [layers[i : i + size] for i in range(0, len(layers), size)]
        *_, last = self._load(self._parked_loads, copies, batches, time)
        return lambda: bool(last.query())

    def prepare_saves(self, copies: Sequence[Copies]) -> SaveLayers:
        return partial(self._save, copies)

    def make_forward_wait_for_saves(self) -> None:
        torch.cuda.current_stream().wait_stream(self._saves)

    def clear(self, blocks: Mapping[int, Sequence[int]]) -> None:
        parts = []
        for pages in self._pages.values():
            if ids := blocks.get(pages.spec.group):
                jobs = [Job(layout, 0, 0, len(ids)) for layout in pages.layouts]
                parts.append(_part(jobs, np.array([ids], np.int64)))
        moves = plan_moves(parts)
        self._mover.launch(Mode.CLEAR, moves, self._mover.upload(moves))

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def fence(self) -> Callable[[], bool]:
        events = [stream.record_event() for stream in (self._loads, self._saves)]
        return lambda: all(event.query() for event in events)

    def time_forward(self) -> CudaStopwatch:
        return CudaStopwatch()

    def time_copies(self) -> CudaStopwatch:
        return CudaStopwatch()

    def _save(self, copies: Sequence[Copies], layers: Sequence[str]) -> None:
        self._saves.wait_stream(torch.cuda.current_stream())
        parts = self._parts(copies, [layers])
        with torch.cuda.stream(self._saves):
            if self._bounce is not None:
                self._bounce_all(Mode.SAVE, parts)
                return
            self._plan(Mode.SAVE, parts, 1)(0)

    def _tiles(self) -> Iterator[Tile]:
        """Yield the variants of the kernel that moves of these pages need.

        The offset of a layer in an artifact is a sum of other layers' pages.
        """
        page_bytes = gcd(*(pages.spec.whole_page_bytes for pages in self._pages.values()))
        for pages in self._pages.values():
            for layout, run in zip(pages.layouts, pages.runs, strict=True):
                job = Job(layout, run.whole_start, pages.spec.whole_page_bytes, 1)
                alignment = WIDEST_ACCESS
                while alignment >= gcd(WIDEST_ACCESS, page_bytes):
                    yield job.tile(alignment)
                    alignment //= 2

    def _plan(self, mode: Mode, parts: Sequence[Part], num_batches: int) -> Callable[[int], None]:
        """Return a function that issues a batch, by number, on the stream that is current now."""
        assert self._driver is not None
        assert self._pinned is not None
        driver, stream = self._driver, torch.cuda.current_stream().cuda_stream
        by_engines: list[Part] = []
        if mode in self._copy_table:
            pairs = [split(self._copy_table, mode, part) for part in parts]
            parts = [x for x, _ in pairs if len(x.rows)]
            by_engines = [x for _, x in pairs if len(x.rows)]
        moves = plan_moves(parts, num_batches)
        data = self._mover.upload(moves)
        piece_bytes = self._pinned.piece_bytes
        copied = by_engines and plan_copies(by_engines, self._address, num_batches, piece_bytes)

        def issue(batch: int) -> None:
            self._mover.launch(mode, moves, data, batch)
            if copied:
                copy_pages(driver, mode, copied[batch], stream)

        return issue

    def _load(
        self,
        stream: torch.cuda.Stream,
        copies: Sequence[Copies],
        batches: Sequence[Sequence[str]],
        time: StartTimer,
    ) -> list[torch.cuda.Event]:
        """Load batch by batch on a stream; return an event after each batch."""
        stream.wait_stream(torch.cuda.current_stream())
        parts = self._parts(copies, batches)
        with torch.cuda.stream(stream):
            if self._bounce is not None:
                end = time()
                self._bounce_all(Mode.LOAD, parts)
                end()
                return [stream.record_event()] * len(batches)
            issue = self._plan(Mode.LOAD, parts, len(batches))
            events = []
            for batch in range(len(batches)):
                end = time()
                issue(batch)
                end()
                events.append(stream.record_event())
        return events

    def _bounce_all(self, mode: Mode, parts: Sequence[Part]) -> None:
        assert self._bounce is not None
        for part in parts:
            self._bounce.move(mode, part)

    def _parts(self, copies: Sequence[Copies], batches: Sequence[Sequence[str]]) -> list[Part]:
        batch_of = {layer: n for n, layers in enumerate(batches) for layer in layers}
        parts = []
        for some in copies:
            addresses = some.offsets + self._address
            jobs = self._jobs_of(some, alignment_of(addresses))
            batch = np.array([batch_of.get(layer, -1) for layer in jobs.layers], np.int64)
            chosen = np.flatnonzero(batch >= 0)
            if len(chosen):
                ids_of_job = np.array(some.pages_of, np.int64)[jobs.segments[chosen]]
                tiles = [jobs.tiles[i] for i in chosen.tolist()]
                rows = jobs.rows[chosen]
                parts.append(
                    Part(rows, tiles, ids_of_job, some.block_ids, addresses, batch[chosen])
                )
        return parts

    def _jobs_of(self, copies: Copies, alignment: int) -> _Jobs:
        key = (copies.shape, alignment)
        known = self._jobs.get(key)
        if known is None:
            if len(self._jobs) >= _MOST_SHAPES:
                self._jobs.clear()
            known = self._jobs[key] = self._make_jobs(copies.segments, alignment)
        return known

    def _make_jobs(self, segments: Sequence[Segment], alignment: int) -> _Jobs:
        jobs, layers, indices = [], [], []
        for index, segment in enumerate(segments):
            spec, layouts, runs = self._pages[segment.layer.layer]
            for layout, run in zip(layouts, runs, strict=True):
                offset = segment.offset + run.whole_start
                jobs.append(Job(layout, offset, spec.whole_page_bytes, segment.num_pages))
                layers.append(spec.layer)
                indices.append(index)
        rows = np.array([job.row() for job in jobs], np.int64)
        tiles = [job.tile(alignment) for job in jobs]
        return _Jobs(rows, tiles, layers, np.array(indices, np.int64))


class CudaStopwatch:
    """Measures work on the current stream by two events around each stretch."""

    def __init__(self) -> None:
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Callable[[], None]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.current_stream().record_event(first)

        def stop() -> None:
            torch.cuda.current_stream().record_event(last)
            self._stretches.append((first, last))

        return stop

    def seconds(self) -> float | None:
        if not all(last.query() for _, last in self._stretches):
            return None
        return 1e-3 * sum(float(first.elapsed_time(last)) for first, last in self._stretches)


def _part(jobs: Sequence[Job], block_ids: Int64Array) -> Part:
    """Return jobs that use no artifact."""
    none = np.zeros(len(jobs), np.int64)
    rows = np.array([job.row() for job in jobs], np.int64)
    tiles = [job.tile(0) for job in jobs]
    return Part(rows, tiles, none, [block_ids], np.zeros(1, np.int64), none)


def _copy_table(copy_engines: CopyEngines | None) -> CopyTable:
    if copy_engines is None:
        return {}
    sizes = {
        Mode.LOAD: copy_engines.load_from_bytes,
        Mode.SAVE: copy_engines.save_from_bytes,
    }
    return {mode: size for mode, size in sizes.items() if size is not None}


def _wait_for(event: torch.cuda.Event) -> Wait:
    return lambda: torch.cuda.current_stream().wait_event(event)
