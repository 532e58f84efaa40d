"""The fleet as this process of the router sees it: one document, for the live page and for `curl`.

It is made on request, at most once a second for all viewers together, and only then workers are
asked for what they store. The page's files need no key, its data needs one of `api_keys`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetero_connector import __version__
from hetero_connector.live_page.feed import TOO_MANY, Feed, LiveResponse
from hetero_connector.live_page.page_files import page_files
from ownership.router.answer import refusal_response
from ownership.router.config import RouterConfig
from ownership.router.doors import Reason, Refusal
from ownership.router.history import Decision, History
from ownership.router.metrics import RouterMetrics
from ownership.router.proxy import Proxy
from ownership.router.requests import NO_KEY, has_key
from ownership.router.shared_ledger import SharedLedger
from ownership.router.stored import StoredState, StoredStates
from ownership.router.workers import Worker, WorkerSet
from ownership.scheduling import Ledger

PATH = "/v1/heterocache/fleet"
FORMAT = 1
_FOLDER = Path(__file__).parent / "page"
_SESSIONS = 32
_COUNTED = ("requests", "refused", "retried", "cut", "left", "placements", "doubts", "prefills")


@dataclass(frozen=True)
class FleetState:
    """The parts of a router's process that the page shows. It changes none of them."""

    config: RouterConfig
    num_processes: int
    """The number of processes of this router, on one port."""
    started: float
    """Unix time."""
    workers: WorkerSet
    proxy: Proxy
    history: History
    metrics: RouterMetrics

    def snapshot(
        self, stored: Mapping[str, StoredState], now_s: float, unix_s: float
    ) -> dict[str, Any]:
        """Return the document. `stored`: what workers have told of their state, by name."""
        ledger = self.history.ledger
        per_owner = ledger.sessions.per_owner() if ledger is not None else {}
        decisions = self.history.decisions()
        return {
            "format": FORMAT,
            "now": unix_s,
            "router": {
                "version": __version__,
                "policy": self.config.policy_name,
                "process": os.getpid(),
                "processes": self.num_processes,
                "started": self.started,
            },
            "workers": [
                _worker(worker, ledger, per_owner, stored.get(worker.name), now_s)
                for worker in self.workers
            ],
            "queue": {"waiting": self.proxy.queued, "most": self.config.max_queued},
            "counts": {name: _rows(getattr(self.metrics, name)) for name in _COUNTED},
            "decisions": decisions,
            "copies": copies(decisions),
            "sessions": {
                "count": sum(per_owner.values()),
                "newest": self.history.sessions(_SESSIONS),
            },
            **_peers(ledger, now_s),
        }


class FleetDoors:
    """The routes of the page, its events, and the document."""

    def __init__(self, state: FleetState, stored: StoredStates) -> None:
        self._state, self._stored = state, stored
        self._feed = Feed(self._document)
        self.routes = [
            *(Route(path, file, methods=["GET"]) for path, file in page_files(_FOLDER).items()),
            Route(PATH, self._show, methods=["GET"]),
            Route(f"{PATH}/live", self._follow, methods=["GET"]),
        ]

    async def _document(self) -> bytes:
        stored = await self._stored.newest()
        document = self._state.snapshot(stored, time.monotonic(), time.time())
        return msgspec.json.encode(document)  # an infinite number becomes null

    async def _show(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return refusal_response(NO_KEY, self._state.metrics)
        event = await self._feed.next()
        body = event.removeprefix(b"data: ").rstrip()
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _follow(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return refusal_response(NO_KEY, self._state.metrics)
        if self._feed.is_full:
            return refusal_response(Refusal(Reason.QUEUE_FULL, TOO_MANY), self._state.metrics)
        return LiveResponse(self._feed, request.app)

    def _is_allowed(self, request: Request) -> bool:
        return has_key(dict(request.headers.raw), self._state.config)


def copies(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return how many workers have the state of the newest prompts: the mean over its tokens.

    `factor` is 1 if all of it is at one worker each, null if nothing is known of it.
    """
    known = [x.holder_tokens.values() for x in decisions if x.holder_tokens]
    longest, held = sum(map(max, known)), sum(map(sum, known))
    return {"factor": held / longest if longest else None, "tokens": longest, "held": held}


def _worker(
    worker: Worker,
    ledger: Ledger | None,
    per_owner: Mapping[str, int],
    stored: StoredState | None,
    now_s: float,
) -> dict[str, Any]:
    name, address = worker.name, worker.address
    found: dict[str, Any] = {
        "name": name,
        "url": address.url,
        "state": worker.state,
        "role": address.role,
        "draining": address.is_draining,
        "paused": worker.breaker.is_open,
        "models": sorted(worker.models)[:8],
        "requests": worker.in_flight,
        "load": None,
        "sessions": None,
        "stored": None,
    }
    if ledger is not None and name in ledger.workers:
        own, load = ledger.own(name), ledger.load(name)
        age_s = ledger.report_age_s(name, now_s)
        found["sessions"] = per_owner.get(name, 0)
        found["load"] = {
            "prefilling": own.prefilling,
            "decoding": own.decoding,
            "others": ledger.others(name)._asdict(),
            "queued_tokens": load.queued_tokens,
            "context_tokens": load.context_tokens,
            "report_age_s": age_s if math.isfinite(age_s) else None,
        }
    if stored is not None:
        told = msgspec.structs.asdict(stored)
        found["stored"] = {"age_s": now_s - told.pop("told_s"), **told}
    return found


def _peers(ledger: Ledger | None, now_s: float) -> dict[str, Any]:
    """Return the other routers, and why their load may not be known; null without any channel."""
    if not isinstance(ledger, SharedLedger):
        return {"peers": None, "doubts": []}
    return {"peers": [x._asdict() for x in ledger.peers(now_s)], "doubts": ledger.doubts(now_s)}


def _rows(counter: Counter) -> list[dict[str, Any]]:
    """Return this process's counts, each with its labels."""
    samples = [x for metric in counter.collect() for x in metric.samples]
    return [{**x.labels, "count": x.value} for x in samples if x.name.endswith("_total")]
