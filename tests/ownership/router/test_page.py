"""The fleet's page in headless Chromium, on routers under load. Run it with `make test-page`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scripts.browser import Browser
from tests.live_pages import (
    SHOWN,
    assert_that_it_fits,
    figure,
    has_drawn,
    open_with_key,
    type_key,
)
from tests.ownership.router.watched_fleet import WatchedFleet
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

KEY = "a secret"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "keys").write_text(f"{KEY}\n")
    with WatchedFleet(folder, workers=3, api_keys=str(folder / "keys")) as fleet:
        fleet.load(4, 0.3, {"authorization": f"Bearer {KEY}"})
        yield fleet


@pytest.fixture(scope="module")
def browser(fleet: WatchedFleet) -> Iterator[Browser]:
    """A browser that has the key and shows the figures."""
    with Browser() as browser:
        open_with_key(browser, fleet.page, KEY)
        yield browser


def shown_text(selector: str, text: str) -> str:
    return f"document.querySelector('{selector}').innerText.includes({json.dumps(text)})"


def test_a_wrong_key_is_refused(fleet: WatchedFleet) -> None:
    with Browser() as browser:
        browser.open(fleet.page)
        browser.wait("!document.querySelector('#key').hidden")
        type_key(browser, "wrong")
        browser.wait("document.querySelector('#key-problem').textContent")
        assert browser.evaluate("document.querySelector('#figures').hidden")
        type_key(browser, KEY)
        browser.wait(SHOWN)
        assert all("401" in problem for problem in browser.problems())


def test_it_shows_workers_sessions_decisions_and_the_other_router(
    fleet: WatchedFleet, browser: Browser
) -> None:
    browser.wait(shown_text("#notice", "All is well."))
    for name in fleet.names:
        assert name in browser.text("#workers")
    assert browser.text("#workers").count("serves") == 3
    browser.wait(shown_text("#workers", "ago"))
    browser.wait("document.querySelectorAll('#decisions tr').length >= 5")
    browser.wait(shown_text("#sessions", fleet.names[0]))
    assert "exact" in browser.text("#decisions")
    assert "under way, heard" in browser.text("#routers")
    browser.wait("document.querySelectorAll('#tier-dram, #tier-ssd').length === 2")
    assert "GiB" in browser.text("#tier-dram h3")
    assert browser.problems() == []
    browser.wait(has_drawn("requests-chart", "--hbm"))
    browser.problems()  # advice on reading a canvas often, which only this test does


def test_decisions_appear_and_are_counted_as_in_the_metrics(
    fleet: WatchedFleet, browser: Browser
) -> None:
    newest = "document.querySelector('#decisions tr').innerText"
    before = browser.evaluate(newest)
    browser.wait(f"{newest} !== {json.dumps(before)}")
    counted = figure(browser, "#requests-exact b")

    def are_equal() -> bool:
        metrics = fleet.routers[0].client.get("/metrics").text.splitlines()
        placed = 'heterocache_router_placements_total{action="'
        exact = [x for x in metrics if x.startswith(placed) and 'certainty="exact"' in x]
        return figure(browser, "#requests-exact b") == sum(float(x.split()[-1]) for x in exact) > 0

    assert counted > 0
    until(are_equal)


def test_a_defect_of_the_page_is_not_taken_for_one_of_the_server(fleet: WatchedFleet) -> None:
    with Browser() as browser:
        open_with_key(browser, fleet.page, KEY)
        browser.evaluate("JSON.parse = () => { throw new Error('a defect of the page'); }; 0")
        browser.wait("document.querySelector('#connection').textContent === 'page broken'")
        told = browser.text("#notice")
        assert told.startswith(
            "This page cannot show what the server sends: reload it. The figures are those of "
        )
        assert "Trying again" not in told
        assert "a defect of the page" in "".join(browser.problems())


@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits(fleet: WatchedFleet, browser: Browser, width: int, dark: bool) -> None:
    assert_that_it_fits(browser, fleet.page, width, dark=dark)


def test_a_killed_worker_is_red_and_a_new_one_is_not(fleet: WatchedFleet, browser: Browser) -> None:
    browser.wait(SHOWN)
    fleet.stubs.processes[1].kill()
    browser.wait("document.querySelector('#workers tr.down') !== null")
    assert fleet.names[1] in browser.text("#workers tr.down")
    red = "getComputedStyle(document.querySelector('#workers tr.down td')).color"
    style = "getComputedStyle(document.documentElement).getPropertyValue('--bad')"
    red_of_style = (
        f"(() => {{ const x = document.createElement('i'); x.style.color = {style};"
        "document.body.append(x); const found = getComputedStyle(x).color; x.remove();"
        "return found; })()"
    )
    assert browser.evaluate(red) == browser.evaluate(red_of_style)
    browser.wait(shown_text("#notice", f"1 of 3 workers is down: {fleet.names[1]}."))
    assert browser.evaluate("document.querySelector('#notice').className") == "bad"
    fleet.stubs.restart(1)
    browser.wait("document.querySelector('#workers tr.down') === null")
    browser.wait(shown_text("#health", "all serve"))


def test_a_router_that_has_ended_is_told(fleet: WatchedFleet, browser: Browser) -> None:
    fleet.routers[0].end()
    browser.wait("document.querySelector('#connection').textContent === 'no connection'")
    notice = browser.text("#notice")
    assert "Trying again every 2 s. The figures are those of" in notice
    assert browser.evaluate("document.querySelector('#figures').classList.contains('old')")
