"""`python -m benchmarks.router_overload [--json]`: a router under ten times the load that fits.

Two stub workers take `IN_FLIGHT` requests each, of `SERVICE_S` seconds. Clients send 80 % of what
that allows for `--seconds`, and then ten times that, at fixed times whatever comes back.
`goodput_kept`: answers per second under the overload over those under the load that fits; at least
1 means that nothing collapses. `served_ms_p99_10x`: time of the answers under overload, which the
bounds of the queue allow to be `bound_ms`. `refused` are answered 429, with `Retry-After` and a
reason. `silent` answers are none of both, `hung` ones take longer than `HUNG_S`: none are expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import uvloop

from benchmarks.measure import machine_line, publish, rounded, table
from benchmarks.router_process import percentile, running_router, wait_until_ready
from benchmarks.stub_fleet import StubFleet

WORKERS = 2
IN_FLIGHT = 8
SERVICE_S = 2.0
MAX_QUEUED = 16
HUNG_S = 60.0
GOALS = {"goodput_kept": ">= 0.95", "silent": "<= 0", "hung": "<= 0"}
_PATH = "/v1/completions"
_BODY = json.dumps(
    {"stream": True, "stub": {"events": 8, "first_s": SERVICE_S / 2, "gap_s": SERVICE_S / 16}}
).encode()


@dataclass
class Outcomes:
    """The ends of the requests of one load."""

    counts: Counter[str] = field(default_factory=Counter)
    served_s: list[float] = field(default_factory=list)
    served_per_s: float = 0.0


async def send(session: aiohttp.ClientSession, url: str, outcomes: Outcomes) -> None:
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_S), session.post(url + _PATH, data=_BODY) as answer:
            content = await answer.read()
    except TimeoutError:
        outcomes.counts["hung"] += 1
        return
    except aiohttp.ClientError:
        outcomes.counts["silent"] += 1
        return
    if answer.status == 200 and content.endswith(b"data: [DONE]\n\n"):
        outcomes.counts["served"] += 1
        outcomes.served_s.append(time.monotonic() - begun_s)
    elif answer.status == 429 and int(answer.headers.get("retry-after", "0")) >= 1:
        outcomes.counts[answer.headers.get("x-heterocache-reason", "silent")] += 1
    else:
        outcomes.counts["silent"] += 1


async def load(session: aiohttp.ClientSession, url: str, rate: float, seconds: float) -> Outcomes:
    """Send requests at a rate; count until all have ended."""
    outcomes, begun_s, sending = Outcomes(), time.monotonic(), list[asyncio.Task[None]]()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun_s + number / rate - time.monotonic()))
        sending.append(asyncio.create_task(send(session, url, outcomes)))
    await asyncio.gather(*sending)
    outcomes.served_per_s = outcomes.counts["served"] / (time.monotonic() - begun_s)
    return outcomes


async def measure(seconds: float) -> dict[str, float]:
    """Return the figures."""
    rate = 0.8 * WORKERS * IN_FLIGHT / SERVICE_S
    with (
        StubFleet(WORKERS) as fleet,
        running_router(
            workers=fleet.urls, max_in_flight=IN_FLIGHT, max_queued=MAX_QUEUED, queue_s=5.0
        ) as (url, _),
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await wait_until_ready(session, url, WORKERS)
            fits = await load(session, url, rate, seconds)
            overload = await load(session, url, 10 * rate, seconds)
            after = await load(session, url, rate, seconds / 2)
    loads = (fits, overload, after)
    served = overload.counts["served"]
    queue_s = SERVICE_S * MAX_QUEUED / (WORKERS * IN_FLIGHT)
    return {
        "goodput_kept": overload.served_per_s / fits.served_per_s,
        "served_per_s": fits.served_per_s,
        "served_per_s_10x": overload.served_per_s,
        "served_per_s_after": after.served_per_s,
        "served_ms_p50": 1e3 * percentile(fits.served_s, 0.5),
        "served_ms_p99_10x": 1e3 * percentile(overload.served_s, 0.99),
        "bound_ms": 1e3 * (SERVICE_S + queue_s),
        "refused_share_10x": 1.0 - served / overload.counts.total(),
        "silent": sum(x.counts["silent"] for x in loads),
        "hung": sum(x.counts["hung"] for x in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_overload")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (default 20)")
    given = parser.parse_args()
    figures = uvloop.run(measure(given.seconds))
    rows = [[name, f"{value:,.4g}", GOALS.get(name, "")] for name, value in figures.items()]
    text = f"{machine_line()}\n\n{table(['figure', 'value', 'goal'], rows)}"
    publish("router_overload", text, rounded(figures), vars(given), as_json=given.json)


if __name__ == "__main__":
    main()
