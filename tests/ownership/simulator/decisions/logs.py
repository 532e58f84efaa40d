"""Logs of decisions as a router writes them, without a router."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import msgspec

from ownership.decisions.records import DecisionRecord, FleetRecord
from ownership.scheduling import FleetView, Step, WorkerLoad, scheduling_policy
from tests.ownership.scheduling.fleets import fleet_of, worker


class Log:
    """A fleet of two workers, at which each request arrives when both have these loads."""

    def __init__(self, policy: str = "colocated", **loads: WorkerLoad) -> None:
        names = sorted({"a", "b", *loads})
        self.fleet: FleetView = fleet_of(*(worker(x, loads.get(x)) for x in names))
        self._policy, self._name = policy, policy
        self._told = FleetRecord.of(self.fleet)
        self.lines = [msgspec.json.encode(self._told)]

    def decide(self, step: Step, time_s: float = 0.0, **came: object) -> DecisionRecord:
        """Add a decision, which took as long as predicted if `came` says nothing else."""
        decision = scheduling_policy(self._policy, Random(0)).decide(step, self.fleet)
        record = DecisionRecord.of(decision, decision.placement, self._policy, "chat", time_s)
        record.note_fleet(self.fleet, self._told.fleet)
        observed = {"first_byte_s": record.predicted_ttft_s, "events": 10, "total_s": 1.0}
        for name, value in {**observed, **came}.items():
            setattr(record, name, value)
        self.lines.append(msgspec.json.encode(record))
        return record

    def write(self, path: Path) -> Path:
        path.write_bytes(b"\n".join(self.lines) + b"\n")
        return path


def changed(line: bytes, **fields: object) -> bytes:
    """Return a line with other fields; None removes one."""
    found: Mapping[str, object] = msgspec.json.decode(line)
    kept = {k: v for k, v in {**found, **fields}.items() if k not in fields or v is not None}
    return msgspec.json.encode(kept)
