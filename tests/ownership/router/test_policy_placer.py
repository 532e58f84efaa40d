"""Placing by policy."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from hetero_connector.errors import DirectoryUnavailableError, RouterConfigError
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from ownership.router.doors import DOORS
from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.opening import open_identity
from ownership.router.policy_placer import PolicyPlacer, _Planned
from ownership.router.reports import reported_load
from ownership.router.shared_ledger import SharedLedger
from ownership.router.view import Certainty, FleetChains, PrefixViews, PromptView, Reason, Trust
from ownership.scheduling import Work, WorkerLoad
from ownership.scheduling.decision import Placement, PlacementAction
from ownership.scheduling.fleet import Role
from ownership.scheduling.ledger import Ledger
from ownership.scheduling.registry import POLICIES, scheduling_policy
from ownership.scheduling.step import Step, WorkerPrefix
from tests.ownership.router.bench import RunningRouter, config_of
from tests.ownership.router.known_fleet import (
    PROMPT,
    SIZE,
    KnownFleet,
    published,
    running,
    worker_of,
)
from tests.ownership.router.test_admission import request
from tests.ownership.router.test_streams import begin
from tests.ownership.router.test_workers import workers_of
from tests.ownership.scheduling.fleets import fleet_of
from tests.ownership.scheduling.fleets import worker as fleet_worker
from tests.planner.chains import DENSE, costs_of
from tests.waiting import until


@pytest.fixture
def known(fleet: StubFleet, tmp_path: Path) -> Iterator[KnownFleet]:
    with running(fleet, tmp_path) as found:
        yield found


@pytest.mark.parametrize("holder", [0, 1])
def test_a_request_goes_to_the_worker_that_has_its_prefix(known: KnownFleet, holder: int) -> None:
    known.store(holder, 18)
    for _ in range(3):
        answer = known.complete()
        assert worker_of(answer) == known.names[holder]
        assert answer.headers["x-heterocache-placement"] == "exact; action=colocated_prefill"
    shown = known.router.metric("placements_total", action="colocated_prefill", certainty="exact")
    assert shown == 3


def test_a_session_stays_where_it_was_served_before_the_directory_knows(known: KnownFleet) -> None:
    slow = {"stream": True, "stub": {"events": 8, "gap_s": 0.5}}
    first, second = sorted(known.names)
    other = threading.Thread(target=lambda: known.complete("other", **slow))
    other.start()
    until(lambda: known.router.metric("in_flight", worker=first) == 1)
    assert worker_of(known.complete("s")) == second, "the first of them is busy"
    other.join()
    assert {worker_of(known.complete("s")) for _ in range(4)} == {second}


@pytest.mark.parametrize(
    ("known_tokens", "reason", "left"),
    [
        (SIZE, "media", [SIZE, len(PROMPT), len(PROMPT)]),
        (0, "tokens_differ", [0, len(PROMPT), len(PROMPT)]),
        (0, "directory_failed", [len(PROMPT), 0, len(PROMPT)]),
    ],
)
def test_a_session_stays_where_it_was_served_if_the_view_has_less_of_it(
    known: KnownFleet,
    monkeypatch: pytest.MonkeyPatch,
    known_tokens: int,
    reason: str,
    left: list[int],
) -> None:
    """After an image, of other names, or if only servers with KV events are known."""
    prefix = WorkerPrefix(known_tokens, known_tokens, known_tokens)
    prefixes = dict.fromkeys(known.names, prefix) if known_tokens else {}

    async def find(path: str, body: object, now_s: float) -> PromptView:
        if reason == Reason.DIRECTORY_FAILED:
            known.views._breaker.on_failure()
        return PromptView(len(PROMPT), prefixes, Certainty.DEGRADED, (reason,))

    monkeypatch.setattr(known.views, "find", find)
    test_a_session_stays_where_it_was_served_before_the_directory_knows(known)
    until(lambda: len(known.decisions()) == 6)
    last = known.decisions()[-1]
    told = {name: list(prefix) for name in prefixes}
    assert last["prefixes"] == told | {last["worker"]: left}


def test_a_session_has_the_longest_of_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        PromptView(5_000, {}, Certainty.DEGRADED, ("unchecked",), other_tokens=4_000),
        PromptView(3_000, {}, Certainty.DEGRADED, ("unchecked",)),
    ]

    async def find(path: str, body: object, now_s: float) -> PromptView:
        return seen.pop(0)

    _, workers = workers_of("a")
    views = PrefixViews(PromptIdentity(None, ChainCache()), FleetChains(), Trust(), None)
    monkeypatch.setattr(views, "find", find)
    placer = PolicyPlacer(scheduling_policy("ownerserve", Random(0)), views, WorkerFigures())
    asked = request()
    asked.door, asked.headers = DOORS["/v1/completions"], [(b"x-session-id", b"s")]
    asked.is_stream = True

    async def play() -> Step:
        first = await placer.place(asked, lambda: workers)
        assert isinstance(first, _Planned)
        assert first.step.prompt_tokens == 5_000
        placer.on_sent(first, 0.0)
        placer.on_first_byte(first, 0.1)
        placer.on_ended(first, 7, 0.2)
        second = await placer.place(asked, lambda: workers)
        assert isinstance(second, _Planned)
        return second.step

    step = asyncio.run(play())
    views.close()
    assert step.prefixes == {"a": WorkerPrefix(1_007, 0, 1_007)}


@pytest.mark.parametrize("reason", [Reason.DIRECTORY_FAILED, Reason.TOKENS_DIFFER])
def test_a_busy_workers_session_is_read_by_another_only_if_that_can_find_it(
    monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    async def find(path: str, body: object, now_s: float) -> PromptView:
        if reason is Reason.DIRECTORY_FAILED:
            views._breaker.on_failure()
        return PromptView(20_000, {}, Certainty.DEGRADED, (reason,))

    _, workers = workers_of("a", "b")
    chains = FleetChains()
    for name in ("a", "b"):
        chains.told(name, [published(name)], 0.0)
    views = PrefixViews(PromptIdentity(None, ChainCache()), chains, Trust(), None)
    monkeypatch.setattr(views, "find", find)
    placer = PolicyPlacer(scheduling_policy("ownerserve", Random(0)), views, WorkerFigures())
    asked = request()
    asked.door, asked.headers = DOORS["/v1/completions"], [(b"x-session-id", b"s")]

    async def play() -> tuple[str, Placement]:
        first = await placer.place(asked, lambda: workers)
        assert isinstance(first, _Planned)
        placer.on_sent(first, 0.0)
        placer.on_first_byte(first, 0.1)
        placer.on_ended(first, 0, 0.2)
        assert first.first_token is not None
        assert first.first_token.cancelled()
        owner, ledger = first.worker.name, placer.ledger
        assert ledger is not None
        ledger.sent("other", Work(owner, owner, 10**6, 10**6), 0.2)
        second = await placer.place(asked, lambda: workers)
        assert isinstance(second, _Planned)
        return owner, second.placement

    owner, placement = asyncio.run(play())
    views.close()
    assert placement.decode_worker != owner
    assert placement.source_worker == (owner if reason is Reason.TOKENS_DIFFER else None)


@pytest.mark.parametrize("policy", ["ownerserve", "conductor", "static_pd"])
@pytest.mark.parametrize(
    ("other", "reads"),
    [({}, True), ({"root": b"other"}, False), ({"chunk_tokens": 128}, False), (None, False)],
)
def test_nothing_is_fetched_or_handed_off_between_workers_that_cannot_read_each_other(
    monkeypatch: pytest.MonkeyPatch, policy: str, other: dict[str, Any] | None, reads: bool
) -> None:
    """The worker with nearly all of the prompt is busy. The other names chains otherwise, or has
    no connector."""

    async def find(path: str, body: object, now_s: float) -> PromptView:
        return PromptView(20_000, {"a": WorkerPrefix(0, 19_968, 19_968)}, Certainty.EXACT)

    _, workers = workers_of("a", "b")
    chains = FleetChains()
    chains.told("a", [published("a")], 0.0)
    chains.told("b", [] if other is None else [replace(published("b"), **other)], 0.0)
    views = PrefixViews(PromptIdentity(None, ChainCache()), chains, Trust(), None)
    monkeypatch.setattr(views, "find", find)
    placer = PolicyPlacer(scheduling_policy(policy, Random(0)), views, WorkerFigures())
    is_apart = policy == "static_pd"
    roles = (Role.PREFILL, Role.DECODE) if is_apart else (Role.BOTH, Role.BOTH)
    placer.set_workers(dict(zip("ab", roles, strict=True)), 0.0)
    assert placer.ledger is not None
    placer.ledger.sent("other", Work("a", "a", 10**6, 10**6), 0.0)
    asked = request()
    asked.door, asked.body = DOORS["/v1/completions"], b'{"prompt": "x"}'
    placed = asyncio.run(placer.place(asked, lambda: workers))
    views.close()
    assert isinstance(placed, _Planned)
    placement = placed.placement
    assert placement.decode_worker == "b"
    assert "a" in {placement.source_worker, placement.prefill_worker} or not reads
    assert reads or {placement.source_worker, placement.prefill_worker} == {None, "b"}


@pytest.mark.parametrize("takes_requests", [False, True])
@pytest.mark.parametrize("has_told", [False, True])
@pytest.mark.parametrize("unlisted", ["", "c"])
def test_a_worker_that_takes_no_requests_stops_no_handoff_between_the_others(
    monkeypatch: pytest.MonkeyPatch, *, takes_requests: bool, has_told: bool, unlisted: str
) -> None:
    """One that is down has told nothing, and is not in the directory; one that drains may have
    other weights."""

    async def find(path: str, body: object, now_s: float) -> PromptView:
        return PromptView(20_000, {}, Certainty.EXACT)

    _, workers = workers_of(*"abc")
    chains = FleetChains()
    for name in "ab":
        chains.told(name, [published(name)], 0.0)
    if has_told:
        chains.told("c", [replace(published("c"), root=b"other")], 0.0)
    views = PrefixViews(PromptIdentity(None, ChainCache()), chains, Trust(), None)
    views.unlisted = frozenset(unlisted)
    monkeypatch.setattr(views, "find", find)
    placer = PolicyPlacer(scheduling_policy("static_pd", Random(0)), views, WorkerFigures())
    placer.set_workers({"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE}, 0.0)
    asked = request()
    asked.door, asked.body = DOORS["/v1/completions"], b'{"prompt": "x"}'
    present = list(workers) if takes_requests else list(workers)[:2]
    placed = asyncio.run(placer.place(asked, lambda: present))
    views.close()
    assert isinstance(placed, _Planned)
    at = "b" if takes_requests else "a"
    assert (placed.placement.prefill_worker, placed.placement.decode_worker) == (at, "b")


@pytest.mark.parametrize("c_has_told", [True, False])
@pytest.mark.parametrize("b_is_listed", [True, False])
def test_one_worker_that_others_cannot_read_stops_no_fetch_between_those(
    monkeypatch: pytest.MonkeyPatch, c_has_told: bool, b_is_listed: bool
) -> None:
    """The prompt is at a, which is busy, and so is b somewhat; c is idle, and names chains
    otherwise or has not told."""
    held = {"a": WorkerPrefix(0, 19_968, 19_968)}

    async def find(path: str, body: object, now_s: float) -> PromptView:
        return PromptView(20_000, held, Certainty.EXACT)

    _, workers = workers_of("a", "b", "c")
    chains = FleetChains()
    told = [replace(published("c"), root=b"other")] if c_has_told else []
    for name, engines in {"a": [published("a")], "b": [published("b")], "c": told}.items():
        chains.told(name, engines, 0.0)
    views = PrefixViews(PromptIdentity(None, ChainCache()), chains, Trust(), None)
    views.unlisted = frozenset() if b_is_listed else frozenset({"b"})
    monkeypatch.setattr(views, "find", find)
    placer = PolicyPlacer(scheduling_policy("ownerserve", Random(0)), views, WorkerFigures())
    placer.set_workers(dict.fromkeys("abc", Role.BOTH), 0.0)
    assert placer.ledger is not None
    placer.ledger.sent("other", Work("a", "a", 10**6, 10**6), 0.0)
    placer.ledger.sent("another", Work("b", "b", 100, 100), 0.0)
    asked = request()
    asked.door, asked.body = DOORS["/v1/completions"], b'{"prompt": "x"}'
    placed = asyncio.run(placer.place(asked, lambda: workers))
    views.close()
    assert isinstance(placed, _Planned)
    placement = placed.placement
    found = (placement.decode_worker, placement.prefill_worker, placement.source_worker)
    assert found == (("b", "b", "a") if b_is_listed else ("c", "c", None))


def test_an_answer_that_is_not_streamed_counts_as_begun_when_that_is_predicted(
    known: KnownFleet,
) -> None:
    """Its first byte comes at its end."""
    stub = {"first_s": 600}
    with begin(known.router, prompt=PROMPT, stub=stub, stream=True):
        until(lambda: sum(known.router.metric("in_flight", worker=x) for x in known.names))
        ledger = known.placer.ledger
        assert ledger is not None
        [streams] = [x for x in known.names if ledger.own(x).prefilling]
        [other] = {*known.names} - {streams}
        with begin(known.router, prompt=PROMPT, stub=stub):
            until(lambda: ledger.own(other).decoding == 1)
            assert ledger.own(streams).prefilling == 1, "its first token will be seen"
    until(lambda: len(known.decisions()) == 2)
    assert [line["first_byte_s"] for line in known.decisions()] == [None, None]
    assert known.router.metric("first_byte_seconds_count", path="completions") == 0


def test_a_body_that_is_no_utf8_goes_to_a_worker_which_says_so(known: KnownFleet) -> None:
    answer = known.router.client.post("/v1/completions", content=b'{"prompt": "\xff"}')
    assert "x-heterocache-worker" in answer.headers
    assert answer.headers["x-heterocache-placement"].startswith("blind")


def test_no_more_tokens_are_expected_than_the_request_allows(known: KnownFleet) -> None:
    for limit in ({"max_tokens": 4}, {"max_tokens": 10**6}, {"max_tokens": "many"}, {}):
        known.complete(**limit)
    until(lambda: len(known.decisions()) == 4)
    expected = [line["expected_output_tokens"] for line in known.decisions()]
    assert expected == [4, 256, 256, 256]


def test_sessions_that_run_at_once_spread(known: KnownFleet) -> None:
    slow = {"stream": True, "stub": {"events": 8, "gap_s": 0.5}}
    found = list[str]()
    threads = [
        threading.Thread(target=lambda s=s: found.append(worker_of(known.complete(s, **slow))))
        for s in "xy"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(known.names)


def test_without_its_directory_the_router_counts_on_its_own_sessions(
    known: KnownFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chain: object) -> None:
        raise DirectoryUnavailableError("gone")

    monkeypatch.setattr(known.directory, "lookup", fail)
    first = known.complete("s", stream=True)
    assert first.headers["x-heterocache-placement"].startswith("blind; ")
    assert 'reasons="directory_failed"' in first.headers["x-heterocache-placement"]
    for _ in range(5):  # then the directory is given a pause, which is a reason of its own
        again = known.complete("s")
        assert again.headers["x-heterocache-placement"].startswith("degraded; ")
        assert worker_of(again) == worker_of(first)
    assert known.complete("other").headers["x-heterocache-placement"].startswith("blind; ")
    assert known.router.metric("doubts_total", reason="directory_failed") >= 1


def test_each_decision_is_a_line_with_what_was_predicted_and_what_came(known: KnownFleet) -> None:
    known.store(1, 10)
    known.complete("secret", stream=True, stub={"events": 5})
    known.router.complete("/v1/embeddings", input="x")
    until(known.decisions)
    [line] = known.decisions()
    assert (line["worker"], line["policy"]) == (known.names[1], "ownerserve")
    assert (line["certainty"], line["costs"], line["failed"]) == ("exact", "default", False)
    assert line["prompt_tokens"] == len(PROMPT)
    assert line["prefixes"] == {known.names[1]: [0, 10 * SIZE, 10 * SIZE]}
    assert 0.0 < line["first_byte_s"] <= line["total_s"]
    assert line["predicted_ttft_s"] > 0.0
    assert line["events"] >= 5
    assert "secret" not in known.lines.read_text()


def test_each_sending_to_a_worker_that_is_lost_is_a_line(known: KnownFleet) -> None:
    known.store(0, 15)
    assert known.router.complete(prompt=PROMPT, stub={"fault": "lose"}).status_code == 502
    until(lambda: len(known.decisions()) == 2)
    found = [(x["worker"], x["failed"]) for x in known.decisions()]
    first, second = known.names
    assert found == [(first, True), (second, True)]


def test_nothing_is_learned_from_an_answer_that_is_an_error(
    known: KnownFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(path: str, body: object, now_s: float) -> PromptView:
        return PromptView(len(PROMPT), {}, Certainty.DEGRADED, ())

    monkeypatch.setattr(known.views, "find", find)
    headers, body = {"x-session-id": "s"}, {"prompt": PROMPT, "stream": True}
    answer = known.router.complete(headers=headers, stub={"fault": "fail"}, **body)
    assert answer.status_code == 500
    known.complete("s", stream=True)
    until(lambda: len(known.decisions()) == 2)
    failed, later = known.decisions()
    assert (failed["first_byte_s"], failed["events"], failed["failed"]) == (None, None, True)
    assert later["expected_output_tokens"] == 256
    assert later["prefixes"] == {}, "the worker has computed nothing"
    assert known.router.metric("first_byte_seconds_count", path="completions") == 1


def test_media_in_a_body_whose_tokens_are_not_known_are_no_text(known: KnownFleet) -> None:
    image = "A" * 1_000_000
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    source = {"type": "base64", "media_type": "image/png", "data": image}
    audio = {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{image}"}}
    text = {"type": "text", "text": "x" * 4_000}
    for path, part in (
        ("chat/completions", url),
        ("chat/completions", audio),
        ("messages", {"type": "image", "source": source}),
    ):
        for separators in ((",", ":"), (", ", ": ")):
            body = {"messages": [{"role": "user", "content": [part, text, part]}]}
            content = json.dumps(body, separators=separators)
            assert known.router.client.post(f"/v1/{path}", content=content).status_code == 200
    until(lambda: len(known.decisions()) == 6)
    assert all(1_000 <= line["prompt_tokens"] < 1_200 for line in known.decisions())


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_place_each_request(policy: str, fleet: StubFleet, tmp_path: Path) -> None:
    with running(fleet, tmp_path, policy) as known:
        known.store(1, 15)
        for session in ("a", "b", "a"):
            assert worker_of(known.complete(session)) in known.names
        until(lambda: len(known.decisions()) == 3)
        assert {x["policy"] for x in known.decisions()} == {policy}
        assert not [x for x in known.decisions() if x["failed"]]


def test_what_workers_tell_of_themselves_is_in_the_view() -> None:
    figures = WorkerFigures()
    subject = ProfileSubject("A", "c", "bfloat16", "", "auto", 1, "")
    costs: CostModel = costs_of(DENSE, (0.5, 0.25, 0.125))
    costs.step_tokens = 2_048
    profile = CostProfile.of(costs, "m", subject).as_json()
    metrics = (
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        'heterocache_capacity_bytes{engine="0",model_name="m",tier="dram"} 3e+09\n'
        'heterocache_capacity_bytes{engine="0",model_name="m",tier="ssd"} 7e+09\n'
        'heterocache_capacity_bytes{engine="1",model_name="m",tier="dram"} 1e+09\n'
    )

    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        return metrics if path == "/metrics" else {"engines": [{"costs": profile}]}

    async def refuse(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        raise ValueError("status 404")

    asyncio.run(figures.ask_all({"one": ask, "two": refuse}))
    assert [figures.costs_of(x) for x in ("one", "two")] == ["learned", "default"]
    view = figures.fleet({"one": Role.DECODE, "two": Role.BOTH}, [published("a")])
    assert view.table().machine.step_s.tolist()[0] == pytest.approx(0.5)
    assert view.table().machine.step_s.tolist()[1] < 0.1
    told, untold = view.table().machine.step_tokens.tolist()
    assert told == 2_048.0
    assert untold > 1e15, "one step"
    assert view.hbm_bytes("one") == int(1600 * view.footprint.page_bytes_per_token)
    assert view.table().machine.cache_bytes.tolist() == [4e9, 0.0]
    assert view.decode_pool == (0,)
    assert view.hbm_bytes("two") > view.hbm_bytes("one")
    asyncio.run(figures.ask_all({"two": refuse}))
    assert figures.costs_of("one") == "default"


@pytest.mark.parametrize(
    "answer", [{"engines": 5}, 'heterocache_capacity_bytes{tier="dram"} inf', [], 5]
)
def test_an_odd_answer_costs_no_other_worker_its_figures(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    figures, told = WorkerFigures(), list[str]()

    async def odd(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        return answer

    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        await asyncio.sleep(0)
        told.append(path)
        return ""

    caplog.set_level("INFO")
    asyncio.run(figures.ask_all({"odd": odd, "right": ask}))
    assert told == ["/metrics", "/v1/heterocache/costs"]
    assert "worker odd has default costs" in caplog.text


@pytest.mark.parametrize("has_connector", [False, True])
def test_metrics_are_read_until_they_have_said_all(has_connector: bool) -> None:
    """A worker without the connector has no store. An engine tells the size of its own with the
    first step."""
    page = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    sizes = 'heterocache_capacity_bytes{engine="0",model_name="m",tier="dram"} 3e+09\n'
    pages = [page, page, page + sizes, page + sizes]
    left = list(pages)
    subject = ProfileSubject("A", "c", "bfloat16", "", "auto", 1, "")
    told = CostProfile.of(costs_of(DENSE, (0.5, 0.25, 0.125)), "m", subject).as_json()

    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if path == "/metrics":
            return left.pop(0)
        if not has_connector:
            raise ValueError("status 404")
        return {"engines": [{"costs": told}]}

    figures = WorkerFigures()
    for _ in pages:
        asyncio.run(figures.ask_all({"one": ask}))
    assert len(left) == (1 if has_connector else 3)
    view = figures.fleet({"one": Role.BOTH}, [published("a")])
    assert view.hbm_bytes("one") == int(1600 * view.footprint.page_bytes_per_token)
    assert view.table().machine.cache_bytes.tolist() == [3e9 if has_connector else 0.0]


def test_a_bug_of_the_router_is_no_odd_answer() -> None:
    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        raise AttributeError("a bug")

    with pytest.raises(AttributeError):
        asyncio.run(WorkerFigures().ask_all({"one": ask}))


def test_costs_are_made_again_when_a_worker_has_learned_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures, made = WorkerFigures(), list[float]()
    subject = ProfileSubject("A", "c", "bfloat16", "", "auto", 1, "")
    make = CostProfile.cost_model

    def counted(profile: CostProfile, *given: Any) -> CostModel:
        made.append(profile.compute.step_s)
        return make(profile, *given)

    monkeypatch.setattr(CostProfile, "cost_model", counted)

    def step_s(learned_s: float) -> float:
        costs: CostModel = costs_of(DENSE, (learned_s, 0.25, 0.125))
        told = {"engines": [{"costs": CostProfile.of(costs, "m", subject).as_json()}]}

        async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
            return "" if path == "/metrics" else told

        asyncio.run(figures.ask_all({"one": ask}))
        view = figures.fleet({"one": Role.BOTH}, [published("a")])
        return float(view.table().machine.step_s.item())

    assert [step_s(x) for x in (0.5, 0.5, 0.25, 0.25, 0.5)] == pytest.approx(
        [0.5, 0.5, 0.25, 0.25, 0.5]
    )
    assert made == pytest.approx([0.5, 0.25, 0.5])
    figures.fleet({"one": Role.BOTH}, [])
    assert len(made) == 4  # another model's state types


def test_the_policy_follows_from_what_is_configured(tmp_path: Path) -> None:
    workers = ["http://h:1"]
    assert config_of(tmp_path, workers=workers).policy_name == "least_loaded"
    known = config_of(tmp_path, workers=workers, directory="memory://")
    assert known.policy_name == "ownerserve"
    chosen = config_of(tmp_path, workers=workers, directory="memory://", policy="prefix_aware")
    assert chosen.policy_name == "prefix_aware"
    wrong = {"model_path": 5, "policy": "nearest", "decisions": "/no/such/file"}
    with pytest.raises(RouterConfigError) as error:
        config_of(tmp_path, workers=workers, **wrong)
    for key in wrong:
        assert f"{key}: " in str(error.value)
    apart = [{"url": "http://h:1", "role": "prefill"}, "http://h:2"]
    with pytest.raises(RouterConfigError, match="static_pd needs a worker with `role: decode`"):
        config_of(tmp_path, workers=apart, policy="static_pd")
    absent = config_of(tmp_path, workers=workers, model_path="/no/such/model")
    with pytest.raises(RouterConfigError, match="model_path: cannot find the files of model"):
        open_identity(absent)


def test_load_that_other_clients_send_to_a_worker_is_seen(fleet: StubFleet, tmp_path: Path) -> None:
    config = config_of(tmp_path, workers=fleet.urls, policy="ownerserve", probe_s=0.1)
    with RunningRouter(config) as router:
        for busy, idle in (fleet.urls, fleet.urls[::-1]):
            slow = {"stream": True, "stub": {"events": 10_000, "gap_s": 0.05}}
            with httpx.stream("POST", f"{busy}/v1/completions", json=slow) as answer:
                parts = answer.iter_raw()
                next(parts)
                places = [""] * 6
                until(lambda p=places, u=idle: placed_next(router, p) == {u[7:]})


def placed_next(router: RunningRouter, places: list[str]) -> set[str]:
    """Send a request, and return the workers of the newest ones."""
    places[:] = [*places[1:], worker_of(router.complete(prompt="x"))]
    return set(places)


def test_a_load_is_read_from_the_metrics_of_all_engines() -> None:
    metrics = (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        'vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 3000.0\n'
        'vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10.0\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    )
    assert reported_load(metrics) == WorkerLoad(600, 2, 4, 800)
    assert reported_load("python_info 1.0\n") is None
    without = "\n".join(x for x in metrics.splitlines() if "tokens_sum" not in x)
    assert reported_load(without) == WorkerLoad(0, 2, 4, 800)


@pytest.mark.parametrize("has_byte", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_first_token_that_was_only_predicted_computes_no_turn(
    is_shared: bool, has_byte: bool
) -> None:
    """The client of an answer that is not streamed gives up before it has a byte."""
    placer, views = a_placer()
    fleet = fleet_of(fleet_worker("a"), fleet_worker("b"))
    ledger = SharedLedger("x", fleet) if is_shared else Ledger(fleet)
    peer = SharedLedger("y", fleet_of(fleet_worker("a"), fleet_worker("b")))
    if isinstance(ledger, SharedLedger):
        peer.take_in(ledger.take_message(0.0), 0.0, 0.0)  # the first one has only what is open
    placer._ledger = ledger
    placed = handed_off("b", "b", 1_000)
    work = Work.of(placed.step, placed.placement)._replace(session_id="s")
    ledger.sent(placed, work, 0.0)
    ledger.first_token(placed, 1.0)  # at the time that was predicted
    once = ledger.view(1.0).prefill_demand
    if has_byte:
        placer.on_first_byte(placed, 2.0)
    placer.on_ended(placed, 0, 2.0)
    assert len(ledger) == 0
    assert ledger.view(1.0).prefill_demand == pytest.approx(once)
    heard: list[Ledger] = [ledger]
    if isinstance(ledger, SharedLedger):
        peer.take_in(ledger.take_message(2.0), 2.0, 2.0)
        heard.append(peer)
    for one in heard:
        assert (one.sessions.last_turn("s") is not None) == has_byte
    views.close()


def a_placer() -> tuple[PolicyPlacer, PrefixViews]:
    """Return a placer that knows no worker yet, and its views, which the test closes."""
    views = PrefixViews(PromptIdentity(None, ChainCache()), FleetChains(), Trust(), None)
    policy = scheduling_policy("ownerserve", Random(0))
    return PolicyPlacer(policy, views, WorkerFigures()), views


def handed_off(decoder: str, prefiller: str, prompt_tokens: int, **changed: Any) -> _Planned:
    """Return a request whose prompt another worker computes. `changed`: of the request."""
    [worker] = workers_of(decoder)[1]
    any_terms: Any = None
    return _Planned(
        request=replace(request(), **changed),
        worker=worker,
        step=Step(prompt_tokens=prompt_tokens),
        placement=Placement(PlacementAction.REMOTE_PREFILL, decoder, prefiller),
        view=PromptView(prompt_tokens, {}, Certainty.BLIND),
        terms=any_terms,
        decision=None,
        decoded={},
    )


@pytest.mark.parametrize(
    ("answer", "problem", "prefills"),
    [(b"{}", "", 1), (b"no JSON", "", 2), (b"", "the worker was lost", 1)],
)
def test_a_prefill_is_demand_as_often_as_it_was_computed(
    answer: bytes, problem: str, prefills: int
) -> None:
    """After an answer that cannot be read the other worker computes it once more."""
    placer, views = a_placer()
    placer._ledger = ledger = Ledger(fleet_of(fleet_worker("a"), fleet_worker("b")))
    placed = handed_off("b", "a", 1_000, is_stream=True)
    ledger.sent(placed, Work.of(placed.step, placed.placement), 0.0)
    once = ledger.view(0.0).prefill_demand
    placer.on_prefilled(placed, answer, problem, 0.0)
    assert ledger.view(0.0).prefill_demand == pytest.approx(prefills * once)
    views.close()


def test_a_prefill_that_fails_after_its_decoder_left_the_fleet_costs_no_answer() -> None:
    """The worker ends what it has begun, and is not in the ledger any more."""
    placer, views = a_placer()
    placer._ledger = Ledger(fleet_of(fleet_worker("a")))
    placed = handed_off("gone", "also gone", 10)
    placer.on_prefilled(placed, b"", "the worker was lost", 1.0)
    assert placed.placement == Placement(PlacementAction.COLOCATED_PREFILL, "gone", "gone")
    placer.on_first_byte(placed, 2.0)
    placer.on_ended(placed, 5, 3.0)
    views.close()
