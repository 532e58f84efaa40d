"""Collect what became of a worker's loads and saves, for the scheduler side and for vLLM.

A save that goes wrong is a miss. A load that goes wrong leaves pages empty that vLLM counts as
computed: vLLM is told, by the means it has, and the worker loads and saves nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import Load, LostLoad, Save, StepMetadata, WorkerReport
from hetero_connector.engine.worker.copy_plan import LayerCopies
from hetero_connector.engine.worker.step_timer import StepTimer
from hetero_connector.errors import LoadLostError, StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.spec import ModelSpec


class WorkerStep:
    """What one step was told to do, and how far that is."""

    def __init__(self, meta: StepMetadata) -> None:
        self.meta = meta
        self.begun = self.loading = self.ended = False
        self.plans: list[LayerCopies] | None = None
        """Of the saves, once the first of them is due."""
        self.copied: set[str] = set()
        """Layers whose hook has copied them."""
        self.broken = False
        """Something of the saves was not copied."""


class StepOutcome:
    """One worker's, from report to report."""

    def __init__(self, recorder: Recorder, model: ModelSpec) -> None:
        self._errors = HookErrors(recorder)
        self._one_group = len({layer.group for layer in model.layers}) == 1
        self._report = WorkerReport()
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self.broken = False
        """A load went wrong."""

    def on_timed(self, step: int) -> None:
        """The step that begins is to be timed."""
        self._report.ran = step

    def on_loads(self, loads: Iterable[Load]) -> None:
        """The step's loads have been made or lost: their artifacts may leave DRAM at its end."""
        self._report.loaded.update(load.request_id for load in loads)

    def on_parked(self, load: Load) -> None:
        """A load between steps was made."""
        self._finished_recving.add(load.request_id)

    def on_saves(self, saves: Iterable[Save], *, copied: bool) -> None:
        """The step's saves have been made, or are over without."""
        told = self._report.saved if copied else self._report.unsaved
        told.update(save_id for save in saves for save_id in save.save_ids)

    def lose(self, load: LostLoad) -> None:
        """Tell vLLM that it counts tokens that were not loaded.

        Raises `LoadLostError` where it has no way to be told.
        """
        if load.parked:
            self._finished_recving.add(load.request_id)
            self._failed_recving.add(load.request_id)
        elif self._one_group:
            self._invalid_blocks.update(filter(None, load.block_ids))
        else:
            raise LoadLostError(load.request_id)

    @contextmanager
    def loading(self, loads: Iterable[Load]) -> Iterator[None]:
        """Lose the step's loads if an error comes up inside."""
        try:
            yield
        except Exception as error:
            self._errors.count("load", error)
            self.broken = self._report.broken = True
            for load in loads:
                ids = [i for blocks in load.blocks.values() for i in blocks.ids]
                self.lose(LostLoad(load.request_id, ids, load.parked))

    def check_loads(self) -> None:
        """Raise StoreError if loads went wrong before."""
        if self.broken:
            raise StoreError("an earlier load went wrong")

    @contextmanager
    def saving(self, step: WorkerStep) -> Iterator[None]:
        """Lose the step's saves if an error comes up inside."""
        try:
            yield
        except Exception as error:
            self._errors.count("save", error)
            step.broken = True

    def take_transfers(self) -> tuple[set[str], set[str]]:
        """Requests whose parked load has ended, and those of them that hold nothing."""
        finished, self._finished_recving = self._finished_recving, set()
        failed, self._failed_recving = self._failed_recving, set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of requests that run, whose tokens were not loaded."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_report(self, timer: StepTimer | None) -> WorkerReport | None:
        """What this rank finished since the last call."""
        if timer:
            self._report.timings = timer.take()
        if self._report == WorkerReport():
            return None
        report, self._report = self._report, WorkerReport()
        return report
