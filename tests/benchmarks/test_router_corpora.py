"""Prompts of the router's corpora are as new as their names say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks import router_corpora
from benchmarks.router_corpora import KIB, num_hot, prompts
from benchmarks.router_sessions import KnownFleet
from hetero_connector.artifacts.record import ChunkKey

_COUNT = 100
_SIZES = (2 * KIB, 16 * KIB)
_BEGINNING = 64
"""Fewer characters than a chunk has."""


def test_no_cold_prompt_begins_as_another_one() -> None:
    cold = [x for size in _SIZES for x in prompts("cold", size, _COUNT)]
    assert len({x[:_BEGINNING] for x in cold}) == len(cold)


def test_new_prompts_among_hot_ones_are_no_others() -> None:
    beginnings: list[str] = []
    for size in _SIZES:
        hot = set(prompts("hot64", size, num_hot(size)))
        mixed = list(prompts("mixed90", size, _COUNT))
        new = [x for x in mixed if x not in hot]
        assert 0 < len(new) < _COUNT / 4
        beginnings += [x[:_BEGINNING] for x in (*new, *prompts("cold", size, _COUNT))]
    assert len(set(beginnings)) == len(beginnings)


def test_prompts_have_their_size() -> None:
    for corpus in ("hot64", "cold", "long_shared_prefix"):
        assert {len(x) for x in prompts(corpus, 2 * KIB, 3)} == {2 * KIB}


@pytest.mark.long
def test_the_directory_has_the_hot_prompts_before_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []

    def claim(fleet: KnownFleet, worker: str, keys: Sequence[ChunkKey], known: int = 0) -> None:
        claimed(fleet, worker, keys, known)
        held.append(len(list(fleet.directory.lookup(keys).chunks)) - len(keys))

    claimed = KnownFleet.claim
    monkeypatch.setattr(KnownFleet, "claim", claim)
    monkeypatch.setattr(router_corpora, "SIZES", (2 * KIB,))
    monkeypatch.setattr(router_corpora, "CORPORA", ("hot64", "cold"))
    _, figures = asyncio.run(router_corpora.measure(2))
    assert figures.keys() == {"hot64_2k_ms", "cold_2k_ms"}
    assert held == [0] * num_hot(2 * KIB), "all chunks of each, and none of the cold ones"
