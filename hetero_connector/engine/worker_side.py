"""The worker side: copies pages to and from the arena, as the scheduler side says.

One per tensor-parallel rank. Loads run layer by layer ahead of the forward, saves layer
by layer behind it; layers that never call vLLM's layer hooks (recurrent layers, a
model's auxiliary caches) are loaded before the forward and saved after it. So are all
layers where the forward runs as microbatches, each of which calls every hook.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine import slot_masks
from hetero_connector.engine.copy_plan import (
    LayerCopies,
    plan_layerwise,
    plan_loads,
    plan_saves,
)
from hetero_connector.engine.devices import Device, device_of
from hetero_connector.engine.layer_hooks import LayerHooks
from hetero_connector.engine.layer_pipeline import Job, LayerPipeline
from hetero_connector.engine.messages import Load, PageCopy, Save, StepMetadata, WorkerReport
from hetero_connector.engine.pages import (
    ArenaRows,
    ByteArray,
    IndexArray,
    Pages,
    check_cut_by_heads,
    page_view,
    run_views,
)
from hetero_connector.engine.step_timer import StepTimer
from hetero_connector.metrics import Recorder
from hetero_connector.store.arena import Arena

OVERLAP_FROM_BYTES = 4 << 20
"""Below this a step's loads end before a second thread would have started on them."""


@dataclass
class _StepSaves:
    """This step's saves, their copies, and the layers of which the hook has made them."""

    saves: list[Save]
    plans: list[LayerCopies]
    copied: set[str] = field(default_factory=set)


class WorkerSide:
    """Executes `StepMetadata` on one rank's pages."""

    def __init__(
        self,
        layout: ArtifactLayout,
        rank: int,
        num_blocks: int,
        layerwise: str,
        recorder: Recorder,
        *,
        any_tp: bool = False,
        microbatches: bool = False,
    ) -> None:
        """`any_tp`: engines of other TP sizes use what this one stores.

        `microbatches`: a step may run as several forwards at a time, so no layer hook says that a
        layer's pages are complete.
        """
        self._layout = layout
        self._rank = rank
        self._num_blocks = num_blocks
        self._recorder = recorder
        self._layerwise = "off" if microbatches else layerwise
        self._microbatches = microbatches
        self._any_tp = any_tp
        self._pages: dict[str, list[Pages]] = {}
        """Of each layer, run by run."""
        self._device: Device | None = None
        self._timer: StepTimer | None = None
        self._arena: Arena | None = None
        self._pipeline = LayerPipeline()
        self._hooks = LayerHooks()
        self._report = WorkerReport()
        self._finished_recving: set[str] = set()
        self._saves = _StepSaves([], [])
        self._saving = threading.Lock()
        self._save_s = 0.0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Adopt the engine's pages. Raises `UnsupportedModelError` on a geometry mismatch.

        ConfigError where the pages cannot be used by other TP sizes though they should.
        """
        layers = self._layout.model.stored_layers
        if layers:
            self._device = device_of(kv_caches[layers[0].layer])
            self._timer = StepTimer(self._device)
        for spec in layers:
            assert self._device is not None
            view = page_view(spec, kv_caches[spec.layer], self._num_blocks)
            if self._any_tp:
                check_cut_by_heads(spec, view)
            runs = self._layout.page_runs(spec, self._rank)
            self._pages[spec.layer] = [
                self._device.pages(spec, part) for part in run_views(spec, view, runs)
            ]

    def begin_step(self, meta: StepMetadata) -> None:
        """The first hook of every step: `start_loads` comes after a forward without loads."""
        self._hooks.begin_step()
        self._early_saves(meta)
        if self._timer and meta.timed_as is not None:
            self._timer.begin(meta.timed_as)
            self._report.ran = meta.timed_as

    def _early_saves(self, meta: StepMetadata) -> None:
        """Copy pages of finished requests before anything may overwrite them."""
        if not meta.early_saves:
            return
        self._device_().after_forward_so_far()
        for save in meta.early_saves:
            for layer, copies in plan_saves(self._layout, self._rank, save.copy).items():
                self._save_layer(meta, layer, copies)
            self._report.saved.update(save.save_ids)
        self._device_().before_forward_goes_on()

    def start_loads(self, meta: StepMetadata, *, hooks_called: bool = True) -> None:
        """Before the forward (or instead of one): load, or start loading ahead of it.

        `hooks_called`: the forward will ask for layers, as far as they ask at all.
        """
        if not meta.loads:
            return
        started = time.perf_counter()
        assert self._timer is not None
        go_on = self._timer.waiting()
        self._device_().after_forward_so_far()
        sync = [load for load in meta.loads if not load.parked]
        for load in meta.loads:
            if load.parked:
                self._run_now(meta, plan_loads(self._layout, self._rank, load.copy))
                self._finished_recving.add(load.request_id)
        self._start_layerwise(meta, sync, hooks_called)
        go_on()
        self._report.loaded.update(load.request_id for load in meta.loads)
        self._recorder.observe("heterocache_load_seconds", time.perf_counter() - started)

    def start_replays(
        self,
        meta: StepMetadata,
        slot_mapping: Mapping[str, torch.Tensor],
        attention: Mapping[str, Any] | None,
    ) -> None:
        """Before the forward: clear and protect the pages of replays (see `slot_masks`)."""
        layers = self._layout.model.stored_layers
        if meta.cleared:
            self._device_().after_forward_so_far()
            for spec in layers:
                if blocks := meta.cleared.get(spec.group):
                    for pages in self._pages[spec.layer]:
                        pages.clear(np.array(blocks, dtype=np.int64))
            self._device_().before_forward_goes_on()
        if meta.protected:
            slot_masks.protect(layers, meta.protected, slot_mapping, attention)

    def layer_wanted(self, layer: str) -> None:
        """The forward is about to read this layer's pages."""
        self._hooks.on_asked(layer)
        if self._pipeline.active:
            assert self._timer is not None
            go_on = self._timer.waiting()
            self._pipeline.ensure(layer)
            go_on()

    def layer_written(self, meta: StepMetadata, layer: str) -> None:
        """The forward has written this layer's pages for this step.

        If it says so twice, the first time was too early: the pages are copied again.
        """
        if not meta.saves or self._microbatches:
            return
        with self._saving:
            self._plan_saves(meta)
            started = time.perf_counter()
            for copies in self._saves.plans:
                if layer in copies:
                    self._device_().after_forward_so_far()
                    self._save_layer(meta, layer, copies[layer])
            self._saves.copied.add(layer)
            self._save_s += time.perf_counter() - started

    def end_step(self, meta: StepMetadata) -> None:
        """After the forward: everything left over, then the step's copies are over."""
        self._pipeline.drain()
        if self._timer:
            self._timer.end()
        if meta.saves:
            self._plan_saves(meta)
            self._finish_saves(meta)
        if meta.saves or meta.loads or meta.early_saves:
            self._device_().finish()

    def take_finished_recving(self) -> set[str]:
        """Requests whose parked load has ended."""
        finished, self._finished_recving = self._finished_recving, set()
        return finished

    def take_report(self) -> WorkerReport | None:
        """What this rank finished since the last call."""
        if self._timer:
            self._report.timings = self._timer.take()
        told = self._report
        if not (told.saved or told.loaded or told.timings or told.ran is not None):
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Stop the loading thread and let go of the arena."""
        self._pipeline.close()
        if self._arena is not None:
            self._device_().unpin()
            arena, self._arena = self._arena, None
            arena.close()

    def _device_(self) -> Device:
        assert self._device is not None, "register_kv_caches was not called"
        return self._device

    def _arena_view(self, meta: StepMetadata) -> ByteArray:
        if self._arena is None:
            assert meta.arena is not None, "the first step's metadata carries the arena"
            self._arena = Arena.attach(meta.arena)
            self._device_().pin(self._arena.view)
        return self._arena.view

    def _start_layerwise(self, meta: StepMetadata, loads: list[Load], hooks_called: bool) -> None:
        overlap = hooks_called and (
            self._layerwise == "on"
            or (
                self._layerwise == "auto"
                and _total_bytes(self._layout, loads) >= OVERLAP_FROM_BYTES
            )
        )
        before: list[LayerCopies] = []
        beside: list[LayerCopies] = []
        for load in loads:
            if overlap:
                first, rest = plan_layerwise(
                    self._layout, self._rank, load.copy, load.resume_tokens
                )
                before.append(first)
                beside.append(rest)
            else:
                before.append(plan_loads(self._layout, self._rank, load.copy))
        later: list[str] = []
        for spec in self._layout.model.stored_layers:
            if spec.layer in self._hooks:
                later.append(spec.layer)
                self._load_layer(meta, spec.layer, before)
            else:
                self._load_layer(meta, spec.layer, before + beside)
        self._device_().before_forward_goes_on()
        if beside:
            jobs = [(layer, self._load_job(meta, layer, beside)) for layer in later]
            self._pipeline.start(jobs, overlap=self._device_().overlaps_by_thread)

    def _load_job(self, meta: StepMetadata, layer: str, copies: list[LayerCopies]) -> Job:
        """What makes the layer's pages complete, for the pipeline to run."""
        device = self._device_()
        if device.overlaps_by_thread:
            return lambda: self._load_layer(meta, layer, copies)
        self._load_layer(meta, layer, copies)
        return device.mark()

    def _load_layer(self, meta: StepMetadata, layer: str, plans: list[LayerCopies]) -> None:
        arena = self._arena_view(meta)
        assert self._timer is not None
        end = self._timer.copying()
        for plan in plans:
            for rows, block_ids in plan.get(layer, ()):
                self._pages[layer][rows.run].load(arena, rows, block_ids)
        end()

    def _run_now(self, meta: StepMetadata, plan: LayerCopies) -> None:
        for layer in plan:
            self._load_layer(meta, layer, [plan])

    def _plan_saves(self, meta: StepMetadata) -> None:
        if self._saves.saves is not meta.saves:
            plans = [plan_saves(self._layout, self._rank, save.copy) for save in meta.saves]
            self._saves = _StepSaves(meta.saves, plans)

    def _finish_saves(self, meta: StepMetadata) -> None:
        started = time.perf_counter()
        self._device_().after_forward_so_far()
        for copies in self._saves.plans:
            for layer, layer_copies in copies.items():
                if layer not in self._saves.copied:
                    self._save_layer(meta, layer, layer_copies)
        for save in meta.saves:
            self._report.saved.update(save.save_ids)
        self._saves = _StepSaves([], [])
        self._save_s += time.perf_counter() - started
        self._recorder.observe("heterocache_save_seconds", self._save_s)
        self._save_s = 0.0

    def _save_layer(
        self, meta: StepMetadata, layer: str, copies: list[tuple[ArenaRows, IndexArray]]
    ) -> None:
        arena = self._arena_view(meta)
        for rows, block_ids in copies:
            self._pages[layer][rows.run].save(arena, rows, block_ids)


def _total_bytes(layout: ArtifactLayout, loads: list[Load]) -> int:
    return sum(_copy_bytes(layout, load.copy) for load in loads)


def _copy_bytes(layout: ArtifactLayout, copy: PageCopy) -> int:
    return sum(layout.rank_bytes(a.state_type, a.start, a.end) for a in copy.artifacts)
