"""The benchmark of the router still measures whole answers, exact placements and every figure."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from benchmarks import router_decision, router_sessions
from benchmarks.bare_relay import running_relay
from benchmarks.router import new_prompts, stream
from benchmarks.stub_fleet import StubFleet


def test_the_relay_passes_whole_streams_on() -> None:
    async def streamed(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            await stream(session, url, gap_s=0.0)  # it looks for the last event

    with StubFleet(1) as fleet, running_relay(fleet.urls[0]) as (url, process):
        asyncio.run(streamed(url))
        assert process.is_running()
    assert not process.is_running()


def test_every_request_of_the_benchmark_of_decisions_is_placed() -> None:
    assert router_decision.decision_us(3, repeats=8) > 0.0


def test_rates_that_disagree_are_both_told() -> None:
    """The last block's requests cost half of what the first one's do."""
    idle = router_sessions.Block(0.0, wall_s=10.0, cpu_s=5.0, redis_s=1.0)
    loaded = []
    for rate, cpu_s in ((4.0, 4.0), (8.0, 2.0)):
        wall_s = 100 / rate
        loaded.append(router_sessions.Block(rate, 100, wall_s, 0.5 * wall_s + cpu_s))
        loaded[-1].first_byte_s.append(1.0)
    client: Any = SimpleNamespace(certainties=Counter(exact=1), tokens=[1], new_tokens=[1])
    figures = router_sessions._figures([idle, *loaded], client)
    assert figures["cores_at_100_rps_100k"] == pytest.approx(4.5)
    assert figures["cores_at_100_rps_100k_least"] == pytest.approx(2.5)


@pytest.mark.long
def test_sessions_grow_and_are_placed_exactly() -> None:
    sizes = {"tokens": 12_000, "workers": 3, "sessions": 2, "turns": 2, "new_tokens": 500}
    measured = router_sessions.measure([20.0, 40.0], **sizes, processes=2, idle_s=1.0)
    figures, blocks = asyncio.run(measured)
    assert [block.requests for block in blocks] == [0, 8, 8]
    assert figures["exact_share"] > 0.5
    # The system prompt, the first turn, and the mean of eight turns that grow by 500 tokens; text
    # has more or fewer characters for a token than 4.2.
    expected = 8_000 / 4.2 + (12_000 - 4 * 500) + 4.5 * 500
    assert 0.75 * expected < figures["prompt_tokens"] < 1.25 * expected
    assert figures["cores_at_100_rps_100k"] >= figures["cores_at_100_rps_100k_least"] > 0.0
    # Those after the last cut are made again. One process that knew nothing would make 12,000.
    assert figures["tokenized_over_new"] < 2.0


def test_prompts_that_are_placed_share_no_chunk() -> None:
    prompts = list(new_prompts(300))
    assert {len(prompt) for prompt in prompts} == {2_000}
    assert len({prompt[:64] for prompt in prompts}) == 300
    assert min(len(set(prompt.split())) for prompt in prompts) > 20, "they have many words"
