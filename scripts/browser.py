"""A headless Chromium, driven over its DevTools protocol: for tests and pictures of the live page.

`make test-page` has Debian's package for it; any Chromium that `PATH` has will do.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio")
_START_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One Chromium with one tab. Use it as a context manager."""

    def __init__(self) -> None:
        binary = find_chromium()
        if binary is None:
            raise RuntimeError(f"no Chromium: none of {', '.join(NAMES)} is on the PATH")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._log = Path(self._profile.name) / "log"
        with self._log.open("wb") as log:
            command = [binary, *_FLAGS, "--remote-debugging-port=0", "about:blank"]
            command.insert(1, f"--user-data-dir={self._profile.name}")
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._ids = itertools.count(1)
        self._open = contextlib.ExitStack()
        self._events: list[dict[str, Any]] = []
        try:
            self._tab = self._connect()
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol in the tab. Raises RuntimeError with the tab's error."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        self._tab.send(json.dumps(message))
        while True:
            answer = json.loads(self._tab.recv(timeout=60))
            if answer.get("id") != number:
                self._events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> None:
        """Go to a page, in a window of so many CSS pixels."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        here = f"location.href === {json.dumps(url)}"
        self.wait(f"{here} && document.readyState === 'complete'")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Give the window so many CSS pixels, each of `scale` dots."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited. Raises RuntimeError."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true; return its value. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline_s:
                text = self.evaluate("document.body.innerText")
                raise TimeoutError(f"not true in {timeout_s} s: {expression}\nThe page:\n{text}")
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def problems(self) -> list[str]:
        """Return the errors of the console, and uncaught exceptions, since the last call."""
        self.evaluate("0")  # events that are under way come before its answer
        events, self._events = self._events, []
        return [x for event in events if (x := _problem(event))]

    def screenshot(self, path: Path) -> None:
        """Write the whole page, as long as it is, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        answer = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End Chromium. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._open.close()
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self) -> ClientConnection:
        """Connect to the tab, once Chromium has printed its address."""
        deadline_s = time.monotonic() + _START_S
        while not (found := re.search(rb"DevTools listening on ws://([^/]+)/", self._read_log())):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"Chromium did not start:\n{self._read_log().decode()}")
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://{found[1].decode()}/json/list", timeout=30) as reply:
            (tab,) = (x for x in json.load(reply) if x["type"] == "page")
        url = tab["webSocketDebuggerUrl"]
        connection = connect(url, max_size=None, compression=None, ping_interval=None, proxy=None)
        return self._open.enter_context(connection)

    def _read_log(self) -> bytes:
        return self._log.read_bytes()


def _problem(event: dict[str, Any]) -> str:
    parameters = event.get("params", {})
    match event.get("method"):
        case "Runtime.exceptionThrown":
            return json.dumps(parameters["exceptionDetails"])
        case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
            return json.dumps(parameters["args"])
        case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
            return f"{parameters['entry']['text']} ({parameters['entry'].get('url', '')})"
    return ""
