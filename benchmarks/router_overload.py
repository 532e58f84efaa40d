"""`python -m benchmarks.router_overload [--json]`: a router under ten times the load that fits.

Two stub workers take `IN_FLIGHT` requests each, of `SERVICE_S` seconds. Clients send 80 % of what
that allows for `--seconds`, then ten times that, and then the first load again, at fixed times
whatever comes back; no load waits for the answers to the one before, so the last one finds a full
queue. Answers of each load are counted that end while its requests are sent: from half of
`SERVICE_S` after the first can have ended to half of it before the last is sent.
`goodput_of_capacity`: those per second under the overload over what the workers can take; near 1
means that nothing collapses. `served_ms_p99_10x`: time of the answers under overload, which the
bounds of the queue allow to be `bound_ms`.
`refused_share_10x`: share that is answered 429, with `Retry-After` and a reason. `silent` answers
are neither served nor refused so, `hung` ones take longer than `HUNG_S`: none are expected.
Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import uvloop

from benchmarks.goals import goal_table
from benchmarks.measure import is_default, machine_line, percentile, publish, rounded
from benchmarks.router_process import running_router, wait_until_ready
from benchmarks.stub_fleet import StubFleet

WORKERS = 2
IN_FLIGHT = 8
SERVICE_S = 2.0
MAX_QUEUED = 16
HUNG_S = 60.0
CAPACITY_PER_S = WORKERS * IN_FLIGHT / SERVICE_S
_PATH = "/v1/completions"


@dataclass
class Outcomes:
    """The ends of the requests of one load."""

    begun_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    served_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    """The times at which answers ended."""

    @property
    def refused_share(self) -> float:
        return self.counts["refused"] / self.counts.total()

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
    elif (
        answer.status == 429
        and int(answer.headers.get("retry-after", "0")) >= 1
        and "x-heterocache-reason" in answer.headers
    ):
        outcomes.counts["refused"] += 1
    else:
        outcomes.counts["silent"] += 1


async def loads(
    session: aiohttp.ClientSession, url: str, rates: Sequence[float], seconds: float
) -> list[Outcomes]:
    """Send requests at each rate, one right after the other; return how all ended."""
    found = list[Outcomes]()
    async with asyncio.TaskGroup() as sending:
        for rate in rates:
            found.append(outcomes := Outcomes(time.monotonic()))
            for number in range(int(rate * seconds)):
                await asyncio.sleep(outcomes.begun_s + number / rate - time.monotonic())
                sending.create_task(send(session, url, outcomes))
            await asyncio.sleep(outcomes.begun_s + seconds - time.monotonic())
    return found


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
            found = await loads(session, url, (rate, 10 * rate, rate), seconds)
    fits, overload, _ = found
    fits_per_s, overload_per_s, after_per_s = (
        x.served_per_s(x.begun_s + 1.5 * SERVICE_S, x.begun_s + seconds - 0.5 * SERVICE_S)
        for x in found
    )
    queue_s = SERVICE_S * MAX_QUEUED / (WORKERS * IN_FLIGHT)
    return {
        "goodput_of_capacity": overload_per_s / CAPACITY_PER_S,
        "served_per_s": fits_per_s,
        "served_per_s_10x": overload_per_s,
        "served_per_s_after": after_per_s,
        "served_ms_p50": 1e3 * percentile(fits.served_s, 0.5),
        "served_ms_p99_10x": 1e3 * percentile(overload.served_s, 0.99),
        "bound_ms": 1e3 * (SERVICE_S + queue_s),
        "refused_share_10x": overload.refused_share,
        "silent": sum(x.counts["silent"] for x in found),
        "hung": sum(x.counts["hung"] for x in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_overload")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default 30)")
    given = parser.parse_args()
    if given.seconds <= 2 * SERVICE_S:
        parser.error(f"--seconds is more than {2 * SERVICE_S:g}: before, too few answers end")
    figures = uvloop.run(measure(given.seconds))
    text = f"{machine_line()}\n\n{goal_table('router_overload', figures)}"
    write = is_default(parser, given, free=("json",))
    publish("router_overload", text, rounded(figures), vars(given), as_json=given.json, write=write)


if __name__ == "__main__":
    main()
