"""The fleet's document, its events and its page, on routers before stub workers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from hetero_connector.live_page import feed as live_feed
from hetero_connector.live_page.feed import MAX_VIEWERS
from ownership.router import fleet_page
from ownership.router.fleet_page import PATH, FleetState, copies
from ownership.router.history import MAX_DECISIONS, Decision
from ownership.router.stored import stored_state
from tests.ownership.router.bench import RunningRouter, config_of
from tests.ownership.router.conftest import StartRouter
from tests.ownership.router.known_fleet import PROMPT, SIZE, running
from tests.ownership.router.watched_fleet import WatchedFleet
from tests.waiting import until

PAGE = Path(fleet_page.__file__).parent / "page"
DASHBOARD = "/v1/heterocache/dashboard"
HOSTILE = '<img src=x onerror="hacked=1">&'


def fleet_of(router: RunningRouter) -> Any:
    answer = router.client.get(PATH)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def newest(router: RunningRouter, condition: Any = lambda fleet: True) -> Any:
    """Return the document as soon as it is so. It is made at most once a second."""
    found: Any = None

    def is_so() -> bool:
        nonlocal found
        found = fleet_of(router)
        return bool(condition(found))

    until(is_so)
    return found


def events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def follow(router: RunningRouter) -> httpx.Response:
    """Return events of which nothing is read."""
    return router.client.send(router.client.build_request("GET", f"{PATH}/live"), stream=True)


def is_served(router: RunningRouter) -> bool:
    answer = follow(router)
    answer.close()
    return answer.status_code == 200


class TestTheDocument:
    def test_without_a_policy_it_has_workers_and_what_was_answered(
        self, router: RunningRouter
    ) -> None:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        answer = router.complete(
            model="stub-model", stream=True, stub={"events": 5}, headers=headers
        )
        worker = answer.headers["x-heterocache-worker"]
        fleet = newest(
            router,
            lambda x: [y for y in x["decisions"][:1] if y["trace"] == trace and y["total_s"]],
        )
        assert fleet["format"] == 1
        assert fleet["router"]["policy"] == "least_loaded"
        assert fleet["router"]["processes"] == 1
        assert {x["state"] for x in fleet["workers"]} == {"up"}
        assert [x["models"] for x in fleet["workers"]] == [["stub-model"]] * 2
        assert {x["load"] for x in fleet["workers"]} == {None}, "nothing is known of others"
        assert fleet["peers"] is None
        decision = fleet["decisions"][0]
        assert decision["worker"] == worker
        assert (decision["path"], decision["progress"]) == ("completions", "ended")
        assert 0 < decision["first_byte_s"] <= decision["total_s"]
        assert decision["prompt_tokens"] is decision["predicted_s"] is None
        assert decision["certainty"] == ""

    def test_a_decision_has_its_cost_as_predicted_and_as_observed(
        self, fleet: StubFleet, tmp_path: Path
    ) -> None:
        with running(fleet, tmp_path) as known:
            known.store(1, 16)
            answer = known.complete(session="a", stream=True, stub={"events": 4})
            assert answer.headers["x-heterocache-worker"] == known.names[1]
            found = newest(known.router, lambda x: x["decisions"][0]["total_s"])
            decision = found["decisions"][0]
            assert decision["prompt_tokens"] == len(PROMPT)
            assert decision["resume_tokens"] == 16 * SIZE
            assert decision["holder_tokens"] == {known.names[1]: 16 * SIZE}
            assert (decision["certainty"], decision["reasons"]) == ("exact", [])
            assert decision["events"] == 5, "the last one is [DONE]"
            ttft_s = sum(decision["cost_s"][f"{x}_s"] for x in ("queue", "compute", "restore"))
            assert decision["predicted_s"] == pytest.approx(ttft_s)
            assert decision["first_byte_s"] > 0
            [session] = found["sessions"]["newest"]
            assert session["session"] == decision["session"]
            assert session["worker"] == known.names[1]
            assert (session["turns"], session["running"]) == (1, 0)
            assert session["tokens"] == len(PROMPT)
            assert found["sessions"]["count"] == 1
            assert found["copies"] == {"factor": 1.0, "tokens": 16 * SIZE, "held": 16 * SIZE}
            [count] = found["counts"]["placements"]
            assert (count["certainty"], count["count"]) == ("exact", 1)

    def test_what_is_under_way_counts_at_its_worker(self, fleet: StubFleet, tmp_path: Path) -> None:
        with running(fleet, tmp_path) as known:
            url = f"{known.router.url}/v1/completions"
            body = {"prompt": PROMPT, "stream": True, "stub": {"events": 1000, "gap_s": 0.05}}
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                parts = answer.iter_raw()  # the connection ends with it
                next(parts)
                found = newest(known.router, lambda x: x["decisions"][0]["first_byte_s"])
                [worker] = [x for x in found["workers"] if x["requests"]]
                assert worker["name"] == answer.headers["x-heterocache-worker"]
                assert (worker["load"]["prefilling"], worker["load"]["decoding"]) == (0, 1)
                assert worker["load"]["report_age_s"] is None
                assert found["decisions"][0]["progress"] == "answering"

    def test_refusals_and_lost_requests_are_counted_and_shown(
        self, start_router: StartRouter
    ) -> None:
        router = start_router()
        assert router.complete(model="other").status_code == 404
        assert router.complete(stream=True, stub={"fault": "cut"}).status_code == 200
        found = newest(router, lambda x: x["counts"]["cut"])
        assert found["counts"]["refused"] == [{"reason": "unknown_model", "count": 1.0}]
        [cut] = found["counts"]["cut"]
        [paused] = [x["name"] for x in found["workers"] if x["paused"]]
        assert cut == {"worker": paused, "count": 1.0}
        assert found["decisions"][0]["progress"] == "failed"

    def test_it_is_made_once_a_second_at_most(self, router: RunningRouter) -> None:
        found = [router.client.get(PATH).json()["now"] for _ in range(30)]
        assert len(set(found)) <= 1 + (found[-1] - found[0]) / 0.9

    def test_the_newest_decisions_are_kept_and_no_more(self, router: RunningRouter) -> None:
        for _ in range(MAX_DECISIONS + 10):
            router.complete(stub={"events": 1})
        found = newest(router, lambda x: len(x["decisions"]) == MAX_DECISIONS)
        times = [x["time"] for x in found["decisions"]]
        assert times == sorted(times, reverse=True)

    def test_hostile_names_of_clients_are_not_in_it(self, router: RunningRouter) -> None:
        headers = {
            "traceparent": f"00-{HOSTILE}-1-01",
            "x-session-id": HOSTILE,
            "x-request-id": HOSTILE,
            "x-priority": HOSTILE,
        }
        router.complete(model=HOSTILE, headers=headers)
        router.client.post(f"/{HOSTILE}", content=HOSTILE)
        sent = time.time()
        text = json.dumps(newest(router, lambda x: x["now"] > sent))
        assert "onerror" not in text

    def test_a_trace_id_is_that_of_the_client(self, router: RunningRouter) -> None:
        trace = "0af7651916cd43dd8448eb211c80319c"
        router.complete(headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
        newest(router, lambda x: trace in [y["trace"] for y in x["decisions"]])


class TestRoutersTogether:
    def test_workers_have_what_all_routers_sent_and_tell_of_their_tiers(
        self, tmp_path: Path
    ) -> None:
        with WatchedFleet(tmp_path, workers=2, probe_s=0.05) as fleet:
            one, other = fleet.routers
            body = {"stream": True, "prompt": [1] * 600, "stub": {"events": 1000, "gap_s": 0.05}}
            with httpx.stream(
                "POST", f"{other.url}/v1/completions", json=body, timeout=60
            ) as answer:
                parts = answer.iter_raw()  # the connection ends with it
                next(parts)
                name = answer.headers["x-heterocache-worker"]
                found = newest(one, lambda x: x["peers"] and x["peers"][0]["requests"])
                [peer] = found["peers"]
                assert (peer["requests"], peer["has_gap"]) == (1, False)
                assert peer["silent_s"] < 5
                workers = {x["name"]: x for x in found["workers"]}
                assert workers[name]["requests"] == 0, "through the other one"
                assert workers[name]["load"]["prefilling"] + workers[name]["load"]["decoding"] == 1
                assert workers[name]["load"]["report_age_s"] < 30
                assert found["decisions"] == []
            stored = workers[name]["stored"]
            assert stored["tiers"].keys() == {"dram", "ssd"}
            assert stored["tiers"]["dram"]["capacity_bytes"] > 0
            assert stored["hbm_usage"] == pytest.approx(0.2)

    def test_copies_are_those_of_the_newest_prompts(self) -> None:
        def decision(**tokens: int) -> Decision:
            return Decision(0.0, "chat", "a", "", True, "", "", "exact", (), "", 1, 1, tokens)

        assert copies([decision(), decision()])["factor"] is None
        assert copies([decision(a=100, b=100), decision(a=100)])["factor"] == 1.5

    def test_the_counters_of_stock_servers_are_read_too(self) -> None:
        metrics = (
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
            'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.3\n'
            'heterocache_read_bytes_total{tier="peer",state_type="dense_kv"} 1e3\n'
            'heterocache_read_bytes_total{tier="peer",state_type="window_swa"} 1e3\n'
        )
        found = stored_state(metrics, 1.0)
        assert found.hbm_usage == pytest.approx(0.4)
        assert found.read_bytes == {"peer": 2000.0}
        assert found.tiers == {}


class TestTheEvents:
    def test_one_comes_each_second(self, router: RunningRouter) -> None:
        with router.client.stream("GET", f"{PATH}/live") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            seen = [event["now"] for event, _ in zip(events(answer), range(2), strict=False)]
        assert seen == sorted(set(seen))

    def test_no_worker_is_asked_for_its_state_without_a_viewer(
        self, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = threading.Event()

        def note(*arguments: object) -> Any:
            asked.set()
            return stored_state("", 0.0)

        monkeypatch.setattr("ownership.router.stored.stored_state", note)
        router = start_router()
        router.complete()
        assert not asked.is_set()
        fleet_of(router)
        until(asked.is_set)

    def test_a_router_that_ends_ends_its_events(self, start_router: StartRouter) -> None:
        router = start_router()
        with router.client.stream("GET", f"{PATH}/live") as answer:
            found = events(answer)
            next(found)
            router.end()
            assert len(list(found)) <= 2

    def test_viewers_that_read_nothing_are_dropped(
        self, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live_feed, "_VIEWER_PATIENCE_S", 0.2)
        monkeypatch.setattr(FleetState, "snapshot", lambda *arguments: "x" * 8_000_000)
        router = start_router()
        viewers = [follow(router) for _ in range(MAX_VIEWERS)]
        until(lambda: is_served(router))
        for viewer in viewers:
            viewer.close()

    def test_one_viewer_too_many_is_told_so(self, router: RunningRouter) -> None:
        viewers = [follow(router) for _ in range(MAX_VIEWERS)]
        refused = router.client.get(f"{PATH}/live")
        assert refused.status_code == 429
        assert "viewers watch already" in refused.json()["error"]["message"]
        for viewer in viewers:
            viewer.close()
        until(lambda: is_served(router))


class TestKeysAndFiles:
    @pytest.fixture(scope="class")
    def guarded(
        self, fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[RunningRouter]:
        folder = tmp_path_factory.mktemp("guarded")
        (folder / "keys").write_text("right\n")
        keys = {"workers": fleet.urls, "api_keys": str(folder / "keys")}
        with RunningRouter(config_of(folder, **keys)) as router:
            yield router

    @pytest.mark.parametrize("path", [PATH, f"{PATH}/live"])
    def test_the_data_needs_a_key(self, guarded: RunningRouter, path: str) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            before = guarded.metric("refused_total", reason="wrong_key")
            refused = guarded.client.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["x-heterocache-reason"] == "wrong_key"
            assert guarded.metric("refused_total", reason="wrong_key") == before + 1
            assert "workers" not in refused.json()
        allowed = {"authorization": "Bearer right"}
        with guarded.client.stream("GET", path, headers=allowed) as answer:
            assert answer.status_code == 200

    def test_the_page_needs_none_and_may_only_use_this_server(self, guarded: RunningRouter) -> None:
        page = guarded.client.get(DASHBOARD)
        assert page.status_code == 200
        assert (PAGE / "main.html").read_text() in page.text
        named = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        for script in ("page.js", "model.js", "frame.js", "charts.js", "elements.js"):
            source = guarded.client.get(f"{DASHBOARD}/{script}").text
            named += [f"dashboard/{x}" for x in re.findall(r'from "\./([^"]+)"', source)]
        assert {"dashboard/uPlot.js", "dashboard/feed.js", "dashboard/icon.svg"} <= set(named)
        for name in named:
            answer = guarded.client.get(f"/v1/heterocache/{name}")
            assert answer.status_code == 200, name
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
        assert guarded.client.get(f"{DASHBOARD}/").headers["location"] == "../dashboard"

    def test_other_paths_reach_workers_as_before(self, router: RunningRouter) -> None:
        for path in (f"{DASHBOARD}/secret", f"{PATH}/other", "/v1/heterocache/status"):
            assert router.client.get(path).json() == {"detail": "Not Found"}, "a worker's answer"
        assert router.client.post(PATH).status_code == 404

    @pytest.mark.parametrize("path", sorted(PAGE.glob("*.js")), ids=lambda path: path.name)
    def test_no_text_becomes_html(self, path: Path) -> None:
        source = path.read_text()
        ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
        assert not re.findall(ways, source)
        assert not re.findall(r"https?://", source), "nothing comes from elsewhere"
