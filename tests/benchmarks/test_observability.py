"""The benchmark of telling others still publishes every chunk, and asks a real store."""

import pytest

from benchmarks import observability, status_latency


def test_every_chunk_is_published_and_costs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "CHUNKS", 64)
    timing = observability.measure(memory=True)
    assert timing.events_per_s > 0
    assert timing.chunk_bytes > 4 * observability.CHUNK_TOKENS, "its tokens alone take as much"


def test_the_status_of_a_big_store_is_asked_at_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_latency, "CHUNKS", 1000)
    monkeypatch.setattr(status_latency, "_SSD_BYTES", 1000 * 4096 * 2)
    monkeypatch.setattr(status_latency, "SESSIONS", 10)
    monkeypatch.setattr(status_latency, "QUESTIONS", 3)
    timing = status_latency.measure()
    assert timing.p99_ms.keys() == {"status", "sessions", "live"}
    assert min(timing.p99_ms.values()) > 0
    assert timing.answer_bytes["status"] > 50_000, "it has the newest decisions"
