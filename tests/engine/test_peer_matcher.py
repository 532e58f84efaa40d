"""A request that claims a handoff costs few lookups, one with nothing to look up one match."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkKey,
    ChunkRange,
    StoredChunk,
    Tier,
)
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher, RetryLimit
from hetero_connector.engine.scheduler.request_identifier import PLAIN
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from tests.clock import Clock
from tests.engine.fakes import DENSE, FakeRequest

KV = StateType.DENSE_KV
STEP_S = 1e-3
WAITED_S = 0.5


class Waiting:
    """Requests that retry as soon as they may, for half a second."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.limit = RetryLimit(lambda: self.now_s)

    def lookup_times(self, requests: int) -> list[list[float]]:
        """Return the times in seconds of each request's lookups."""
        begun_s = self.now_s
        lookups = [[begun_s] for _ in range(requests)]
        while self.now_s < begun_s + WAITED_S:
            self.now_s += STEP_S
            for times in lookups:
                if self.limit.try_acquire(times[-1], len(times)):
                    times.append(self.now_s)
        return lookups


def test_the_first_retries_follow_fast_and_later_ones_do_not() -> None:
    [times] = Waiting().lookup_times(1)
    assert times[1] - times[0] <= 0.012
    assert times[4] - times[0] <= 0.05, "a handoff takes some 10 ms"
    assert len(times) <= 11


def test_all_requests_together_have_a_limited_rate() -> None:
    lookups = Waiting().lookup_times(1_000)
    assert sum(len(times) - 1 for times in lookups) <= 50 + 200 * WAITED_S + 1


class Shelf:
    """A store that has so many chunks of each chain, and counts how often it is looked at."""

    def __init__(self, chunks: int = 0) -> None:
        self.chunks = chunks
        self.looks = 0

    def holdings(self, chunks: Sequence[ChunkRange]) -> list[StoredChunk]:
        self.looks += 1
        return [StoredChunk(x, {KV: Tier.DRAM}) for x in chunks[: self.chunks]]


class Directory:
    """Finds nothing, and counts the lookups."""

    def __init__(self) -> None:
        self.lookups = 0

    def find(self, keys: Sequence[ChunkKey]) -> Any:
        self.lookups += 1
        return SimpleNamespace(poll=lambda: True, found=[])

    def close(self) -> None:
        pass


def matcher_of(store: Any, fleet: Any, clock: Clock) -> PeerMatcher:
    layout: Any = ArtifactLayout(DENSE, 64)
    return PeerMatcher(layout, store, fleet, Recorder(), clock, 10.0)


def tracker_of(num_tokens: int) -> RequestTracker:
    request: Any = FakeRequest("a", list(range(num_tokens)))
    tracker = RequestTracker.of(request, ChainHasher(b"f" * 32, 64), PLAIN, Clearings())
    tracker.grow()
    return tracker


def test_a_request_with_nothing_to_look_up_is_matched_once_for_that() -> None:
    """vLLM asks in every step while it has no pages for it. The prompt is shorter than a chunk."""
    shelf, clock = Shelf(), Clock(0.0)
    matcher, tracker = matcher_of(shelf, Directory(), clock), tracker_of(40)
    for _ in range(3):
        assert matcher.search(tracker, 0, 39)
    assert shelf.looks == 1
    assert matcher.search(tracker, 16, 39)
    assert shelf.looks == 2, "the engine has more of it"
    clock.passes(6.0)
    assert matcher.search(tracker, 16, 39)
    assert shelf.looks == 3, "something may have been evicted since"
    matcher.forget(tracker)
    assert matcher.search(tracker, 16, 39)
    assert shelf.looks == 4


def test_peers_are_asked_at_once_for_what_could_not_be_read_here() -> None:
    """The request had nothing to ask: the own store had all of it."""
    shelf, directory = Shelf(chunks=3), Directory()
    matcher, tracker = matcher_of(shelf, directory, Clock(0.0)), tracker_of(200)
    assert matcher.search(tracker, 0, 199)
    assert directory.lookups == 0
    shelf.chunks = 2
    lost = ArtifactId(tracker.chain.ending_at(192).key, KV)
    assert matcher.switch_copies(tracker, [lost]) == [lost]
    assert matcher.search(tracker, 0, 199)
    assert directory.lookups == 1
