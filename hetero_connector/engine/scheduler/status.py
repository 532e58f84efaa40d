"""Describe a running engine: its tiers, its health, its last decisions and what it has learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.restore_counter import TokenSources
from hetero_connector.engine.scheduler.session_book import SessionBook, session_name
from hetero_connector.engine.scheduler.status_socket import Answer
from hetero_connector.planner.profile import CostProfile
from hetero_connector.store.artifact_store import ArtifactStore

STATUS_FORMAT = 1
_SESSIONS_LISTED = 256
_CHUNKS_LOOKED_AT = 16_384
"""Chunks of sessions that one answer looks at: a few milliseconds."""
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

    def answers(self) -> dict[str, Answer]:
        """Return what can be asked, by name."""
        return {
            "status": self.status,
            "sessions": self.sessions,
            "decisions": self.decisions,
            "costs": self.costs,
        }

    def status(self) -> dict[str, Any]:
        """Return everything."""
        return {
            **self._summarise(),
            "decisions": self._recent(),
            "costs": self._profile().as_json(),
        }

    def sessions(self) -> dict[str, Any]:
        """Return the sessions with the latest turns, and where their state is."""
        return {**self._begin(), "sessions": self._describe_sessions(_SESSIONS_LISTED)}

    def _summarise(self) -> dict[str, Any]:
        return {
            **self._begin(),
            "health": self._store.health()._asdict(),
            "tokens": self._sources.tokens(),
            "activity": {
                **self._activity(),
                "reading_bytes": {t.value: n for t, n in self._store.reading_bytes.items()},
            },
            "tiers": [
                {
                    "tier": x.tier.value,
                    "capacity_bytes": x.capacity_bytes,
                    "artifacts": {kind.value: n for kind, n in x.artifacts.items()},
                    "bytes": {kind.value: n for kind, n in x.bytes.items()},
                }
                for x in self._store.occupancy()
            ],
        }

    def _describe_sessions(self, count: int) -> list[dict[str, Any]]:
        """Describe the newest sessions, as many as can be looked at quickly."""
        clock_s, now, budget = self._store.catalog.clock(), time.time(), _CHUNKS_LOOKED_AT
        described = []
        for session, record in self._book.newest()[:count]:
            place = self._store.place_of(record.leaves, budget)
            if place is None:
                break  # those of long chains would cost the engine too much
            budget -= place.chunks
            expected = record.expected_s
            described.append(
                {
                    "session": session_name(session),
                    "tenant": record.tenant.hex(),
                    "tokens": record.tokens,
                    "turns": record.turns,
                    "is_running": record.ended is None,
                    "idle_s": 0.0 if record.ended is None else now - record.ended,
                    "expected_in_s": expected and [at_s - clock_s for at_s in expected],
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

    def _recent(self) -> list[dict[str, Any]]:
        return [x.as_json() for x in self._predictions.recent()]

    def _begin(self) -> dict[str, Any]:
        return {"format": STATUS_FORMAT, "now": time.time(), "engine": self._about}
