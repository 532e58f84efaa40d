"""The benchmark of block events still publishes every chunk."""

import pytest

from benchmarks import observability


def test_every_chunk_is_published_and_costs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "CHUNKS", 64)
    timing = observability.measure(memory=True)
    assert timing.events_per_s > 0
    assert timing.chunk_bytes > 4 * observability.CHUNK_TOKENS, "its tokens alone take as much"
