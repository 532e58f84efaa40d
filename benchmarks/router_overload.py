"""`python -m benchmarks.router_overload [--json]`: a router under ten times the load that fits.

Two stub workers take `IN_FLIGHT` requests each, of `SERVICE_S` seconds. Clients send 80 % of what
that allows for `--seconds`, then ten times that, and then the first load again, at fixed times
whatever comes back. Answers are counted that end while requests are sent: under overload the first
end together after `SERVICE_S`, so from half of that later to half of it before the end.
`goodput_of_capacity`: those per second under the overload over what the
workers can take; near 1 means that nothing collapses. Goal >= 0.95. `served_ms_p99_10x`: time of
the answers under overload, which the bounds of the queue allow to be `bound_ms`. `refused` are
answered 429, with `Retry-After` and a reason. `silent` answers are none of both, `hung` ones take
longer than `HUNG_S`: none are expected.
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
CAPACITY_PER_S = WORKERS * IN_FLIGHT / SERVICE_S
GOALS = {"goodput_of_capacity": ">= 0.95", "silent": "<= 0", "hung": "<= 0"}
_PATH = "/v1/completions"


@dataclass
class Outcomes:
    """The ends of the requests of one load."""

    counts: Counter[str] = field(default_factory=Counter)
    served_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    """The times at which answers ended."""

    def served_per_s(self, start_s: float, end_s: float) -> float:
        """Return the answers per second that ended between two times."""
        return sum(start_s <= x < end_s for x in self.ended_s) / (end_s - start_s)


def body() -> bytes:
    """Return a request whose answer takes about `SERVICE_S`."""
    stub = {"events": 8, "first_s": SERVICE_S / 2, "gap_s": SERVICE_S / 16}
    return json.dumps({"stream": True, "stub": stub}).encode()


async def send(session: aiohttp.ClientSession, url: str, outcomes: Outcomes) -> None:
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_S), session.post(url + _PATH, data=body()) as answer:
            content = await answer.read()
    except TimeoutError:
        outcomes.counts["hung"] += 1
        return
    except aiohttp.ClientError:
        outcomes.counts["silent"] += 1
        return
    if answer.status == 200 and content.endswith(b"data: [DONE]\n\n"):
        outcomes.counts["served"] += 1
        outcomes.ended_s.append(time.monotonic())
        outcomes.served_s.append(outcomes.ended_s[-1] - begun_s)
    elif answer.status == 429 and int(answer.headers.get("retry-after", "0")) >= 1:
        outcomes.counts[answer.headers.get("x-heterocache-reason", "silent")] += 1
    else:
        outcomes.counts["silent"] += 1


async def load(
    session: aiohttp.ClientSession, url: str, rate: float, seconds: float
) -> tuple[Outcomes, float]:
    """Send requests at a rate; return how all ended, and the answers per second meanwhile."""
    outcomes, begun_s, sending = Outcomes(), time.monotonic(), list[asyncio.Task[None]]()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun_s + number / rate - time.monotonic()))
        sending.append(asyncio.create_task(send(session, url, outcomes)))
    await asyncio.gather(*sending)
    return outcomes, outcomes.served_per_s(
        begun_s + 1.5 * SERVICE_S, begun_s + seconds - 0.5 * SERVICE_S
    )


async def measure(seconds: float) -> dict[str, float]:
    """Return the figures."""
    rate = 0.8 * CAPACITY_PER_S
    with (
        StubFleet(WORKERS) as fleet,
        running_router(
            workers=fleet.urls, max_in_flight=IN_FLIGHT, max_queued=MAX_QUEUED, queue_s=5.0
        ) as (url, _),
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await wait_until_ready(session, url, WORKERS)
            fits, fits_per_s = await load(session, url, rate, seconds)
            overload, overload_per_s = await load(session, url, 10 * rate, seconds)
            after, after_per_s = await load(session, url, rate, seconds)
    loads = (fits, overload, after)
    served = overload.counts["served"]
    queue_s = SERVICE_S * MAX_QUEUED / (WORKERS * IN_FLIGHT)
    return {
        "goodput_of_capacity": overload_per_s / CAPACITY_PER_S,
        "served_per_s": fits_per_s,
        "served_per_s_10x": overload_per_s,
        "served_per_s_after": after_per_s,
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
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default 30)")
    given = parser.parse_args()
    if given.seconds <= 2 * SERVICE_S:
        parser.error(f"--seconds is more than {2 * SERVICE_S:g}: before, too few answers end")
    figures = uvloop.run(measure(given.seconds))
    rows = [[name, f"{value:,.4g}", GOALS.get(name, "")] for name, value in figures.items()]
    text = f"{machine_line()}\n\n{table(['figure', 'value', 'goal'], rows)}"
    publish("router_overload", text, rounded(figures), vars(given), as_json=given.json)


if __name__ == "__main__":
    main()
