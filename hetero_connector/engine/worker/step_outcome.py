"""Collect the results of a worker's loads and saves, for the scheduler side and for vLLM.

A failed save is a later cache miss. A failed load leaves pages without state that vLLM counts as
computed: it is reported to vLLM, and the worker loads and saves nothing from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import Load, LostLoad, Save, StepMetadata, WorkerReport
from hetero_connector.engine.worker.devices import SaveLayers
from hetero_connector.engine.worker.step_timer import StepTimer
from hetero_connector.errors import LoadLostError, StoreError
from hetero_connector.metrics import Recorder


class WorkerStep:
    """The orders of one step and their progress."""

    def __init__(self, meta: StepMetadata) -> None:
        self.meta = meta
        self.begun = self.loading = self.loaded = self.ended = False
        self.save_layers: SaveLayers | None = None
        """Saves the pages of some layers; None until a layer is saved."""
        self.written: dict[str, None] = {}
        """Layers that the forward has written since they were last saved, in order."""
        self.saved: set[str] = set()
        """Layers that have been saved while the forward ran."""
        self.broken = False
        """True if a copy of the saves has failed."""
        self.parked = False
        """True if its parked loads have been started."""

    @property
    def loads(self) -> list[Load]:
        """The step's loads, without parked ones under way: those end by themselves."""
        return [load for load in self.meta.loads if not (load.parked and self.parked)]


class StepOutcome:
    """Collects one worker's results until they are reported."""

    def __init__(self, recorder: Recorder, *, recovers: bool) -> None:
        self._errors = HookErrors(recorder)
        self._takes_blocks = recovers
        """True if vLLM takes a report of blocks that were not loaded."""
        self._report = WorkerReport()
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self.broken = False
        """True once a load has failed."""

    def on_timed_step(self, step: int) -> None:
        """Report the step's number, because it is timed."""
        self._report.timed_step = step

    def on_hidden_share(self, share: float) -> None:
        """Report the share of a load's bytes that is copied while the forward runs."""
        self._report.hidden_share = share

    def on_loads_ended(self, loads: Iterable[Load]) -> None:
        """Report loads that were made or lost: their artifacts may leave DRAM."""
        self._report.loaded.update(load.load_id for load in loads)

    def on_parked_load(self, load: Load) -> None:
        """Report to vLLM that a load between steps has ended."""
        self._finished_recving.add(load.request_id)

    def on_saves_ended(self, saves: Iterable[Save], *, copied: bool) -> None:
        """Report saves that were copied, or ended without a complete copy."""
        counter = self._report.saved if copied else self._report.unsaved
        counter.update(save_id for save in saves for save_id in save.save_ids)

    def on_lost_load(self, load: LostLoad) -> None:
        """Report to vLLM that tokens which it counts as computed were not loaded.

        Raises LoadLostError if vLLM has no way to take the report.
        """
        if load.parked:
            self._finished_recving.add(load.request_id)
            self._failed_recving.add(load.request_id)
        elif self._takes_blocks:
            self._invalid_blocks.update(filter(None, load.block_ids))
        else:
            raise LoadLostError(load.request_id)

    @contextmanager
    def loading(self, loads: Iterable[Load]) -> Iterator[None]:
        """Report the step's loads as lost if an error is raised inside."""
        try:
            yield
        except Exception as error:
            self._errors.count("load", error)
            self.broken = self._report.broken = True
            for load in loads:
                ids = [i for blocks in load.blocks.values() for i in blocks.ids]
                self.on_lost_load(LostLoad(load.request_id, ids, load.parked))

    def check_loads(self) -> None:
        """Raise StoreError if an earlier load has failed."""
        if self.broken:
            raise StoreError("an earlier load has failed")

    @contextmanager
    def saving(self, step: WorkerStep) -> Iterator[None]:
        """Give the step's saves up if an error is raised inside."""
        try:
            yield
        except Exception as error:
            self._errors.count("save", error)
            step.broken = True

    def take_transfers(self) -> tuple[set[str], set[str]]:
        """Take the requests whose parked load has ended, and those of them whose load failed."""
        finished, self._finished_recving = self._finished_recving, set()
        failed, self._failed_recving = self._failed_recving, set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        """Take the blocks of running requests that were not loaded."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_report(self, timer: StepTimer | None) -> WorkerReport | None:
        """Take the report since the last call; None if there is nothing to report."""
        if timer:
            self._report.timings = timer.take()
        if self._report == WorkerReport():
            return None
        report, self._report = self._report, WorkerReport()
        return report
