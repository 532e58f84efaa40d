"""The live pages of engines and routers in a browser: what both have, and how it is read."""

from __future__ import annotations

import json

from scripts.browser import Browser

SHOWN = "document.querySelector('#connection').textContent === 'live'"
DARK = 3 * 128
"""The sum of a dark colour's three parts is below that."""


def open_with_key(browser: Browser, url: str, key: str) -> None:
    """Open a page that asks for a key, and type it."""
    browser.open(url)
    browser.wait("!document.querySelector('#key').hidden")
    browser.problems()  # that the first request has no key is one
    type_key(browser, key)
    browser.wait(SHOWN)


def type_key(browser: Browser, key: str) -> None:
    text = f"document.querySelector('#key-text').value = {json.dumps(key)}"
    browser.evaluate(f"{text}; document.querySelector('#key').requestSubmit()")


def figure(browser: Browser, selector: str) -> int:
    """Return the first number of an element."""
    return int(browser.text(selector).split()[0].replace(",", ""))


def assert_that_it_fits(browser: Browser, url: str, width: int, *, dark: bool) -> None:
    """Open a page whose key is known: it is as wide as the window, and in its colours."""
    browser.open(url, width, dark=dark)
    browser.wait(SHOWN)
    browser.wait("document.querySelector('.chart canvas') !== null")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    parts = ground.removeprefix("rgb(").removesuffix(")").split(",")
    assert (sum(map(int, parts)) < DARK) == dark
    assert browser.problems() == []


def has_drawn(chart: str, color: str) -> str:
    """Return an expression that is true if a chart has dots of this colour of the style."""
    return f"""(() => {{
        const chart = document.querySelector('#{chart} canvas'), {{ width, height }} = chart;
        const dots = chart.getContext('2d').getImageData(0, 0, width, height).data;
        const colors = new Set(new Uint32Array(dots.buffer));
        const wanted = getComputedStyle(document.documentElement).getPropertyValue('{color}');
        const [r, g, b] = wanted.match(/[0-9a-f]{{2}}/g).map((x) => parseInt(x, 16));
        return colors.has((255 << 24 | b << 16 | g << 8 | r) >>> 0);
    }})()"""
