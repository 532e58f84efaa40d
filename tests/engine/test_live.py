"""The events and the files of the live page, on a real HTTP server with stand-ins for engines."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse

from hetero_connector.engine.api import live
from hetero_connector.engine.api.live import Dashboard, engine_feed, make_live_router
from hetero_connector.live_page import feed as live_feed
from hetero_connector.live_page.feed import MAX_VIEWERS, Feed
from tests.waiting import until

PAGE = Path(live.__file__).parent / "page"
SHARED = Path(live_feed.__file__).parent / "page"
FILES = [path for folder in (PAGE, SHARED) for path in sorted(folder.glob("*.[hj]*"))]
PERIOD_S = 0.05
LIVE = "/v1/heterocache/live"


class CountingEngines:
    """Engines that answer with the number of the question."""

    count = 1

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Callable[[int], Any] = lambda asked: {"asked": asked}

    async def ask(self, question: Any, timeout_s: float) -> list[Any]:
        assert question == {"get": "live"}
        self.asked += 1
        return [self.answer(self.asked)]


class Service:
    """An API server with the live page, in a thread."""

    def __init__(self, feed: Feed | None) -> None:
        app = FastAPI()
        app.include_router(make_live_router())
        app.state.heterocache_feed = feed
        app.add_middleware(_Key)
        app.middleware_stack = Dashboard(app.build_middleware_stack())
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
        self.server = app.state.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        until(lambda: self.server.started, "the server has started")
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def get(self, path: str, key: str = "right") -> httpx.Response:
        """Return an answer, of which an error is read; close any other."""
        request = self._client.build_request(
            "GET", path, headers={"Authorization": f"Bearer {key}"}
        )
        answer = self._client.send(request, stream=True)
        if answer.is_error:
            answer.read()
        return answer

    def stop(self) -> None:
        self._client.close()
        self.end()

    def end(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "a viewer holds the server up"


class _Key:
    """vLLM's guard of all that is under /v1, in short."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = JSONResponse({"error": "Unauthorized"}, 401)
        right = (b"authorization", b"Bearer right") in scope["headers"]
        await (self._app if right else refused)(scope, receive, send)


@pytest.fixture
def engines() -> CountingEngines:
    return CountingEngines()


@pytest.fixture
def feed(engines: CountingEngines) -> Feed:
    return engine_feed(engines, PERIOD_S)  # type: ignore[arg-type]


@pytest.fixture
def service(feed: Feed) -> Iterator[Service]:
    service = Service(feed)
    yield service
    service.stop()


class Viewer:
    """The events of an answer."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        self.answer = answer
        self._lines = answer.iter_lines()

    def next(self) -> Any:
        line, end = next(self._lines), next(self._lines)
        assert line.startswith("data: ")
        assert end == ""
        return json.loads(line.removeprefix("data: "))

    def rest(self) -> list[str]:
        """Return all lines up to the end of the answer."""
        return list(self._lines)

    def leave(self) -> None:
        self.answer.close()


def test_a_viewer_gets_one_event_after_another(service: Service) -> None:
    viewer = Viewer(service.get(LIVE))
    assert viewer.answer.headers["content-type"].startswith("text/event-stream")
    assert viewer.answer.headers["cache-control"] == "no-store"
    events = [viewer.next() for _ in range(3)]
    assert [x["engines"] for x in events] == [[{"asked": n}] for n in (1, 2, 3)]
    assert events[0]["count"] == 1
    viewer.leave()


def test_all_viewers_together_are_one_reader(engines: CountingEngines) -> None:
    service = Service(engine_feed(engines, 0.25))  # type: ignore[arg-type]
    viewers = [Viewer(service.get(LIVE)) for _ in range(8)]
    seen = [[viewer.next()["engines"][0]["asked"] for _ in range(4)] for viewer in viewers]
    for numbers in seen:
        assert numbers == list(range(numbers[0], numbers[0] + 4)), "everyone gets every answer"
    for viewer in viewers:
        viewer.leave()
    service.stop()


def test_without_viewers_no_engine_is_asked(
    engines: CountingEngines, feed: Feed, service: Service
) -> None:
    time.sleep(3 * PERIOD_S)
    assert engines.asked == 0
    viewer = Viewer(service.get(LIVE))
    viewer.next()
    assert feed.viewers == 1
    viewer.leave()
    until(lambda: feed.viewers == 0)
    asked = engines.asked
    time.sleep(3 * PERIOD_S)
    assert engines.asked == asked


def test_one_viewer_too_many_is_told_so(feed: Feed, service: Service) -> None:
    viewers = [Viewer(service.get(LIVE)) for _ in range(MAX_VIEWERS)]
    refused = service.get(LIVE)
    assert refused.status_code == 503
    assert "viewers watch already" in refused.json()["error"]["message"]
    viewers.pop().leave()
    until(lambda: feed.viewers == MAX_VIEWERS - 1)
    viewers.append(Viewer(service.get(LIVE)))
    for viewer in viewers:
        viewer.leave()


def test_a_viewer_that_does_not_read_is_dropped(
    engines: CountingEngines, feed: Feed, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "_VIEWER_PATIENCE_S", 0.3)
    engines.answer = lambda asked: "x" * 4_000_000
    viewer = Viewer(service.get(LIVE))
    until(lambda: feed.viewers == 0)
    viewer.leave()


def test_a_server_that_stops_ends_its_events(engines: CountingEngines, service: Service) -> None:
    viewer = Viewer(service.get(LIVE))
    viewer.next()
    service.server.should_exit = True
    asked = engines.asked
    service.end()
    numbers = re.findall(r'"asked":(\d+)', "\n".join(viewer.rest()))
    assert all(int(number) <= asked + 1 for number in numbers), "it asks once more at most"


def test_a_question_that_fails_ends_one_viewer_and_holds_no_lock(
    engines: CountingEngines, feed: Feed
) -> None:
    async def watch() -> bytes:
        engines.answer = lambda asked: 1 // 0
        with pytest.raises(ZeroDivisionError):
            await feed.next()
        engines.answer = lambda asked: {"asked": asked}
        return await asyncio.wait_for(feed.next(), 60)

    assert b'"asked":2' in asyncio.run(watch())


def test_a_server_without_engines_says_so() -> None:
    service = Service(None)
    answer = service.get(LIVE)
    assert answer.status_code == 503
    assert "--kv-transfer-config" in answer.json()["error"]["message"]
    service.stop()


def test_the_page_needs_no_key_and_its_data_does(service: Service) -> None:
    page = service.get("/v1/heterocache/dashboard", key="wrong")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert (PAGE / "main.html").read_bytes() in page.read()
    assert service.get(LIVE, key="wrong").status_code == 401
    for path in ("", "/status", "/dashboards", "/dashboard/%2e%2e/live"):
        assert service.get(f"/v1/heterocache{path}", key="wrong").status_code == 401


def test_every_file_that_the_page_names_is_served_and_may_only_use_this_server(
    service: Service,
) -> None:
    html = service.get("/v1/heterocache/dashboard").read().decode()
    named = re.findall(r'(?:href|src)="([^"]+)"', html)
    for script in FILES:
        named += [f"dashboard/{x}" for x in re.findall(r'from "\./([^"]+)"', script.read_text())]
    assert {"dashboard/uPlot.js", "dashboard/feed.js", "dashboard/icon.svg"} <= set(named)
    for name in named:
        answer = service.get(f"/v1/heterocache/{name}", key="none")
        assert answer.status_code == 200, name
        answer.read()
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_link_with_a_slash_at_its_end_leads_to_the_page(service: Service) -> None:
    answer = service.get("/v1/heterocache/dashboard/")
    assert answer.status_code == 307
    assert answer.read() == b""
    assert answer.headers["location"] == "../dashboard"


OURS = [x for x in FILES if "uPlot" not in x.name]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_text_becomes_html(path: Path) -> None:
    """Clients choose names that the page shows."""
    source = path.read_text()
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc| on\w+="
    )
    assert not re.findall(ways, source)
    assert not re.findall(r"https?://", source), "nothing comes from elsewhere"


def test_the_vendored_library_has_its_licence() -> None:
    assert "(v1.6.32)" in (SHARED / "uPlot.js").read_text()[:100]
    assert (SHARED / "uPlot.LICENSE").read_text().startswith("The MIT License (MIT)")
