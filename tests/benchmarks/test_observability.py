"""The benchmark of telling others still publishes every chunk, and asks a real store."""

import itertools
from typing import Any

import pytest

from benchmarks import live_page, observability, status_latency


def test_every_chunk_is_published_and_costs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "CHUNKS", 64)
    timing = observability.measure(memory=True)
    assert timing.events_per_s > 0
    assert timing.chunk_bytes > 4 * observability.CHUNK_TOKENS, "its tokens alone take as much"


def test_only_first_announcements_count() -> None:
    timing = observability.EventTiming(2.0, 0.1, 0.3, 1e-6, 3_000.0)
    assert timing.events_per_s == observability.CHUNKS / 2.0


def test_the_status_of_a_big_store_is_asked_at_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_latency, "CHUNKS", 1000)
    monkeypatch.setattr(status_latency, "_SSD_BYTES", 1000 * 4096 * 2)
    monkeypatch.setattr(status_latency, "SESSIONS", 10)
    monkeypatch.setattr(status_latency, "QUESTIONS", 3)
    timing = status_latency.measure()
    assert timing.p99_ms.keys() == {"status", "sessions", "live"}
    assert min(timing.p99_ms.values()) > 0
    assert timing.answer_bytes["status"] > 50_000, "it has the newest decisions"


def test_decodes_are_timed_from_their_first_tokens_and_have_new_prompts() -> None:
    class Server:
        """Counts the last decode of a batch when it is asked once more."""

        def __init__(self) -> None:
            self.prompts: list[list[int]] = []
            self.asked = 0

        def post(self, path: str, body: dict[str, Any]) -> None:
            self.prompts.append(body["prompt"])

        def series(self, name: str) -> list[tuple[dict[str, str], float]]:
            self.asked += 1
            done = len(self.prompts) - (self.asked % 4 == 3)
            return [({}, {"count": 1.0, "sum": 2.5}[name.rpartition("_")[2]] * done)]

    server: Any = Server()
    seeds = itertools.count(0)
    for _ in range(2):
        server.asked = 0
        assert live_page._decode(server, seeds) == 2.5
    assert len({tuple(prompt) for prompt in server.prompts}) == 16


def test_the_ratio_of_decodes_is_told_with_its_spread() -> None:
    figures = live_page.DecodeTiming([1.0, 2.0, 4.0], [1.5, 2.0, 2.0], 0).figures()
    assert figures == {
        "decode_ratio_observed": 1.0,
        "decode_ratio_observed_least": 0.5,
        "decode_ratio_observed_most": 1.5,
    }
