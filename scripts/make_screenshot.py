"""Write the documentation's pictures of the live pages, under load, in Chromium.

    export PATH=$PWD/.cache/chromium:$PATH
    python -m scripts.make_screenshot docs/pictures/live-page.png
    python -m scripts.make_screenshot --fleet docs/pictures/fleet-page.png

The first is of a real server. The fleet is routers before stub workers. `--width` and `--seconds`
for other pictures. `make test-page` gets a Chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from scripts.browser import Browser

ROOT = Path(__file__).parents[1]
MODEL = "gemma3"
SESSIONS = 7
SYSTEM_TOKENS = 640
PLUGINS = {"VLLM_PLUGINS": "heterocache"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path, nargs="+", help="one is light, a second one dark")
    parser.add_argument("--fleet", action="store_true", help="the page of a router")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels")
    parser.add_argument("--seconds", type=float, default=300.0, help="of load before the picture")
    arguments = parser.parse_args()
    watched = watched_fleet if arguments.fleet else watched_server
    with (
        tempfile.TemporaryDirectory() as folder,
        watched(Path(folder)) as page,
        Browser() as browser,
    ):
        browser.open(page, arguments.width)
        opened = f"performance.now() > {1e3 * arguments.seconds}"
        browser.wait(opened, timeout_s=arguments.seconds + 60)
        for path, scheme in zip(arguments.picture, ("light", "dark"), strict=False):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=media)
            time.sleep(1.5)
            browser.screenshot(path)
            shrink(path)
            print(path, f"{path.stat().st_size:,} bytes", browser.problems())


@contextmanager
def watched_server(folder: Path) -> Iterator[str]:
    """Yield the page of a server under load."""
    with server_of(folder) as server, load(server):
        yield f"{server.url}/v1/heterocache/dashboard"


@contextmanager
def watched_fleet(folder: Path) -> Iterator[str]:
    """Yield the page of a router under load."""
    from tests.ownership.router.watched_fleet import WatchedFleet

    with WatchedFleet(folder, workers=4) as fleet:
        fleet.load(SESSIONS + 9, 2.0)
        yield fleet.page


def shrink(path: Path) -> None:
    """Reduce a PNG to 255 colours: the page has few, but some of them on few dots."""
    with Image.open(path) as picture:
        colors = Image.Quantize.MAXCOVERAGE
        small = picture.convert("RGB").quantize(255, colors, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def server_of(folder: Path, **more: Any) -> Server:
    """Return a server with little HBM and DRAM, so that its sessions use every tier.

    `more`: for the connector's configuration.
    """
    tiers = {"dram_gib": 0.03, "ssd_gib": 0.25, "ssd_dir": str(folder / "ssd"), "chunk_tokens": 128}
    return Server(
        write_checkpoint(MODEL, ROOT / ".cache/checkpoints"),
        folder / "log",
        kv_transfer_config({**tiers, **more}),
        {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 1024},
        PLUGINS,
    )


class load:  # noqa: N801
    """Sessions that take turns with the server while the block runs."""

    def __init__(
        self, server: Server, sessions: int = SESSIONS, key: str = "", pause_s: float = 4.0
    ) -> None:
        """`pause_s`: between the turns of a session, about."""
        self._server = server
        self._pause_s = pause_s
        self._key = key
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(x,), daemon=True) for x in range(sessions)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        system = random.Random("system").choices(range(256), k=SYSTEM_TOKENS)
        conversation = 0
        while not self._stopped.is_set():
            conversation += 1
            tokens = system + chance.choices(range(256), k=400)
            while len(tokens) < 3300 and not self._stopped.is_set():
                body = {
                    "model": MODEL,
                    "prompt": tokens,
                    "max_tokens": 24,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                request = urllib.request.Request(
                    f"{self._server.url}/v1/completions",
                    json.dumps(body).encode(),
                    {
                        "Content-Type": "application/json",
                        "Authorization": f"Bearer {self._key}",
                        "X-Session-ID": f"agent {number}, {conversation}",
                    },
                )
                with urllib.request.urlopen(request, timeout=300) as answer:
                    tokens += json.load(answer)["choices"][0]["token_ids"]
                tokens += chance.choices(range(256), k=chance.randint(80, 320))
                self._stopped.wait(self._pause_s * chance.uniform(0.5, 1.5 + number % 3))


if __name__ == "__main__":
    main()
