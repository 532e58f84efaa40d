"""`WorkerSide`: copies one rank's pages to and from the arena, as the scheduler side orders.

Each layer is loaded just before the forward reaches it, and saved just after. Layers that never
call vLLM's layer hooks (recurrent layers, a model's auxiliary caches) are loaded before the forward
and saved after it. So are all layers if the forward runs as microbatches, each of which calls every
hook.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    Load,
    StepMetadata,
    WorkerReport,
)
from hetero_connector.engine.worker import slot_masks
from hetero_connector.engine.worker.copy_plan import Copies, CopyPlanner, size_bytes
from hetero_connector.engine.worker.device_choice import device_of
from hetero_connector.engine.worker.devices import Device, Wait
from hetero_connector.engine.worker.layer_hooks import LayerHooks
from hetero_connector.engine.worker.layer_pipeline import LayerPipeline
from hetero_connector.engine.worker.pages import check_cut_by_heads, page_view
from hetero_connector.engine.worker.step_outcome import StepOutcome, WorkerStep
from hetero_connector.engine.worker.step_timer import StepTimer
from hetero_connector.errors import LoadLostError, StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.planner.profile import CopyEngines
from hetero_connector.store.arena import Arena, ArenaHandle

OVERLAP_FROM_BYTES = 4 << 20
"""Smaller loads of a step end before a second thread would have begun."""


class WorkerSide:
    """Executes the orders of `StepMetadata` on one rank's pages."""

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
        recovers: bool = True,
        copy_engines: CopyEngines | None = None,
    ) -> None:
        """`layout`: of the layers of this rank's pipeline stage.

        `any_tp`: engines of other TP sizes use the state that this one stores.

        `recovers`: vLLM goes on without blocks that it is told were not loaded.

        `microbatches`: a step may run as several forwards at a time, so a layer hook does not mean
        that a layer's pages are complete.

        `copy_engines`: the pages that a GPU's copy engines move; None: none.
        """
        self._layout = layout
        self._rank = rank
        self._num_blocks = num_blocks
        self._recorder = recorder
        self._layerwise = "off" if microbatches else layerwise
        self._microbatches = microbatches
        self._any_tp = any_tp
        self._copy_engines = copy_engines
        self._layers = dict.fromkeys(x.layer for x in layout.model.stored_layers)
        """The layers with state to store, in order."""
        self._registered: dict[str, tuple[torch.Tensor, int]] = {}
        """Each layer's pages, and where they were when they were registered."""
        self._device: Device | None = None
        self._timer: StepTimer | None = None
        self._arena: Arena | None = None
        self._planner: CopyPlanner | None = None
        self._pipeline = LayerPipeline()
        self._timed_waits: set[str] = set()
        """The first layer of each batch of this step's layer-wise loads."""
        self._hooks = LayerHooks()
        self.outcome = StepOutcome(recorder, recovers=recovers)
        self._step: WorkerStep | None = None
        self._under_way: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        """For copies that a device has not ended: a test if it has, and what reports them."""
        self._saving = threading.Lock()
        self._save_s = 0.0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's pages.

        Raises UnsupportedModelError if their geometry is not as expected, ConfigError if other TP
        sizes should use them but cannot.
        """
        layers = self._layout.model.stored_layers
        stored = {x.layer: kv_caches[x.layer] for x in layers}
        self._registered = {name: (cache, cache.data_ptr()) for name, cache in stored.items()}
        if layers:
            self._device = device_of(stored, self._copy_engines)
            self._timer = StepTimer(self._device, self._recorder)
        for spec in layers:
            assert self._device is not None
            view = page_view(spec, kv_caches[spec.layer], self._num_blocks)
            if self._any_tp:
                check_cut_by_heads(spec, view)
            self._device.add_layer(spec, view, self._layout.page_runs(spec, self._rank))
        if self._device is not None:
            self._device.warm_up()

    @property
    def is_attached(self) -> bool:
        """True if copies can be made, or there are none to make."""
        return self._arena is not None or self._device is None

    def attach(self, handle: ArenaHandle, layout: ArtifactLayout) -> None:
        """Map and pin the arena, once. Pinning takes seconds, so it is done at start if possible.

        Other connectors may have moved the pages since they were registered: LMCache moves those of
        a CPU to memory that it shares with its server.

        `layout`: of the layers of all pipeline stages, which an artifact has. Raises StoreError if
        the arena cannot be mapped or pinned.
        """
        if self._arena is None and self._device is not None:
            if any(cache.data_ptr() != was for cache, was in self._registered.values()):
                self.register({name: cache for name, (cache, _) in self._registered.items()})
            arena = Arena.attach(handle)
            try:
                largest = max(layout.max_bytes.values(), default=0)
                self._device.attach(arena.view, largest)
            except BaseException:
                arena.close()
                raise
            self._arena = arena
            self._planner = CopyPlanner(layout, self._rank, self._layers)

    def begin_step(self, meta: StepMetadata) -> None:
        """Begin a step with the saves of finished requests. This is the first hook of every step.

        (In a step without loads vLLM calls `start_loads` after the forward.)
        """
        step = self._enter_step(meta)
        if step.begun:
            return
        step.begun = True
        if self._hooks.begin_step() and self._layerwise != "off":
            self.outcome.on_hidden_share(self._hidden_share())
        if meta.early_saves:
            with self._timing_saves(), self.outcome.saving(step):
                self._copy_early_saves(meta)
        if self._timer and meta.timed_as is not None:
            self._timer.begin(meta.timed_as)
            self.outcome.on_timed_step(meta.timed_as)

    def start_loads(self, meta: StepMetadata, *, hooks_called: bool = True) -> None:
        """Load before the forward, or in a step without one.

        `hooks_called`: the forward will call the layer hooks.
        """
        step = self._enter_step(meta)
        if step.loading:
            return
        step.loading = True
        if hooks_called:
            self._hooks.expect()
        for lost in meta.lost:
            self.outcome.on_lost_load(lost)
        if not meta.loads:
            return
        with self.outcome.loading(meta.loads):
            self.outcome.check_loads()
            assert self._timer is not None
            end_wait = self._timer.start_wait()
            try:
                self._start_parked(step)
                self._start_layerwise([x for x in meta.loads if not x.parked], hooks_called)
            except BaseException:
                self._get_device().finish()  # the pages of lost loads are about to be used
                raise
            end_wait()

    def protect_replays(
        self,
        meta: StepMetadata,
        slot_mapping: Mapping[str, torch.Tensor],
        attention: Mapping[str, Any] | None,
    ) -> None:
        """Clear and protect the pages of replays, before the forward (see `slot_masks`)."""
        step = self._enter_step(meta)
        with self.outcome.loading(step.loads):
            if meta.cleared:
                self._get_device().clear(meta.cleared)
            if meta.protected:
                slot_masks.protect(
                    self._layout.model.stored_layers, meta.protected, slot_mapping, attention
                )

    def ensure_loaded(self, layer: str) -> None:
        """Return when the layer's pages are loaded: the forward is about to read them."""
        self._hooks.on_called(layer)
        if self._pipeline.active and self._step is not None:
            with self.outcome.loading(self._step.loads):
                if layer not in self._timed_waits:  # the forward waits for its batch already
                    self._pipeline.ensure(layer)
                    return
                assert self._timer is not None
                end_wait = self._timer.start_wait()
                self._pipeline.ensure(layer)
                end_wait()

    def on_layer_written(self, meta: StepMetadata, layer: str) -> None:
        """Save the pages of a layer that the forward has written in this step.

        A second call for a layer means that the first was too early: the pages are copied again.
        """
        if not meta.saves or self._microbatches:
            return
        with self._saving:
            step = self._enter_step(meta)
            if step.ended or step.broken or layer not in self._layers:
                return
            step.written[layer] = None
            if len(step.written) >= self._get_device().layers_per_copy:
                with self._timing_saves(), self.outcome.saving(step):
                    self._save_layers(step, list(step.written))
                    step.saved.update(step.written)
                    step.written.clear()

    def take_transfers(self) -> tuple[set[str], set[str]]:
        """Take the requests whose parked load has ended, and those of them whose load failed.

        vLLM asks after the forward. With a drafter it has not ended the step yet, but takes the
        step's errors now: later it would have answered. So no load may be left to fail.
        """
        if self._step is not None and not self._step.ended:
            self._finish_loads(self._step)
        self._report_ended_copies()
        return self.outcome.take_transfers()

    def end_step(self, meta: StepMetadata) -> None:
        """End the step after the forward: finish its copies.

        Raises LoadLostError if a load was lost and vLLM has no way to take the report.
        """
        step = self._enter_step(meta)
        if not step.ended:
            self._end(step)

    def finish_copies(self) -> None:
        """Return when no copy touches the pages any more. Called between steps."""
        if self._device is not None:
            self._device.finish()

    def take_report(self) -> WorkerReport | None:
        self._report_ended_copies()
        return self.outcome.take_report(self._timer)

    def close(self) -> None:
        """Stop the loading thread and release the arena."""
        self._pipeline.close()
        if self._arena is not None:
            self._get_device().detach()
            arena, self._arena = self._arena, None
            arena.close()

    def _get_device(self) -> Device:
        assert self._device is not None, "register_kv_caches was not called"
        return self._device

    def _get_planner(self) -> CopyPlanner:
        assert self._planner is not None, "this worker has found no arena"
        return self._planner

    def _enter_step(self, meta: StepMetadata) -> WorkerStep:
        """Return the step of `meta`. If it is new, end the one before, without its copies."""
        step = self._step
        if step is None or step.meta is not meta:
            if step is not None and not step.ended:
                step.broken = True
                self._end(step)
            step = self._step = WorkerStep(meta)
        return step

    def _end(self, step: WorkerStep) -> None:
        step.ended = True
        meta = step.meta
        self._finish_loads(step)
        with self.outcome.saving(step):
            if self._timer:
                self._timer.end()
            if meta.saves and not step.broken:
                with self._timing_saves():
                    self._save_remaining_layers(step)
        if self._save_s:
            self._recorder.observe("heterocache_save_seconds", self._save_s)
            self._save_s = 0.0
        copied = not (step.broken or self.outcome.broken)
        early_copied = copied and step.begun
        loads = step.loads

        def report() -> None:
            self.outcome.on_loads_ended(loads)
            self.outcome.on_saves_ended(meta.early_saves, copied=early_copied)
            self.outcome.on_saves_ended(meta.saves, copied=copied)

        if meta.saves or loads or meta.early_saves:
            # Also after an error: memory that is reported must not be in use.
            self._under_way.append((self._get_device().fence(), report))

    def _report_ended_copies(self) -> None:
        for copies in list(self._under_way):
            has_ended, report = copies
            try:
                if not has_ended():
                    continue
            except RuntimeError as error:  # the device is lost, and with it every load under way
                raise LoadLostError.of_device(error) from error
            self._under_way.remove(copies)
            report()

    def _finish_loads(self, step: WorkerStep) -> None:
        """Run the loads that no layer has asked for, once; errors of the step's loads are known."""
        if step.loaded or not step.meta.loads:
            return
        step.loaded = True
        with self.outcome.loading(step.loads):
            self._pipeline.drain()
            if not step.loading:
                raise StoreError("the step ended without its loads")

    def _copy_early_saves(self, meta: StepMetadata) -> None:
        """Copy pages of finished requests before this step overwrites them."""
        copies = self._get_planner().plan_saves(save.copy for save in meta.early_saves)
        self._get_device().prepare_saves(copies)(list(self._layers))
        self._get_device().make_forward_wait_for_saves()

    def _hidden_share(self) -> float:
        """Return the share of a long prefix's bytes that is in layers with reliable hooks."""
        layers = self._layout.model.stored_layers
        by_layer = {x.layer: x.page_bytes / x.block_tokens for x in layers}
        hidden = sum(size for layer, size in by_layer.items() if layer in self._hooks)
        return hidden / sum(by_layer.values())

    def _start_parked(self, step: WorkerStep) -> None:
        """Load for requests that wait between steps. No forward waits for these copies."""
        loads = [load for load in step.meta.loads if load.parked]
        if not loads:
            return
        assert self._timer is not None
        copies = self._get_planner().plan_loads(loads)
        has_ended = self._get_device().load_parked(copies, self._timer.start_copies)

        def report() -> None:
            self.outcome.on_loads_ended(loads)
            for load in loads:
                self.outcome.on_parked_load(load)

        self._under_way.append((has_ended, report))
        step.parked = True

    def _start_layerwise(self, loads: list[Load], hooks_called: bool) -> None:
        device = self._get_device()
        is_auto = self._layerwise == "auto"
        is_large = is_auto and size_bytes(self._layout, loads) >= OVERLAP_FROM_BYTES
        overlap = hooks_called and (self._layerwise == "on" or is_large)
        overlapped: list[Copies] = []
        if overlap:
            before, overlapped = self._get_planner().plan_layerwise(loads)
        else:
            before = self._get_planner().plan_loads(loads)
        hooked = [x for x in self._layers if x in self._hooks]
        unhooked = [x for x in self._layers if x not in self._hooks]
        waits = self._start_copies(before, [list(self._layers)])
        waits += self._start_copies(overlapped, [unhooked])
        for wait in waits:
            wait()
        if overlapped:
            size = device.layers_per_copy
            batches = [hooked[i : i + size] for i in range(0, len(hooked), size)]
            waits = self._start_copies(overlapped, batches)
            jobs = [
                (layer, wait) for batch, wait in zip(batches, waits, strict=True) for layer in batch
            ]
            self._timed_waits = {batch[0] for batch in batches}
            self._pipeline.start(jobs, overlap=device.overlaps_by_thread)

    def _start_copies(
        self, copies: Sequence[Copies], batches: Sequence[Sequence[str]]
    ) -> list[Wait]:
        if not copies or not any(batches):
            return []
        assert self._timer is not None
        return self._get_device().load(copies, batches, self._timer.start_copies)

    def _save_layers(self, step: WorkerStep, layers: Sequence[str]) -> None:
        if step.save_layers is None:
            copies = self._get_planner().plan_saves(save.copy for save in step.meta.saves)
            step.save_layers = self._get_device().prepare_saves(copies)
        step.save_layers(layers)

    def _save_remaining_layers(self, step: WorkerStep) -> None:
        layers = [x for x in self._layers if x in step.written or x not in step.saved]
        self._save_layers(step, layers)
        self._get_device().make_forward_wait_for_saves()

    @contextmanager
    def _timing_saves(self) -> Iterator[None]:
        """Add the time inside to that of the step's saves."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._save_s += time.perf_counter() - started_s
