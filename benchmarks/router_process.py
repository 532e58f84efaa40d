"""A router in a process of its own, as clients see it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

_START_S = 180.0


@contextmanager
def running_router(processes: int = 1, **keys: Any) -> Iterator[tuple[str, psutil.Process]]:
    """Start a router with these keys; yield its URL and its first process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        router_at(Path(folder) / "fleet", processes, **keys) as running,
    ):
        yield running


@contextmanager
def router_at(path: Path, processes: int = 1, **keys: Any) -> Iterator[tuple[str, psutil.Process]]:
    """Do the same, with its configuration and its log at `path`, with suffixes of their own."""
    config, log = path.with_suffix(".yaml"), path.with_suffix(".log")
    config.write_text(json.dumps({"host": "127.0.0.1", "port": 0} | keys))
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "router"]
    command += ["--config", str(config), "--processes", str(processes)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        yield _url(process, log), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for line in log.read_text().splitlines():
            if "listening at" in line:
                return line.split()[5]
        time.sleep(0.05)
    raise RuntimeError(f"the router did not start:\n{log.read_text()}")


async def wait_until_ready(
    session: aiohttp.ClientSession, url: str, workers: int, processes: int = 1
) -> None:
    """Wait until so many workers serve, for all processes of the router as far as can be seen."""
    deadline_s, in_a_row = time.monotonic() + _START_S, 0
    while time.monotonic() < deadline_s:
        is_ready = False
        try:  # each connection may be another process's
            async with session.get(f"{url}/ready", headers={"connection": "close"}) as answer:
                states = (await answer.json())["workers"]
                is_ready = list(states.values()).count("up") == workers
        except aiohttp.ClientError:
            pass
        in_a_row = in_a_row + 1 if is_ready else 0
        if in_a_row == 8 * processes:
            return
        await asyncio.sleep(0.02 if is_ready else 0.2)
    raise RuntimeError("the router is not ready")
