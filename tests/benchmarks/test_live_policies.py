"""The benchmark of policies on real servers, without servers."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchmarks import live_policies, live_redrawn
from benchmarks.live_client import Answered, Played, play
from benchmarks.live_fleet import Gained
from benchmarks.live_policies import (
    AGENTS,
    CHUNK,
    EVERYWHERE,
    OWN,
    POOLS,
    SETUPS,
    Run,
    compare,
    drawn,
    fitting_rate,
    headline,
    interval,
    is_close,
    worst,
)
from benchmarks.live_redrawn import Times, newest, simulated
from benchmarks.live_redrawn import compared as redrawn
from benchmarks.live_twin import Machine, Simulated, Where, compared
from benchmarks.scaled_sessions import scaled
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from ownership.scheduling.fleet import Role
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace
from tests.ownership.router.known_fleet import published
from tests.planner.chains import DENSE

_ANSWER = 7


class Server:
    """Answers with sevens, and keeps the prompts in the order in which they came."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, list[int]]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append((request.headers["x-session-id"], body["prompt"]))
        headers = {
            "x-heterocache-placement": "exact; action=colocated_prefill",
            "x-heterocache-worker": "w0",
        }
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        for _ in range(body["max_tokens"]):
            event = {"choices": [{"text": "", "token_ids": [_ANSWER]}]}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


def trace_of(*sessions: Session) -> Trace:
    return Trace("test", "test", 4, lambda: iter(sessions))


def request(tokens: int, answer: int, first: int, parent: int | None = None) -> Request:
    blocks = BlockRuns.of_runs([(first, tokens // 4)])
    answered = BlockRuns.of_runs([(first, (tokens + answer) // 4)])
    return Request(
        0.0, tokens, answer, blocks, parent, None if parent is None else 0.0, answered=answered
    )


def test_clients_continue_the_answers_they_get() -> None:
    fork = Session("a", (request(8, 4, 0), request(16, 2, 0, 0), request(20, 3, 0, 0)), 0.0)
    alone = Session("b", (request(8, 1, 100),), 0.0)
    server = Server()

    async def played() -> Played:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await play(
                site.name.replace("0.0.0.0", "127.0.0.1"), "m", trace_of(fork, alone), 0
            )
        finally:
            await runner.cleanup()

    found = asyncio.run(played())
    assert found.requests.keys() == {(0, 0), (0, 1), (0, 2), (1, 0)}
    first, *later = [prompt for session, prompt in server.prompts if session == "0"]
    for prompt in later:
        assert prompt[:12] == [*first, *[_ANSWER] * 4]
    assert sorted(map(len, later)) == [16, 20]
    assert len(found.requests[0, 2].gaps_s) == 2
    assert found.requests[0, 0].worker == "w0"
    assert found.task_s[0] >= found.requests[0, 0].answer_s
    assert len(found.answers_s) == 2


def run_of(*task_s: float, ttft_s: float = 0.5) -> Run:
    answered = Answered(0.0, 10, "exact", "w0", first_s=ttft_s, last_s=1.0, gaps_s=[0.5])
    played = Played({(0, 0): answered}, list(task_s), list(task_s), 1.0)
    return Run(played, Gained({}, 0, 1.0), Counter(), 0.5, 0.6, 0.4, 1.0)


def test_the_best_policy_is_what_ownerserve_is_compared_with() -> None:
    own = [run_of(2.0, 4.0), run_of(3.0, 6.0)]
    figures = headline({OWN: own, "a": [run_of(1.0, 3.5)], "b": [run_of(4.0, 8.0)]}, rounds=1)
    assert figures["last_over_first"] == 1.5
    assert figures["task_over_ownerserve"] == {OWN: 1.0, "a": 0.75, "b": 2.0}
    assert figures["live_over_best"] == pytest.approx(1 / 0.75, abs=1e-3)
    assert figures["interval"]["b"] == [2.0, 2.0]


def test_a_policy_that_played_one_round_is_compared_with_that_round() -> None:
    slow = run_of(8.0, 8.0, ttft_s=2.0)
    figures = headline({OWN: [run_of(2.0, 4.0), slow, slow], "a": [run_of(4.0, 8.0)]}, rounds=2)
    assert figures["task_over_ownerserve"] == {OWN: 1.0, "a": 2.0}
    assert figures["ttft_over_ownerserve"] == {OWN: 1.0, "a": 1.0}
    assert figures["interval"]["a"] == [2.0, 2.0]


def test_the_twin_is_as_good_as_in_the_worse_setup() -> None:
    three = {"placements_equal": 0.7, "simulated_over_real_task": 0.9}
    four = {"placements_equal": 0.6, "simulated_over_real_task": 0.98}
    assert worst([three, four]) == {"placements_equal": 0.6, "simulated_over_real_task": 0.9}


@pytest.mark.parametrize(("rate", "runs"), [(0.7, ["warm"]), (None, ["trial", "warm"])])
def test_a_rate_that_is_given_needs_no_trial(
    rate: float | None, runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class WarmError(Exception):
        """All runs before the costs are read have been played."""

    def costs(count: int) -> None:
        raise WarmError

    left = list(runs)
    fleet = SimpleNamespace(servers=[None], cores=1.5, costs=costs)
    monkeypatch.setattr(live_policies, "run", lambda *_: left.pop() and run_of(1.0))
    monkeypatch.setattr(live_policies, "fleet_of", lambda *_: nullcontext(fleet))
    monkeypatch.setattr(live_policies, "Machine", SimpleNamespace(of=lambda *_: None))
    given = Namespace(keep=tmp_path, policies=[], sessions=None, number=2, rate=rate)
    with pytest.raises(WarmError):
        compare("dense-bench", SETUPS["three"], given)
    assert left == []


@pytest.mark.parametrize(
    ("given", "is_published"),
    [
        ("", True),
        ("--rate 0.3 --rounds 2 --json", True),
        ("--policies dynamo", False),
        ("--setups three", False),
        ("--sessions trace.jsonl", False),
        ("--number 31", False),
        ("--model gemma3", False),
        ("--shared-cores", False),
        ("--no-losing-case", False),
    ],
)
def test_only_a_run_of_the_default_sessions_is_published(
    given: str, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[str, Any] = {}
    figures = {"live_over_best": 1.0, "sessions_per_s": 0.3, "twin": {"placements_equal": 0.7}}
    found = live_policies.Found("", figures, {})
    monkeypatch.setattr(sys, "argv", ["live_policies", *given.split()])
    monkeypatch.setattr(live_policies, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(live_policies, "slow_network", lambda _: nullcontext())
    monkeypatch.setattr(live_policies, "compare", lambda *_: found)
    monkeypatch.setattr(live_policies, "losing_case", lambda *_: live_policies.Found("", {}, {}))
    monkeypatch.setattr(
        live_policies, "publish", lambda *args, **kwargs: published.update(kwargs, details=args[3])
    )
    live_policies.main()
    assert published["write"] is is_published
    assert json.loads(json.dumps(published["details"]))["options"].keys() > {"number", "rate"}


@pytest.mark.parametrize(
    ("given", "is_published"),
    [("--rate 0.3", True), ("--rate 0.3 --draws 3", False), ("--rate 0.3 --number 3", False)],
)
def test_only_the_default_draws_are_published(
    given: str, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[str, Any] = {}
    times = dict.fromkeys((*EVERYWHERE, *POOLS), Times(np.ones(3), np.ones(3)))
    monkeypatch.setattr(sys, "argv", ["live_redrawn", *given.split()])
    monkeypatch.setattr(live_redrawn, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(live_redrawn, "machine_of", lambda _: None)
    monkeypatch.setattr(live_redrawn, "simulated", lambda *_: times)
    monkeypatch.setattr(
        live_redrawn, "publish", lambda *args, **kwargs: published.update(kwargs, details=args[3])
    )
    live_redrawn.main()
    assert published["write"] is is_published
    assert published["machine"] == json.loads(newest().read_text())["machine"]
    assert json.loads(json.dumps(published["details"]))["options"]["rate"] == 0.3


def test_policies_far_behind_play_one_round() -> None:
    own = run_of(2.0, 4.0)
    assert is_close(run_of(1.0, 1.0), own)
    assert is_close(run_of(2.5, 4.5), own)
    assert not is_close(run_of(3.0, 4.5), own)


def test_an_interval_is_over_sessions() -> None:
    own = np.array([[1.0] * 10])
    low, high = interval(np.array([[0.5] * 5 + [1.5] * 5]), own)
    assert low < 0.9 < 1.1 < high


def test_turns_are_compared_by_staying_and_moving() -> None:
    """Another name of the first worker is no other decision."""
    workers = ["w0", "w0", "w1"]
    requests = {
        (0, i): Answered(0.0, 10, "exact", at, first_s=1.0, last_s=2.0)
        for i, at in enumerate(workers)
    }
    real = Played(requests, [2.0], [6.0], 2.0)
    placed = dict(zip(requests, ("w1", "w1", "w1"), strict=True))
    ttft_s, answer_s = dict.fromkeys(requests, 0.5), dict.fromkeys(requests, 1.0)
    twin = Simulated(placed, ttft_s, answer_s, [1.0], [])
    found = compared(real, twin, twin._replace(are_equal=[True, False]))
    assert found["placements_equal"] == pytest.approx(1 / 2)
    assert found["turns_equal"] == pytest.approx(1 / 2)
    assert found["simulated_over_real_ttft"] == pytest.approx(0.5)
    assert found["simulated_over_real_answers"] == pytest.approx(0.5)


def machine_and_costs() -> tuple[Machine, CostProfile]:
    everything = StateShape.of(DENSE, CHUNK).request_bytes(400_000)
    machine = Machine(published("a"), TierBytes(everything, everything), EngineLimits(2048, 8))
    subject = ProfileSubject("A", "c", "float32", "", "auto", 1, "cpu")
    return machine, CostProfile("m", subject, ComputeCoefficients(0.005, 1e-4, 1e-9))


def test_a_fleet_that_follows_serves_where_the_other_one_did() -> None:
    trace = drawn(AGENTS, 4, 50.0, 0)
    machine, profile = machine_and_costs()
    names, roles = ["w0", "w1"], [Role.BOTH] * 2
    alone = machine.simulated(trace, OWN, names, roles, profile)
    there = {
        (session.id, request.input_tokens): Where("w1", "w1")
        for session in trace
        for request in session.requests
    }
    followed = machine.simulated(trace, OWN, names, roles, profile, there)
    assert "w0" in alone.workers.values()
    assert set(followed.workers.values()) == {"w1"}
    assert followed.workers.keys() == alone.workers.keys()
    assert 0.0 < sum(followed.are_equal) < len(followed.are_equal)


def test_draws_of_the_sessions_are_simulated_under_every_policy() -> None:
    machine, profile = machine_and_costs()
    times = simulated(machine, SETUPS["three"], profile, number=4, rate=50.0, seeds=[0, 7, 0])
    assert times.keys() == {*EVERYWHERE, *POOLS}
    for x in times.values():
        assert x.task_s[0] == x.task_s[2] != x.task_s[1]
        assert x.ttft_s[0] == x.ttft_s[2] != x.ttft_s[1]


def test_the_played_draw_is_shown_apart() -> None:
    own = Times(np.array([9.0, 1.0, 3.0]), np.array([1.0, 1.0, 1.0]))
    other = Times(np.array([18.0, 1.0, 1.0]), np.array([1.0, 0.5, 1.0]))
    figures = redrawn({OWN: own, "other": other}, {OWN: 1.0, "other": 1.9})
    assert figures["simulated"]["other"] == 2.0
    assert figures["real"]["other"] == 1.9
    assert figures["task_over_ownerserve"]["other"] == 0.5
    assert figures["ttft_over_ownerserve"]["other"] == 0.75
    assert figures["redrawn_over_best"] == 2.0
    low, high = figures["interval"]["other"]
    assert low == pytest.approx(1 / 3, abs=1e-3)
    assert high == 1.0


def test_costs_come_from_the_newest_result_with_all_setups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_redrawn, "RESULTS", tmp_path)
    for day, setups in ((27, SETUPS), (28, SETUPS), (29, ["three"])):
        result = json.dumps({"figures": {setup: {} for setup in setups}})
        (tmp_path / f"live_policies-2026-11-{day}.json").write_text(result)
    assert newest().name == "live_policies-2026-11-28.json"


def test_scaled_sessions_share_what_recorded_ones_shared() -> None:
    def recorded(tokens: int, runs: list[tuple[int, int]], parent: int | None) -> Request:
        think_s = None if parent is None else 30.0
        return Request(0.0, tokens, 640, BlockRuns.of_runs(runs), parent, think_s)

    long = Session("long", (recorded(64_000, [(9_000, 1_000)], None),), None, 0)
    session = Session(
        "s",
        (
            recorded(6_400, [(0, 100)], None),
            recorded(12_800, [(0, 200)], 0),
            recorded(3_200, [(0, 10), (500, 40)], 1),  # compacted
        ),
        None,
        640,
    )
    trace = Trace("t", "t", 64, lambda: iter([long, session]), starts_recorded=False)
    found = list(
        scaled(
            trace, sessions=5, rate=1.0, block_tokens=16, factor=10, think_factor=10,
            longest_think_s=2.0, max_turns=5, context_tokens=2_000, seed=0,
        )
    )  # fmt: skip
    assert [x.id for x in found] == ["s"]
    first, second, third = found[0].requests
    assert [x.input_tokens for x in (first, second, third)] == [640, 1_280, 320]
    assert first.answered is not None
    assert second.blocks.shared_with(first.answered) == first.answered.num_blocks
    assert third.blocks.shared_with(second.blocks) == found[0].preamble_tokens // 16
    assert second.think_s == 2.0


def test_drawn_sessions_fit_the_engine() -> None:
    for session in drawn(AGENTS, 20, 1.0, 0):
        for each in session.requests:
            assert each.input_tokens + each.output_tokens < 4_096


def test_the_rate_fits_the_machine() -> None:
    tried = run_of(*[1.0] * 30)
    tried = replace(tried, busy=0.5, played=replace(tried.played, span_s=200.0))
    # A session takes 0.5 * 1.5 * 200 / 30 = 5 s of CPU time; 0.75 of 1.5 cores are to be used.
    assert fitting_rate(tried, 1.5) == pytest.approx(0.225)
