"""Reports of ended requests: to the client that asked, to a log, and as spans.

The log is off by default: it is the logger `vllm.heterocache.requests` at the level DEBUG, with one
line of JSON a request. Log and spans are written off the scheduler's thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.scheduler.background_thread import BackgroundThread
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.request_report import RequestReport, is_report_wanted
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.spans import SpanWriter
from hetero_connector.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.heterocache.requests")


class Finished(NamedTuple):
    """The result of a request's end."""

    handoff_tokens: int
    """Tokens that a decoder will find stored after a handoff; 0: none."""
    report: RequestReport | None
    """For the client, if it asked for one."""


class Reports:
    """Makes the report of each ended request that anyone wants. Used on the scheduler's thread.

    A thread of its own writes log and spans. If it cannot follow, reports are dropped and counted.
    """

    def __init__(self, predictions: Predictions, recorder: Recorder, errors: HookErrors) -> None:
        self.spans: SpanWriter | None = None
        self._predictions = predictions
        self._recorder = recorder
        self._errors = errors
        self._thread = BackgroundThread("heterocache-reports")
        self._keeps_all = False

    def on_finished(self, request: Request, tracker: RequestTracker | None) -> RequestReport | None:
        """Have the end of a request written; return its report if its client asked for one."""
        is_wanted = is_report_wanted(request)
        is_written = self.spans is not None or log.isEnabledFor(logging.DEBUG)
        if not (is_wanted or is_written or self._keeps_all):
            return None
        try:
            report = self._predictions.finish(request, tracker)
            if is_written:
                write = partial(self._write, report, request.trace_headers)
                if self._thread.submit(write) is None:
                    self._recorder.add("heterocache_reports_dropped")
        except Exception as error:  # its end is saved all the same
            self._errors.count("report", error)
            return None
        return report if is_wanted else None

    @contextmanager
    def keep_all(self) -> Iterator[None]:
        """Let the reports of all requests say how they ended. Belongs to one thread at a time."""
        self._keeps_all = True
        try:
            yield
        finally:
            self._keeps_all = False

    def newest(self) -> list[RequestReport]:
        """Return the reports of the newest requests. Any thread may ask."""
        return self._predictions.recent()

    def close(self) -> None:
        """End the thread after the reports that wait. Does not wait for it."""
        self._thread.close()

    def _write(self, report: RequestReport, trace_headers: Mapping[str, str] | None) -> None:
        try:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s", json.dumps(report.as_json()))
            if self.spans is not None:
                self.spans.write(report, trace_headers)
        except Exception as error:
            self._errors.count("report", error)
