"""Record what a running engine does for some seconds: steps, loads, saves, transfers, requests.

Nothing is recorded, and next to nothing is spent, until a command asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from hetero_connector.engine.messages import Load, Save, StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.commands import Arguments, Result, Taker
from hetero_connector.engine.scheduler.reports import Reports
from hetero_connector.errors import CommandError
from hetero_connector.timeline import Activity

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_MAX_SECONDS = 60.0
_MAX_ACTIVITIES = 200_000
"""About a minute of an engine that steps a thousand times a second."""


class Transfers(Protocol):
    """The store, as the recorder uses it."""

    def watch_transfers(
        self, on_end: Callable[[str, float, float], None]
    ) -> AbstractContextManager[None]:
        """Have `on_end(device, began_s, ended_s)` called for each batch that ends."""
        ...


class EngineRecorder:
    """Records the engine. Threads of clients call `record`; the rest say who calls them."""

    def __init__(self, reports: Reports, transfers: Transfers, clock: Callable[[], float]) -> None:
        self._reports = reports
        self._transfers = transfers
        self._clock = clock
        self._recording = threading.Lock()
        """Held during a recording."""
        self._closed = threading.Event()
        self._is_on = False
        self._found: list[Activity] = []
        self._ordered = self._reported = 0
        """Steps since the start. With async scheduling one is ordered before another is reported.
        """
        self._reported_s = 0.0
        self._steps: dict[int, Activity] = {}
        self._loads: dict[int, tuple[float, Load]] = {}
        self._saves: dict[int, tuple[float, Save]] = {}
        """Orders that are not reported, by id, with their times."""

    def record(self, arguments: Arguments) -> Result:
        """Record for `seconds`; return the activities, and the reports of requests that ended.

        Raises CommandError if another client records.
        """
        take = Taker(arguments, "seconds")
        seconds = take.seconds("seconds", 5.0)
        if seconds > _MAX_SECONDS:
            raise CommandError(f"seconds must be at most {_MAX_SECONDS:.0f}")
        if not self._recording.acquire(blocking=False):
            raise CommandError("the engine is being recorded already: repeat the command later")
        try:
            began = time.time()
            with self._reports.keep_all(), self._transfers.watch_transfers(self._add):
                self._forget()
                self._is_on = True
                self._closed.wait(seconds)
                self._is_on = False
            epoch_s = time.time() - self._clock()
            found = self._found[:_MAX_ACTIVITIES]
            requests = (x for x in self._reports.newest() if x.ended_at >= began)
            return {
                "activities": [
                    x._replace(begin_s=x.begin_s + epoch_s, end_s=x.end_s + epoch_s)._asdict()
                    for x in found
                ],
                "requests": [x.as_json() for x in requests],
                "is_complete": len(self._found) < _MAX_ACTIVITIES,
            }
        finally:
            self._is_on = False
            self._forget()
            self._recording.release()

    def on_step(self, output: SchedulerOutput, meta: StepMetadata) -> None:
        """Note what a step was ordered to do. Belongs to the scheduler's thread."""
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._ordered += 1
        if not self._is_on:
            return
        now_s = self._clock()
        if scheduled:
            details = {"requests": len(scheduled), "tokens": output.total_num_scheduled_tokens}
            self._steps[self._ordered] = Activity("engine", "step", now_s, now_s, details)
        self._loads |= {x.load_id: (now_s, x) for x in meta.loads}
        self._saves |= {x.save_ids[0]: (now_s, x) for x in (*meta.saves, *meta.early_saves)}

    def on_report(self, report: WorkerReport) -> None:
        """Note what the workers have done since. Belongs to the scheduler's thread."""
        if self._reported < self._ordered:
            self._reported += 1
        if not self._is_on:
            return
        now_s = self._clock()
        if (step := self._steps.pop(self._reported, None)) is not None:
            begin_s = max(step.begin_s, self._reported_s)
            self._append(step._replace(begin_s=begin_s, end_s=now_s))
        self._reported_s = now_s
        for load_id in report.loaded:
            if (ordered := self._loads.pop(load_id, None)) is not None:
                begin_s, load = ordered
                first, end = min(x.start for x in load.spans), max(x.end for x in load.spans)
                details = {"request": load.request_id, "from_token": first, "to_token": end}
                name = "load, parked" if load.parked else "load"
                self._append(Activity("loads from DRAM", name, begin_s, now_s, details))
        for save_id in (*report.saved, *report.unsaved):
            if (saving := self._saves.pop(save_id, None)) is not None:
                begin_s, save = saving
                details = {"artifacts": len(save.copy.artifacts)}
                self._append(Activity("saves to DRAM", "save", begin_s, now_s, details))

    def close(self) -> None:
        """End a recording now. Any thread may call this."""
        self._closed.set()

    def _forget(self) -> None:
        self._found, self._steps, self._loads, self._saves = [], {}, {}, {}

    def _add(self, device: str, began_s: float, ended_s: float) -> None:
        """Note a transfer. Called by the I/O thread."""
        self._append(Activity(device, "transfer", began_s, ended_s))

    def _append(self, activity: Activity) -> None:
        if len(self._found) < _MAX_ACTIVITIES:
            self._found.append(activity)
