"""The live page in headless Chromium, on a real server under load. Run it with `make test-page`."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from examples.serving import Server
from scripts.browser import Browser
from scripts.make_screenshot import MODEL, load, server_of
from tests.engine.harness import prompt_tokens
from tests.live_pages import (
    SHOWN,
    assert_that_it_fits,
    figure,
    has_drawn,
    open_with_key,
    type_key,
)
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KEY = "a secret"
HOSTILE = '<img src=x onerror="window.hacked=1">\'&lt;b&gt;'
MARK = re.compile(r"[^0-9]")


def url_of(server: Server) -> str:
    return f"{server.url}/v1/heterocache/dashboard"


def ask(server: Server, path: str, body: Any = None, **headers: str) -> Any:
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an API key that has worked for a while."""
    server = server_of(tmp_path_factory.mktemp("server"), planner="always_load")
    server.engine_args = {**server.engine_args, "api_key": KEY, "enable_request_id_headers": True}
    with server:
        with load(server, sessions=4, key=KEY, pause_s=0.2):
            time.sleep(8)
        seeds = itertools.count(2)

        def has_hit_both() -> bool:
            if {"dram", "ssd"} <= tiers_hit(server):
                return True
            for seed in itertools.islice(seeds, 14):
                complete(server, seed, 2000)
            for _ in range(2):  # from SSD, then from DRAM
                server.reset_prefix_cache()
                complete(server, seed=1)
            return False

        until(has_hit_both, patience_s=200.0)  # a busy disk writes late
        yield server


def tiers_hit(server: Server) -> set[str]:
    """Return the tiers from which tokens were restored."""
    return {x["tier"] for x, tokens in server.series("heterocache_hit_tokens_total") if tokens}


def complete(server: Server, seed: int, num_tokens: int = 900) -> None:
    prompt = prompt_tokens(num_tokens, seed)
    ask(server, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    """A browser that has the key and shows the figures."""
    with Browser() as browser:
        open_with_key(browser, url_of(server), KEY)
        yield browser


def bytes_on_page(browser: Browser, tier: str, row: int) -> int:
    cell = f"#tier-{tier} tbody tr:nth-child({row}) td:nth-child(2)"
    return int(MARK.sub("", browser.evaluate(f"document.querySelector({cell!r}).title")))


def test_the_key_is_asked_for_and_a_wrong_one_refused(server: Server) -> None:
    with Browser() as browser:
        browser.open(url_of(server))
        browser.wait("!document.querySelector('#key').hidden")
        assert "need its API key" in browser.text("#notice")
        assert browser.evaluate("document.querySelector('#figures').hidden")
        type_key(browser, "wrong")
        browser.wait("document.querySelector('#key-problem').textContent")
        assert "refused" in browser.text("#key-problem")
        type_key(browser, KEY)
        browser.wait(SHOWN)
        assert browser.evaluate("document.querySelector('#key').hidden")
        assert all("401" in problem for problem in browser.problems())
        browser.open(url_of(server))
        browser.wait(SHOWN)
        assert browser.problems() == [], "this tab has the key"


def test_the_figures_are_those_of_the_metrics(server: Server, browser: Browser) -> None:
    time.sleep(5)  # metrics are two seconds old at most, the page one
    sources = {
        "dram": "heterocache_hit_tokens_total",
        "ssd": "heterocache_hit_tokens_total",
    }
    for tier, name in sources.items():
        (value,) = (x for labels, x in server.series(name) if labels["tier"] == tier)
        assert figure(browser, f"#tokens-{tier} b") == value > 0
    by_source = {
        labels["source"]: x for labels, x in server.series("vllm:prompt_tokens_by_source_total")
    }
    assert figure(browser, "#tokens-engine_cache b") == by_source["local_cache_hit"] > 0
    assert figure(browser, "#tokens-computed b") == by_source["local_compute"] > 0
    for row, kind in enumerate(("dense_kv", "window_swa"), 1):
        for tier in ("dram", "ssd"):
            labels = {"tier": tier, "state_type": kind}
            (size,) = values(server, "heterocache_bytes", labels)
            (artifacts,) = values(server, "heterocache_artifacts", labels)
            assert bytes_on_page(browser, tier, row) == size > 0
            slots = f"#tier-{tier} tbody tr:nth-child({row}) td:nth-child(3)"
            assert figure(browser, slots) == artifacts
    for labels, made in server.series("heterocache_decisions_total"):
        assert figure(browser, f"#choice-{labels['choice']} b") == made
    assert "Cache\nworks" in browser.text("#health")
    assert "Store\nworks" in browser.text("#health")
    assert "SSD writes\nworks" in browser.text("#health")
    assert browser.problems() == []


def values(server: Server, name: str, labels: dict[str, str]) -> list[float]:
    return [x for found, x in server.series(name) if found.items() >= labels.items()]


def test_a_session_shows_its_state_and_what_clients_name_is_text(
    server: Server, browser: Browser
) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt_tokens(600, seed=1),
        "max_tokens": 2,
        "cache_salt": HOSTILE,
        "kv_transfer_params": {"session_id": HOSTILE, "expected_back_s": 20.0},
    }
    names = {"X-Request-Id": HOSTILE}
    ask(server, "/v1/completions", body, **names)
    shown = f"document.querySelector('#decisions').innerText.includes({json.dumps(HOSTILE)})"
    browser.wait(shown)
    row = "document.querySelector('#sessions tr').innerText"
    browser.wait(f"{row}.includes('in ')")
    text = browser.evaluate(row)
    assert "600" in text or "601" in text or "602" in text
    assert "DRAM" in text
    assert not browser.evaluate("window.hacked")
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert HOSTILE not in browser.text("#sessions"), "ids of sessions are not even known"
    assert browser.problems() == []


def test_it_moves_while_the_server_works(server: Server, browser: Browser) -> None:
    before = figure(browser, "#tokens-engine_cache b")
    with load(server, sessions=2, key=KEY, pause_s=0.2):
        browser.wait(
            "+document.querySelector('#tokens-engine_cache b').textContent.replaceAll(',', '')"
            f" > {before}"
        )
        browser.wait("document.querySelector('#tiles').innerText.includes('last minutes')")
    drawn = has_drawn("tokens-chart", "--hbm")
    assert browser.wait(drawn), "a bar in the colour of its source"
    assert browser.problems() == []


@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits(server: Server, browser: Browser, width: int, dark: bool) -> None:
    assert_that_it_fits(browser, url_of(server), width, dark=dark)


def test_a_stopped_engine_is_named_and_its_figures_come_back(
    server: Server, browser: Browser
) -> None:
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        browser.wait("document.querySelector('#notice').innerText.includes('has not answered')")
        assert "The figures are those of" in browser.text("#notice")
    finally:
        os.kill(pid, signal.SIGCONT)
    browser.wait(SHOWN)
    assert "gone" not in browser.text("#notice")


def test_a_killed_engine_is_told_and_a_new_one_is_found(server: Server, browser: Browser) -> None:
    os.kill(engine_pid(server), signal.SIGKILL)
    browser.wait("document.querySelector('#connection').textContent === 'no connection'")
    notice = browser.text("#notice")
    assert "The engine is gone" in notice or "The server" in notice
    assert "The figures are those of" in notice
    assert browser.evaluate("document.querySelector('#figures').classList.contains('old')")
    browser.wait("document.querySelector('#notice').innerText.includes('The server')", 60)
    assert "Trying again every 2 s" in browser.text("#notice")
    server.kill()
    server.start()
    browser.wait(SHOWN)
    assert not browser.evaluate("document.querySelector('#figures').classList.contains('old')")
    assert "figures are those" not in browser.text("#notice")


def test_a_viewer_does_not_hold_up_the_end_of_the_server(server: Server, browser: Browser) -> None:
    browser.wait(SHOWN)
    assert server.stop(timeout_s=25.0) == 0


def engine_pid(server: Server) -> int:
    (engine,) = ask(server, "/v1/heterocache/status")["engines"]
    return int(engine["engine"]["pid"])
