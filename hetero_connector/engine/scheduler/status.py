"""Describe a running engine: its tiers, its health, its last decisions and what it has learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from hetero_connector.engine.scheduler.predictions import RECENT, Predictions
from hetero_connector.engine.scheduler.restore_counter import TokenSources
from hetero_connector.engine.scheduler.session_book import SessionBook, session_name
from hetero_connector.engine.scheduler.status_socket import Answer
from hetero_connector.metrics import Recorder, split_key
from hetero_connector.planner.profile import CostProfile
from hetero_connector.store.artifact_store import ArtifactStore

STATUS_FORMAT = 1
_SESSIONS_LISTED = 256
_CHUNKS_LOOKED_AT = 16_384
"""Chunks of sessions that one answer looks at: about 50 ms in a store of a million."""
_PINS_LISTED = 256
_LIVE_SESSIONS = 32
_LIVE_DECISIONS = 64
_LIVE_CHUNKS = 4_096
"""`live` is asked every second: it must take a millisecond or two of the engine's time."""
_LIVE_ENGINE = (
    *("engine", "model", "pid", "started"),
    *("heterocache", "vllm", "chunk_tokens", "fingerprint"),
)
_LIVE_SESSION = (
    *("session", "turns", "tokens", "is_running", "idle_s", "expected_in_s"),
    *("pinned_for_s", "resumable_tokens", "chunks_by_tier"),
)
_LIVE_DECISION = (
    *("request_id", "time", "choice", "reason"),
    *("prompt_tokens", "local_tokens", "restored_tokens", "computed_tokens"),
    *("predicted_s", "observed_s", "computing_s"),
)
_COUNTED = (
    "heterocache_decisions",
    "heterocache_lost_restores",
    "heterocache_failures",
    "heterocache_hook_errors",
    "heterocache_directory_failures",
    "heterocache_ssd_writes_refused",
)
"""Counters that are told with the status, since the start."""
MakeProfile = Callable[[], CostProfile]


class EngineStatus:
    """Makes the answers to questions at the engine's socket. Any thread may call them."""

    def __init__(
        self,
        about: Mapping[str, Any],
        store: ArtifactStore,
        predictions: Predictions,
        profile: MakeProfile,
        book: SessionBook,
        sources: TokenSources,
        activity: Answer,
        recorder: Recorder,
    ) -> None:
        """`about`: what does not change while the engine runs; `profile`: what it has learned;
        `activity`: what commands have begun.
        """
        self._about = {**about, "started": time.time()}
        self._store = store
        self._predictions = predictions
        self._profile = profile
        self._book = book
        self._sources = sources
        self._activity = activity
        self._recorder = recorder

    def answers(self) -> dict[str, Answer]:
        """Return what can be asked, by name."""
        return {
            "status": self.status,
            "sessions": self.sessions,
            "decisions": self.decisions,
            "costs": self.costs,
            "live": self.live,
        }

    def status(self) -> dict[str, Any]:
        """Return everything."""
        return {
            **self._summarise(_PINS_LISTED),
            "decisions": self._recent(),
            "costs": self._profile().as_json(),
        }

    def live(self) -> dict[str, Any]:
        """Return what the live page and `top` show: they ask every second, so no more than that."""
        sessions = self._describe_sessions(_LIVE_SESSIONS, _LIVE_CHUNKS)
        return {
            **self._summarise(0),
            "engine": _only(_LIVE_ENGINE, self._about),
            "sessions": [_only(_LIVE_SESSION, x) for x in sessions],
            "decisions": [_only(_LIVE_DECISION, x) for x in self._recent(_LIVE_DECISIONS)],
        }

    def sessions(self) -> dict[str, Any]:
        """Return the sessions with the latest turns, and where their state is."""
        return {
            **self._begin(),
            "sessions": self._describe_sessions(_SESSIONS_LISTED, _CHUNKS_LOOKED_AT),
        }

    def _summarise(self, num_pins: int) -> dict[str, Any]:
        joined = self._recorder.gauge("heterocache_directory_joined")
        shared = self._recorder.gauge("heterocache_shared")
        cache_alive = self._recorder.gauge("heterocache_cache_alive")
        return {
            **self._begin(),
            "health": {
                "cache_alive": bool(cache_alive),
                **self._store.health()._asdict(),
                "directory_joined": None if joined is None else bool(joined),
                "shared": None if shared is None else bool(shared),
            },
            "counts": self._count(),
            "tokens": self._sources.tokens(),
            "activity": {
                **self._activity(),
                "reading_bytes": {t.value: n for t, n in self._store.reading_bytes.items()},
            },
            "pins": self._describe_pins(num_pins),
            "tiers": [
                {
                    "tier": x.tier.value,
                    "capacity_bytes": x.capacity_bytes,
                    "artifacts": {kind.value: n for kind, n in x.artifacts.items()},
                    "bytes": {kind.value: n for kind, n in x.bytes.items()},
                    "max_artifacts": {kind.value: n for kind, n in x.max_artifacts.items()},
                }
                for x in self._store.occupancy()
            ],
        }

    def _count(self) -> dict[str, list[dict[str, Any]]]:
        """Return the sums of counters: for each name a list of labels with their count."""
        counts: dict[str, list[dict[str, Any]]] = {name: [] for name in _COUNTED}
        for key, count in self._recorder.sums(_COUNTED).items():
            name, labels = split_key(key)
            counts[name].append({**labels, "count": int(count)})
        return counts

    def _describe_pins(self, count: int) -> dict[str, Any]:
        """Describe what pins keep, and the `count` pins that end first."""
        use, clock_s = self._store.retention.pins(), self._store.catalog.clock()
        return {
            "count": len(use.pins),
            "bytes": use.size_bytes,
            "max_bytes": use.max_bytes,
            "max_tenant_bytes": use.max_bytes_by_tenant,
            "first_to_end": [
                {
                    "name": session_name(x.name),
                    "tokens": x.tokens,
                    "ends_in_s": x.until_s - clock_s,
                    "by": "client" if x.is_bounded else "operator",
                    "tenant": x.tenant.hex(),
                    "tenant_bytes": use.bytes_by_tenant.get(x.tenant, 0),
                }
                for x in nsmallest(count, use.pins, key=lambda x: x.until_s)
            ],
        }

    def _describe_sessions(self, count: int, budget: int) -> list[dict[str, Any]]:
        """Describe the newest sessions, as many as need a look at no more than `budget` chunks."""
        clock_s, now = self._store.catalog.clock(), time.time()
        pinned_until_s = {x.name: x.until_s for x in self._store.retention.pins().pins}
        described = []
        for session, record in self._book.newest()[:count]:
            place = self._store.place_of(record.leaves, budget)
            if place is None:
                break  # those of long chains would cost the engine too much
            budget -= place.chunks
            expected, until_s = record.expected_s, pinned_until_s.get(session)
            described.append(
                {
                    "session": session_name(session),
                    "parent": record.parent and session_name(record.parent),
                    "tenant": record.tenant.hex(),
                    "tokens": record.tokens,
                    "turns": record.turns,
                    "is_running": record.ended is None,
                    "idle_s": 0.0 if record.ended is None else now - record.ended,
                    "expected_in_s": expected and [at_s - clock_s for at_s in expected],
                    "pinned_for_s": None if until_s is None else until_s - clock_s,
                    "resumable_tokens": place.end,
                    "chunks_by_tier": {t.value: n for t, n in place.by_tier.items()},
                }
            )
        return described

    def decisions(self) -> dict[str, Any]:
        """Return the newest decisions."""
        return {**self._begin(), "decisions": self._recent()}

    def costs(self) -> dict[str, Any]:
        """Return what was learned of the engine's costs."""
        return {**self._begin(), "costs": self._profile().as_json()}

    def _recent(self, count: int = RECENT) -> list[dict[str, Any]]:
        return [x.as_json() for x in self._predictions.recent()[-count:]]

    def _begin(self) -> dict[str, Any]:
        return {"format": STATUS_FORMAT, "now": time.time(), "engine": self._about}


def _only(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of these names, to the microsecond; one that is unknown is left out."""
    short = ((name, values[name]) for name in names if name in values)
    return {name: round(x, 6) if isinstance(x, float) else x for name, x in short}
