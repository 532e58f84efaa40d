"""HeteroCache and LMCache in one MultiConnector: both save a prompt, and either restores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side.contestants import CONTESTANTS
from benchmarks.side_by_side.environments import EnvironmentFailedError
from benchmarks.side_by_side.work import Arena, Case
from examples.serving import Reply, logprob_distance
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

_WAIT_S = 120.0
_NOT_OURS = {"kv_transfer_params": {"max_load_tokens": 0}}
"""A request that HeteroCache does not restore; LMCache does not know this limit."""


def _ask(arena: Arena, prompt: list[int], **request: Any) -> tuple[Reply, int]:
    """Return an answer without the engine's own cache, and the tokens that HeteroCache restored."""
    arena.server.reset_prefix_cache()
    before = _restored(arena)
    reply = arena.server.complete(prompt, 8, **request)
    return reply, _restored(arena) - before


def _restored(arena: Arena) -> int:
    return int(sum(value for _, value in arena.server.series("heterocache_hit_tokens_total")))


def test_both_save_and_either_restores(tmp_path: Path) -> None:
    case = Case("dense", 1100, 2048, blocks=500, rounds=1)
    try:
        arena = Arena(CONTESTANTS["heterocache_and_lmcache"], case, tmp_path)
    except EnvironmentFailedError as error:
        pytest.skip(f"no LMCache: {error}")
    prompt = case.prompt(0)
    with arena:
        arena.start_services()
        arena.start()
        computed = arena.server.complete(prompt, 8)
        first, by_us = _ask(arena, prompt)
        assert first.cached_tokens == by_us
        assert by_us >= 1024
        assert logprob_distance(computed, first) < 1e-3

        # LMCache saves after the answer.
        def by_other() -> Reply | None:
            reply, by_us = _ask(arena, prompt, **_NOT_OURS)
            assert by_us == 0
            return reply if reply.cached_tokens else None

        other = until(by_other, "LMCache restores it", _WAIT_S)

        assert other.cached_tokens == 1024, "whole chunks of 256"
        assert logprob_distance(computed, other) < 1e-3
