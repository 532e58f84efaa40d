"""`python -m benchmarks.faithful_pd --json`: compare the simulator with two servers.

The fleet of `examples.disaggregated_prefill` (one server prefills, one decodes, behind a proxy)
plays agent sessions, one request after the other, because the order of requests decides what is
evicted. The simulator plays them under `static_pd`, by a clock of steps. Tokens hit by tier and
bytes moved by flow and state type are compared server by server.

Times are compared with a second simulation. Its steps take what `heterocache calibrate` measured
just before; its handoffs and decodes take what those of other sessions took, played before and
after (`contention`). Compared are first tokens as the client sees them, and all answers of each
session together, without think times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.accounts import (
    CACHED_TOKENS,
    Account,
    RequestName,
    account_of_engine,
    accounts_apart,
    by_session,
    compared,
    gained,
    scraped,
)
from benchmarks.closed_loop import SessionText
from benchmarks.contention import Played, with_contention
from benchmarks.engine_process import CHECKPOINTS, EngineProcess
from benchmarks.faithful import SESSIONS, calibrated
from benchmarks.faithful import plain as plain_account
from benchmarks.faithful_engine import (
    EngineFacts,
    FaithfulEngine,
    policy_of,
    steps_alone_cost,
)
from benchmarks.measure import is_default, machine_line, publish, rounded, table
from benchmarks.synthetic_sessions import LogNormal, synthetic
from examples.disaggregated_prefill.fleet import Fleet, fleet_of, value
from examples.serving import Server, engine_arguments, stop_servers_on_sigterm
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.profile import CostProfile
from ownership.scheduling.fleet import Role
from ownership.simulator.traces.session import Request, Trace

PREFILL, DECODE = "prefill", "decode"
STEP_S = 0.01
POLICY = "static_pd+handoffs=tokens"
ONE_BY_ONE = replace(
    SESSIONS,
    fork_fraction=0.0,
    first_tokens=LogNormal(500, 900),
    context_tokens=1900,
    tool_latency_s=LogNormal(8, 20),
    think_s=LogNormal(15, 30),
)
"""Think times are so long that no two requests overlap."""
_CLAIMS_WITHIN_S = 30.0
_POLL_S = 0.2
_OTHERS = 5
"""Number of sessions that teach the cost of contention: one text before the compared sessions, and
another after them."""


class Setting(NamedTuple):
    """The settings of one model."""

    num_blocks: int
    """KV blocks, with room for a few prompts."""


SETTINGS = {"gemma3": Setting(700), "dense": Setting(110)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--quick", action="store_true", help="few sessions; writes no results")
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    given = parser.parse_args()
    stop_servers_on_sigterm()
    sessions = 2 if given.quick else 8
    found = {model: compare(model, sessions, timed=True) for model in given.models}
    figures = {model: headline(*pair) for model, pair in found.items()}
    tables = [f"{model}\n{report(*pair)}" for model, pair in found.items()]
    text = "\n\n".join([f"{machine_line()}; {sessions} sessions", *tables])
    details = {m: {"engines": plain(a), "simulated": plain(b)} for m, (a, b) in found.items()}
    write = is_default(parser, given, free=("json",))
    publish("faithful_pd", text, figures, details, as_json=given.json, write=write)


Accounts = dict[str, Account]
"""The account of each server."""


def compare(
    model: str, sessions: int, seed: int = 0, *, timed: bool = False
) -> tuple[Accounts, Accounts]:
    """Play sessions on servers and in the simulator. `timed`: compare times too."""
    limits = {"max_model_len": 3072, "num_gpu_blocks_override": SETTINGS[model].num_blocks}
    extra = {"dram_gib": 0.25, "checkpoints": "full", "chunk_tokens": 32}
    with EngineProcess(model, extra, FaithfulEngine, **limits) as engine:
        facts: EngineFacts = engine.call("facts")
    trace = drawn(facts.chunk_tokens, sessions, seed)
    other = drawn(facts.chunk_tokens, min(sessions, _OTHERS), seed + 1)
    by_steps = steps_alone_cost(facts.model, facts.limits.step_tokens, STEP_S)
    twin = simulated(facts, trace, by_steps)
    with tempfile.TemporaryDirectory() as folder:
        if timed:
            # As vLLM serves on CPUs, and not where the engine core is the caller's.
            in_a_process = {"distributed_executor_backend": "mp"}
            arguments = engine_arguments(model) | limits | in_a_process
            profile = calibrated(model, arguments, {"chunk_tokens": 32}, Path(folder))
        traces = [other, trace, other] if timed else [trace]
        fleet = fleet_of(model, CHECKPOINTS, Path(folder), extra=extra, engine_args=limits)
        with fleet as running:
            played = [play(running, each, seed=number) for number, each in enumerate(traces)]
    if not timed:
        return played[0], twin
    free = timed_by(facts, profile, other)
    others = [Played(other, took[DECODE], free) for took in (played[0], played[2])]
    profile = with_contention(profile, others)
    print(f"{profile.overhead}\n{profile.handoff}", file=sys.stderr)
    times = timed_by(facts, profile, trace)
    twin[DECODE] = replace(twin[DECODE], ttft_s=times.ttft_s, session_s=times.session_s)
    return played[1], twin


def drawn(block_tokens: int, sessions: int, seed: int) -> Trace:
    """Draw the sessions to play."""
    return synthetic(ONE_BY_ONE, sessions=sessions, rate=0.02, block_tokens=block_tokens, seed=seed)


def timed_by(facts: EngineFacts, profile: CostProfile, trace: Trace) -> Account:
    """Simulate what a client sees, with the times of a profile."""
    costs = profile.cost_model(facts.model.state_types, step_tokens=facts.limits.step_tokens)
    return simulated(facts, trace, costs)[DECODE]


def simulated(facts: EngineFacts, trace: Trace, costs: CostModel) -> Accounts:
    """Return the simulator's accounts."""
    worker = facts.worker(costs)
    workers = (
        replace(worker, name=PREFILL, role=Role.PREFILL),
        replace(worker, name=DECODE, role=Role.DECODE),
    )
    policy = policy_of("full", POLICY)
    prefill, decode = accounts_apart(trace, facts.fleet(workers), policy, facts.chunk_tokens)
    return {PREFILL: prefill, DECODE: decode}


def play(fleet: Fleet, trace: Trace, seed: int = 0) -> Accounts:
    """Send a trace through the proxy to servers whose prefix caches are empty.

    A request is sent when the one before it was answered and its claims were. `seed`: for the text
    of the prompts, which a trace does not record.
    """
    (prefiller,) = fleet.prefillers
    servers = {PREFILL: prefiller, DECODE: fleet.decoder}
    for server in servers.values():
        server.reset_prefix_cache()
    before = {name: scraped(server) for name, server in servers.items()}
    texts = [SessionText(session, number, seed) for number, session in enumerate(trace)]
    ttft_s: dict[RequestName, float] = {}
    answer_s: dict[RequestName, float] = {}
    for turn in one_by_one(trace, STEP_S):
        text = texts[turn.session]
        prompt = text.prompt(turn.number)
        begun_s = time.perf_counter()
        reply = fleet.proxy.complete(
            prompt, turn.request.output_tokens, 1, session_id=str(turn.session)
        )
        request = turn.session, turn.number
        ttft_s[request], answer_s[request] = reply.ttft_s, time.perf_counter() - begun_s
        text.answered(turn.number, prompt, reply.tokens)
        for server in servers.values():
            _wait_for_claims(server)
    accounts = {}
    for name, server in servers.items():
        if value(server, "evictions", tier="dram"):
            raise RuntimeError(f"{name} had too little DRAM, and _wait_for_claims needs all of it")
        counters = gained(scraped(server), before[name])
        cached_tokens = int(counters[CACHED_TOKENS, "", ""])
        accounts[name] = account_of_engine(counters, cached_tokens, {}, ())
    times = replace(accounts[DECODE], ttft_s=ttft_s, session_s=by_session(answer_s))
    return {**accounts, DECODE: times}


class Turn(NamedTuple):
    """A request that does not overlap with another."""

    session: int
    number: int
    request: Request


def one_by_one(trace: Trace, step_s: float) -> Iterator[Turn]:
    """Yield a trace's requests in the order of their arrivals, if every step takes `step_s`.

    A prompt takes a step at each server, each further token one at the decoder. Raises ValueError
    if a request arrives while another is served.
    """
    sessions = list(trace)
    due = [
        ((session.start_s or 0.0) + request.offset_s, number, index)
        for number, session in enumerate(sessions)
        for index, request in enumerate(session.requests)
        if request.parent is None
    ]
    heapify(due)
    free_s = 0.0
    while due:
        at_s, number, index = heappop(due)
        if at_s < free_s:
            raise ValueError(f"request {index} of session {number} comes while another is served")
        requests = sessions[number].requests
        yield Turn(number, index, requests[index])
        free_s = at_s + (1 + requests[index].output_tokens) * step_s
        for follower, request in enumerate(requests):
            if request.parent == index:
                heappush(due, (free_s + (request.think_s or 0.0), number, follower))


def _wait_for_claims(server: Server) -> None:
    """Wait until all claims of a server are answered."""
    deadline = time.monotonic() + _CLAIMS_WITHIN_S
    while not _are_claims_answered(server):
        if time.monotonic() > deadline:
            raise RuntimeError("a server does not come to rest")
        time.sleep(_POLL_S)


def _are_claims_answered(server: Server) -> bool:
    """Return True if so, for a server that has evicted nothing from DRAM."""
    owned = value(server, "directory_claims", outcome="owned")
    return owned + value(server, "replicas") >= value(server, "artifacts", tier="dram")


def headline(real: Accounts, twin: Accounts) -> dict[str, float | bool]:
    """Return ratios, simulated over real."""
    times = {what: simulated_s / real_s for what, real_s, simulated_s in _medians(real, twin)}
    times |= {f"{what}_one_by_one": median(ratios) for what, ratios in _ratios(real, twin)}
    return rounded(times) | {
        f"{name}_{what}_equal": getattr(real[name], what) == getattr(twin[name], what)
        for name in real
        for what in ("hit_tokens", "state_bytes")
    }


def plain(accounts: Accounts) -> dict[str, Any]:
    """Return accounts as JSON values."""
    return {name: plain_account(account) for name, account in accounts.items()}


def report(real: Accounts, twin: Accounts) -> str:
    rows: list[Sequence[str]] = [
        (f"{what}, median", f"{a:.4g} s", f"{b:.4g} s", f"{b / a:.2f}")
        for what, a, b in _medians(real, twin)
    ]
    rows += [
        (f"{what}, one by one", "", "", "{:.2f}, {:.2f}, {:.2f}".format(*quantiles(ratios, n=4)))
        for what, ratios in _ratios(real, twin)
    ]
    rows += [
        (f"{name}: {what}", *told)
        for name in real
        for what, *told in compared(real[name], twin[name])
    ]
    return table(("", "engines", "simulated", "ratio"), rows)


def _medians(real: Accounts, twin: Accounts) -> Iterator[tuple[str, float, float]]:
    one, other = real[DECODE], twin[DECODE]
    yield "ttft", median(one.ttft_s.values()), median(other.ttft_s.values())
    yield "session", median(one.session_s), median(other.session_s)


def _ratios(real: Accounts, twin: Accounts) -> Iterator[tuple[str, list[float]]]:
    """Yield simulated over real of each request, then of each session."""
    one, other = real[DECODE], twin[DECODE]
    yield "ttft", [other.ttft_s[name] / seconds for name, seconds in one.ttft_s.items()]
    yield "session", [b / a for a, b in zip(one.session_s, other.session_s, strict=True)]


if __name__ == "__main__":
    main()
