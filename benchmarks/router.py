"""`python -m benchmarks.router [--json]`: the cost of the router, in front of stub workers.

`added_ms_p50`, `added_ms_p99`: milliseconds that the router adds to a request of 2 KB and its
answer: the percentile through the router minus that of direct requests, by turns, one at a time.
`placed_new_ms_*` are the same of a router that identifies a prompt which it has not seen, asks the
directory and places by price among `router_sessions.WORKERS` workers.
`streams_per_s_core`: streams of 16 events, 20 ms apart, 64 at a time, for each second of CPU that
the router uses.
`relay_ms_p50`, `relay_streams_per_s_core`: the same of a relay that only passes bytes on
(`benchmarks.bare_relay`): about what this machine allows.
`decision_us_64`: microseconds to place a request among 64 workers, its view given.
`cores_at_100_rps_100k`: cores of the router's processes at 100 requests a second of sessions with
100,000 tokens, among 100 workers. A small machine has no room for that rate, so it is 100 times the
CPU time of a request at lower rates (`--rates`), and what an idle router takes; of the rate from
which it comes out highest, and `..._least` of the lowest.
`tokenized_over_new`: tokens that all its processes make for each new token of a turn: what one has
made the others know.
`memory_growth`: resident memory after `--requests` requests over that after a tenth of them. A
quarter of them are streams, and some clients leave.
`page_ratio`: the same streams with a viewer of the fleet's page over those without, by turns; each
ratio is of two neighbours.
Workers, router and clients are processes of their own; the figures are medians of the turns.
Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import aiohttp
import psutil
import uvloop

from benchmarks import router_corpora, router_sessions
from benchmarks.bare_relay import running_relay
from benchmarks.goals import goal_table
from benchmarks.measure import is_default, machine_line, percentile, publish, rounded, table
from benchmarks.page_viewer import viewer
from benchmarks.router_decision import decision_us
from benchmarks.router_process import running_router, wait_until_ready
from benchmarks.stub_fleet import StubFleet

_PATH = "/v1/completions"
_PROMPT = "x" * 2_000
_AT_ONCE = 64
_REQUESTS = 100_000
_UNTIMED = 200
"""Requests before those that are timed."""
_WATCHED = 1_800
"""Streams for a ratio of per cents: processor time is counted in steps of 10 ms."""


def new_prompts(count: int) -> Iterator[str]:
    """Yield so many prompts of 2 KB that share no chunk.

    They are texts: a tokenizer answers one word again and again from its cache.
    """
    return router_corpora.prompts("cold", len(_PROMPT), count)


async def added_ms(
    session: aiohttp.ClientSession,
    direct: str,
    router: str,
    requests: int,
    prompts: Iterator[str] | None = None,
) -> tuple[float, float]:
    """Return the milliseconds added at the median and at the 99th percentile.

    `prompts`: of the requests; None for the same one each time.
    """
    samples: dict[str, list[float]] = {direct: [], router: []}
    for turn in range(requests):
        body = json.dumps({"prompt": next(prompts) if prompts else _PROMPT}).encode()
        for url in (direct, router) if turn % 2 else (router, direct):
            started = time.perf_counter()
            async with session.post(url + _PATH, data=body) as answer:
                await answer.read()
            samples[url].append(1e3 * (time.perf_counter() - started))
    added = (percentile(samples[router], x) - percentile(samples[direct], x) for x in (0.5, 0.99))
    median, p99 = added
    return median, p99


async def stream(session: aiohttp.ClientSession, url: str, gap_s: float) -> None:
    body = json.dumps({"stream": True, "prompt": _PROMPT, "stub": {"gap_s": gap_s}}).encode()
    async with session.post(url + _PATH, data=body) as answer:
        content = await answer.read()
    assert content.endswith(b"data: [DONE]\n\n"), content[-200:]


async def streams_per_core(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, streams: int
) -> float:
    left = iter(range(streams))

    async def work() -> None:
        for _ in left:
            await stream(session, url, gap_s=0.02)

    before = process.cpu_times()
    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    after = process.cpu_times()
    return streams / (after.user + after.system - before.user - before.system)


async def page_ratios(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, turns: int
) -> list[float]:
    """Return the rate of streams with a viewer of the page over that without, of each turn."""

    async def rate(watched: bool) -> float:
        with viewer(f"{url}/v1/heterocache/fleet/live") if watched else nullcontext():
            return await streams_per_core(session, url, process, _WATCHED)

    ratios = []
    for turn in range(turns):
        order = (True, False) if turn % 2 else (False, True)
        rates = {watched: await rate(watched) for watched in order}
        ratios.append(rates[True] / rates[False])
    return ratios


async def growth(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, requests: int
) -> tuple[float, float]:
    """Return the ratio of resident memory, and its bytes at the end."""
    left = iter(range(requests))
    early = 0

    async def work() -> None:
        nonlocal early
        for number in left:
            if number == requests // 10:
                early = process.memory_info().rss
            if number % 4 == 0:
                await stream(session, url, gap_s=0.0)
            elif number % 100 == 1:
                async with session.post(
                    url + _PATH, json={"stream": True, "stub": {"gap_s": 1.0}}
                ) as answer:
                    await answer.content.readany()
            else:
                async with session.post(url + _PATH, json={"prompt": _PROMPT}) as answer:
                    await answer.read()

    await asyncio.gather(*(work() for _ in range(16)))
    late = process.memory_info().rss
    return late / early, late


async def measure(urls: Sequence[str], requests: int, turns: int) -> dict[str, float]:
    with running_router(workers=list(urls)) as (url, process), running_relay(urls[0]) as relay:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await wait_until_ready(session, url, len(urls))
            for front in ((url, process), relay):
                await streams_per_core(session, *front, 100)  # connections
            added, rates, relay_added, relay_rates = [], [], [], []
            for _ in range(turns):
                added.append(await added_ms(session, urls[0], url, 500))
                relay_added.append(await added_ms(session, urls[0], relay[0], 500))
                rates.append(await streams_per_core(session, url, process, 600))
                relay_rates.append(await streams_per_core(session, *relay, 600))
            ratios = await page_ratios(session, url, process, turns)
            ratio, rss = await growth(session, url, process, requests)
    return {
        "added_ms_p50": statistics.median(x for x, _ in added),
        "added_ms_p99": statistics.median(x for _, x in added),
        "relay_ms_p50": statistics.median(x for x, _ in relay_added),
        "streams_per_s_core": statistics.median(rates),
        "relay_streams_per_s_core": statistics.median(relay_rates),
        "page_ratio": statistics.median(ratios),
        "memory_growth": ratio,
        "memory_mib": rss / 2**20,
    }


async def measure_placed(requests: int, turns: int) -> dict[str, float]:
    """Return what a router adds that knows its workers' state."""
    with (
        router_sessions.known_fleet(router_sessions.WORKERS) as fleet,
        running_router(**fleet.keys) as (url, _),
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await wait_until_ready(session, url, len(fleet.workers))
            direct, prompts = fleet.workers[0].url, new_prompts(_UNTIMED + turns * requests)
            await added_ms(session, direct, url, _UNTIMED, prompts)  # connections
            added = [await added_ms(session, direct, url, requests, prompts) for _ in range(turns)]
    return {
        "placed_new_ms_p50": statistics.median(x for x, _ in added),
        "placed_new_ms_p99": statistics.median(x for _, x in added),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument(
        "--requests", type=int, default=_REQUESTS, help="for memory (default 100,000)"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--rates", default="4,8", help="requests a second of long sessions (default 4,8)"
    )
    parser.add_argument("--processes", type=int, default=4, help="of the router, for them")
    given = parser.parse_args()
    rates = [float(x) for x in given.rates.split(",")]
    with StubFleet(2) as fleet:
        figures = uvloop.run(measure(fleet.urls, given.requests, given.turns))
    figures |= uvloop.run(measure_placed(500, given.turns))
    figures["decision_us_64"] = decision_us()
    sessions, blocks = uvloop.run(router_sessions.measure(rates, processes=given.processes))
    figures |= sessions
    idle, *loaded = blocks
    seen = [["0", "0", f"{idle.cores:.3f}", ""]]
    for x in loaded:
        served = f"{x.requests / x.wall_s:.2f}"
        seen.append([f"{x.rate:g}", served, f"{x.cores:.3f}", f"{x.cores_at(100, idle):.2f}"])
    text = (
        f"{machine_line()}\n\n{goal_table('router', figures)}\n\n"
        f"Long sessions, {given.processes} processes of the router:\n"
        f"{table(['requests/s asked', 'served', 'cores', 'at 100/s'], seen)}"
    )
    details = vars(given) | {"blocks": [vars(x) for x in blocks]}
    write = is_default(parser, given, free=("json",))
    publish("router", text, rounded(figures), details, as_json=given.json, write=write)


if __name__ == "__main__":
    main()
