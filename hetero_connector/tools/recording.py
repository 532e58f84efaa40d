"""`heterocache timeline`: makes a timeline of what recorded engines did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_connector.engine.scheduler.request_report import RequestReport
from hetero_connector.timeline import Activity, Timeline

_DETAILS = (
    *("prompt_tokens", "stored_tokens", "local_tokens", "restored_tokens", "computed_tokens"),
    *("boundary", "choice", "reason", "predicted_s", "observed_s", "computing_s", "finish"),
)


def timeline_of(recordings: Mapping[str, Mapping[str, Any]]) -> Timeline:
    """Return the timeline of what engines answered, by their name. Errors are left out."""
    timeline = Timeline()
    for engine, recorded in recordings.items():
        for report in recorded.get("requests", ()):
            timeline.add(engine, _request(RequestReport(**report)))
        for activity in recorded.get("activities", ()):
            timeline.add(engine, Activity(**activity))
    return timeline


def _request(report: RequestReport) -> Activity:
    phases = report.phases()
    begin_s = min((x.begin_s for x in phases), default=0.0)
    end_s = max((x.end_s for x in phases), default=0.0)
    return Activity(
        "requests",
        report.request_id,
        report.time + begin_s,
        report.time + end_s,
        {name: getattr(report, name) for name in _DETAILS},
        [(x.name, report.time + x.begin_s, report.time + x.end_s) for x in phases],
    )
