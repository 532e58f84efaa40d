"""`python -m benchmarks.router_clients [--json]`: load generators of others through the router.

Each client of `benchmarks.clients` sends once to `heterocache router` before two servers with the
connector, which share a directory. What a client reports is held against what the router counted,
and against the servers. All are counts: times are not taken.

`requests`: answered ones of all clients, by their reports; `cancelled`: those that they left.
`errors`: failed ones by the clients' reports, and by the router's counters: answers with another
status than 200, requests sent again, streams that were cut, prefills for others that failed.
`uncounted`: requests by which a client's report and the router's answers differ, and those by which
its answers and its placements differ.
`cached_mismatch`: as in `benchmarks.clients`, for both servers together.
`exact_share`: share of placements that were `exact`.
`returned`: requests whose prompt begins as one that was answered before, in the same run.
`stayed_share`: share of them that went to a worker that answered the longest such prefix.
`reused_share`: prompt tokens that were not computed again, over those of these prefixes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.clients import (
    ENGINE_ARGUMENTS,
    MODEL,
    Client,
    Run,
    Target,
    argument_parser,
    chosen,
    run_client,
)
from benchmarks.live_fleet import LiveFleet
from benchmarks.measure import machine_line, publish, rounded, table
from examples.serving import stop_servers_on_sigterm
from ownership.decisions.records import DecisionRecord, decode
from ownership.scheduling.fleet import Role

WORKERS = 2
_ANSWERING = ("chat", "completions")
_EXTRA = {"dram_gib": 2}
_WITHIN_S = 60.0
_POLL_S = 0.1


class Counts(Counter[tuple[str, str]]):
    """The router's counters, by name and by what is told apart of it.

    `requests` are those for answers of a model. `vllm bench serve` also asks for tokens.
    """

    _LABELS: Mapping[str, str] = {
        "requests": "status",
        "placements": "certainty",
        "prefills": "result",
        "retried": "",
        "cut": "",
        "clients_left": "",
        "in_flight": "",
    }

    @classmethod
    def of(cls, metrics: str) -> Counts:
        """Read them from the text of `/metrics`."""
        found = cls()
        for family in text_string_to_metric_families(metrics):
            name = family.name.removeprefix("heterocache_router_")
            for sample in family.samples:
                if name not in cls._LABELS or sample.name.endswith("_created"):
                    continue
                if name == "requests" and sample.labels["path"] not in _ANSWERING:
                    continue
                found[name, sample.labels.get(cls._LABELS[name], "")] += int(sample.value)
        return found

    def total_of(self, name: str) -> int:
        return sum(count for (have, _), count in self.items() if have == name)


@dataclass(frozen=True)
class Passage:
    """One run of a client through the router."""

    run: Run
    counts: Counts
    """The increase of the router's counters."""
    decisions: Sequence[DecisionRecord]

    @property
    def errors(self) -> int:
        """Requests and prefills that did not go well at once, by the client and the router."""
        counts = self.counts
        other = counts.total_of("requests") - counts["requests", "200"]
        return sum(
            (
                self.run.report.errors,
                other,
                counts.total_of("retried"),
                counts.total_of("cut"),
                counts["prefills", "failed"],
            )
        )

    @property
    def uncounted(self) -> int:
        """Requests by which the client's report, the router's answers and its placements differ."""
        report = self.run.report
        sent = report.requests + report.errors + report.cancelled + report.unreported
        ended = self.counts.total_of("requests") + self.counts.total_of("clients_left")
        placed = self.counts.total_of("placements") - self.counts.total_of("retried")
        return abs(sent - ended) + abs(ended - placed)


@dataclass(frozen=True)
class Return:
    """A request whose prompt begins as others that were answered before."""

    tokens: int
    """The longest such prefix."""
    stayed: bool
    """True if it went to a worker that answered that one."""


def returns(decisions: Sequence[DecisionRecord]) -> list[Return]:
    """Find the requests that came back to a prefix, by the chunks of their prompts."""
    found = []
    for now in decisions:
        held: defaultdict[str, int] = defaultdict(int)
        for then in decisions:
            if then.first_byte_s is not None and then.time + then.total_s <= now.time:
                held[then.worker] = max(held[then.worker], _common(now, then))
        longest = max(held.values(), default=0)
        if longest:
            found.append(Return(longest * now.chunk_tokens, held[now.worker] == longest))
    return found


def _common(one: DecisionRecord, other: DecisionRecord) -> int:
    """Return the number of chunks that both prompts begin with."""
    pairs = zip(_numbers(one), _numbers(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _numbers(decision: DecisionRecord) -> list[int]:
    return [first + at for first, count in decision.chunks for at in range(count)]


class Router:
    """A running router, as its metrics and its file of decisions show it."""

    def __init__(self, url: str, decisions: Path) -> None:
        self.url, self._decisions = url, decisions

    def counts(self) -> Counts:
        """Return the counters once nothing is under way."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            counts = Counts.of(httpx.get(f"{self.url}/metrics", timeout=_WITHIN_S).text)
            if not counts.total_of("in_flight"):
                return counts
            if time.monotonic() > deadline:
                raise RuntimeError("requests are under way, but no client sends any")
            time.sleep(_POLL_S)

    def decisions(self, count: int) -> list[DecisionRecord]:
        """Return the newest ones, once so many are written altogether."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            lines = map(decode, self._decisions.read_bytes().splitlines())
            found = [line for line in lines if isinstance(line, DecisionRecord)]
            if len(found) >= count:
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(found)} decisions are written of {count}")
            time.sleep(_POLL_S)


Row = dict[str, int]
"""The counts of one client."""


def measure(
    clients: Mapping[str, Client], folder: Path, on_row: Callable[[str, Row], object]
) -> None:
    """Run each client through a router; tell what it, the router and the servers counted."""
    if not clients:
        return
    with LiveFleet(MODEL, WORKERS, folder, _EXTRA, ENGINE_ARGUMENTS) as fleet:
        roles = [Role.BOTH] * WORKERS
        log = folder / "decisions.jsonl"
        with fleet.router("ownerserve", roles, log) as (url, _):
            router = Router(url, log)
            target = Target(url, fleet.servers[0].model)
            for turn, (name, client) in enumerate(clients.items()):
                own = folder / name
                own.mkdir()
                before = router.counts()
                run = run_client(client, target, fleet.servers, turn, own)
                gained = router.counts()
                known, known_now = before.total_of("placements"), gained.total_of("placements")
                gained.subtract(before)
                row = row_of(Passage(run, gained, router.decisions(known_now)[known:]))
                print(f"{name}: {run}, {dict(gained)}", file=sys.stderr)
                on_row(name, row)


def row_of(passage: Passage) -> Row:
    """Return the counts of one client's run."""
    report, counts = passage.run.report, passage.counts
    back = returns(passage.decisions)
    return {
        "requests": report.requests,
        "cancelled": report.cancelled,
        "errors": passage.errors,
        "uncounted": passage.uncounted,
        "placements": counts.total_of("placements"),
        "exact": counts["placements", "exact"],
        "returned": len(back),
        "stayed": sum(one.stayed for one in back),
        "known_tokens": sum(one.tokens for one in back),
        "reused_tokens": passage.run.local_tokens + passage.run.external_tokens,
        "cached_mismatch": passage.run.mismatch,
    }


def summarised(rows: Mapping[str, Row]) -> tuple[str, dict[str, float]]:
    """Return a table by client, and the figures."""
    totals = Counter[str]()
    for row in rows.values():
        totals.update(row)
    shown = ("requests", "cancelled", "errors", "uncounted", "cached_mismatch", "returned")
    figures: dict[str, float] = {name: totals[name] for name in shown}
    figures["exact_share"] = totals["exact"] / totals["placements"]
    figures["stayed_share"] = totals["stayed"] / totals["returned"]
    figures["reused_share"] = totals["reused_tokens"] / totals["known_tokens"]
    cells = [[name, *(f"{row[column]:,}" for column in totals)] for name, row in rows.items()]
    head = ["client", *(name.replace("_", " ") for name in totals)]
    return f"{machine_line()}\n\n{table(head, cells)}", rounded(figures)


def main() -> None:
    parser = argument_parser("router_clients")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep rows here, and run what it lacks"
    )
    arguments = parser.parse_args()
    stop_servers_on_sigterm()
    clients = chosen(arguments)
    done = _read(arguments.resume)

    def keep(name: str, row: Row) -> None:
        done[name] = row
        if arguments.resume:
            with arguments.resume.open("a") as file:
                file.write(json.dumps({name: row}) + "\n")

    with tempfile.TemporaryDirectory(prefix="heterocache-clients-") as folder:
        lacking = {name: client for name, client in clients.items() if name not in done}
        measure(lacking, Path(folder), keep)
    rows = {name: done[name] for name in clients}
    text, figures = summarised(rows)
    publish("router_clients", text, figures, rows, as_json=arguments.json, write=not arguments.only)


def _read(path: Path | None) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            rows |= json.loads(line)
    return rows


if __name__ == "__main__":
    main()
