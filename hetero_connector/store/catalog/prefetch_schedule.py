"""The sessions that are expected back, and when staging their state begins. Pure: time comes in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import ExpiringHeap
from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.nodes import Artifact

_LEAD = 2.0
"""Staging begins this many times its predicted seconds ahead of the session, and"""
_LEAD_S = 0.25
"""so much more, in seconds: the I/O thread may be busy writing."""


def staging_start_s(earliest_s: float, stage_s: float) -> float:
    """Return when to begin staging of `stage_s` for a session that may be back at `earliest_s`."""
    return earliest_s - _LEAD * stage_s - _LEAD_S


@dataclass(frozen=True)
class ExpectedReturn:
    """A session whose next turn is expected. Times of the store's clock."""

    session: Hashable
    leaves: tuple[ChunkKey, ...]
    """Chunks at which its chain may end, deepest first: the first that is stored counts."""
    start_s: float
    """Staging may begin."""
    latest_s: float
    """It is not expected any more."""
    probability: float
    """The probability that it comes back before `latest_s`."""
    tenant: bytes = b""
    """The session's tenant, see `fair_shares`."""
    is_ordered: bool = False
    """True if an operator wants it in DRAM, whatever leaves for it."""


class PrefetchSchedule:
    """At most one expected return of a session, the newest `capacity`, of each tenant its share.

    Not thread-safe. O(log n) a call, amortised.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._shares = FairShares(capacity)
        self._expected: dict[Hashable, ExpectedReturn] = {}
        self._by_start = ExpiringHeap[Hashable, ExpectedReturn](self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def next_s(self) -> float:
        """The time at which `take_due` has something; infinite if nothing is expected."""
        return self._by_start.next_s

    def expect(self, expected: ExpectedReturn) -> None:
        """Expect a session; replaces what was expected of it before."""
        self._expected[expected.session] = expected
        self._by_start.push(expected.start_s, expected.session, expected)
        if (oldest := self._shares.add(expected.session, expected.tenant)) is not None:
            del self._expected[oldest]
            self._by_start.prune()

    def cancel(self, session: Hashable) -> None:
        """Expect the session no longer: it is back, or gone."""
        self._expected.pop(session, None)
        self._shares.remove(session)
        self._by_start.prune()

    def cancel_where(self, is_meant: Callable[[Hashable, bytes], bool]) -> None:
        """Expect those no longer whose session and tenant are meant."""
        for x in [x for x in self._expected.values() if is_meant(x.session, x.tenant)]:
            self.cancel(x.session)

    def clear(self) -> None:
        """Expect no session."""
        self._expected.clear()
        self._shares.clear()
        self._by_start.clear()

    def take_due(self, now_s: float) -> ExpectedReturn | None:
        """Return the session that should have begun first; drop those whose time is over."""
        while (session := self._by_start.pop_due(now_s)) is not None:
            expected = self._expected[session]
            self.cancel(session)
            if now_s < expected.latest_s:
                return expected
        return None


class Prefetched:
    """Artifacts that were staged ahead of a session's return and have not been used yet.

    Every byte that is counted as prefetched is counted once more: as used, by whichever restore,
    or as wasted, when it is evicted first or the session is not expected any more. Costs nothing
    while nothing is prefetched.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: dict[Artifact, ExpectedReturn] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expected(self, artifact: Artifact) -> ExpectedReturn | None:
        """Return the return that the artifact waits for."""
        return self._waiting.get(artifact)

    def add(self, artifact: Artifact, expected: ExpectedReturn) -> None:
        """Count an artifact that has arrived in DRAM."""
        self._waiting[artifact] = expected
        self._recorder.add("heterocache_prefetched_bytes", artifact.size_bytes, **_labels(artifact))

    def count_used(self, artifacts: Iterable[Artifact]) -> None:
        """Count those of the artifacts as used that were prefetched."""
        if self._waiting:
            for artifact in artifacts:
                if self._waiting.pop(artifact, None) is not None:
                    self._recorder.add(
                        "heterocache_prefetch_used_bytes", artifact.size_bytes, **_labels(artifact)
                    )

    def discard(self, artifact: Artifact) -> None:
        """Count the artifact as wasted if it was prefetched and is still unused."""
        if self._waiting.pop(artifact, None) is not None:
            self._recorder.add(
                "heterocache_prefetch_wasted_bytes", artifact.size_bytes, **_labels(artifact)
            )


def _labels(artifact: Artifact) -> dict[str, str]:
    return {"state_type": artifact.state_type.value}


BATCH_BYTES = 4 << 20
"""In flight at once, or one artifact if that is larger: what a restore may find ahead of it."""


@dataclass(frozen=True)
class PrefetchCosts:
    """The engine's figures for prefetching. Called by the I/O thread, which may hold the lock."""

    stage_seconds: Callable[[Artifact], float] = lambda artifact: artifact.size_bytes / 3e9
    """Seconds to read an artifact from SSD; without measurements, at 3 GB/s."""
    used_within: Callable[[float, float], float] = lambda idle_s, within_s: 1.0
    """(idle_s, within_s) -> probability that an artifact last used so long ago is used so soon.
    Without knowledge 1, so that only artifacts of less value are displaced."""


DEFAULT_COSTS = PrefetchCosts()


@dataclass(frozen=True)
class PrefetchWorth:
    """Seconds gained and lost by having an artifact in DRAM."""

    costs: PrefetchCosts
    seconds_saved: Callable[[Artifact], float]
    """Seconds of computing that a request saves by finding an artifact."""

    def at_stake_s(self, artifact: Artifact) -> float:
        """Return what a request loses without it in DRAM: staging, or computing if cheaper."""
        compute_s = self.seconds_saved(artifact)
        if artifact.ssd is None:
            return compute_s
        return min(compute_s, self.costs.stage_seconds(artifact))

    def loss_s(self, victim: Artifact, idle_s: float, within_s: float) -> float:
        """Return the expected loss if a victim leaves that was last used `idle_s` ago."""
        return self.costs.used_within(idle_s, within_s) * self.at_stake_s(victim)
