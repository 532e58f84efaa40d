"""The guide's commands, run as they are written but for their ports."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ownership.router.config import KEYS
from ownership.router.doors import Reason
from tests.ownership.router.bench import RunningRouter
from tests.waiting import until

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/router.md").read_text()
REFERENCE = (ROOT / "docs/reference/router.md").read_text()


def commands(section: str) -> list[list[str]]:
    """Return the commands of a section's first block, with this Python."""
    text = GUIDE.partition(f"## {section}\n")[2].partition("```bash\n")[2].partition("```")[0]
    return [shlex.split(line) for line in text.splitlines()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(command: list[str], folder: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def test_the_router_can_be_tried_without_an_engine(tmp_path: Path, stack: ExitStack) -> None:
    ports = dict(zip(("8001", "8002", "8080"), free_ports(3), strict=True))

    def with_ports(text: str) -> str:
        return re.sub("|".join(ports), lambda found: ports[found[0]], text)

    workers = "[http://127.0.0.1:8001, http://127.0.0.1:8002]"
    (tmp_path / "router.yaml").write_text(with_ports(f"workers: {workers}\nport: 8080\n"))
    for command in commands("Try it without an engine"):
        words = [with_ports(word) for word in command]
        if words[0] == "curl":
            url = f"http://localhost:{ports['8080']}"
            until(lambda url=url: is_ready(url))
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            assert "[DONE]" in done.stdout or '"up"' in done.stdout, done.stdout
        else:
            programs = {"python": [sys.executable], "heterocache": [sys.executable, "-m", CLI]}
            start([*programs[words[0]], *words[1:]], tmp_path, stack)


def test_every_reason_and_every_source_of_workers_is_named() -> None:
    reasons = GUIDE.partition("`x-heterocache-reason` says why")[2].partition("\n\n")[0]
    assert set(re.findall("`([a-z_]+)`", reasons)) == {str(reason) for reason in Reason}
    needed = next(x for x in REFERENCE.splitlines() if x.endswith("is needed."))
    sources = {key.name for key in KEYS if key.name.startswith("workers")}
    assert set(re.findall("`([a-z_]+)`", needed)) == sources


def test_a_proxy_can_ask_where_to_send(router: RunningRouter) -> None:
    asked = commands("For proxies that send themselves")
    assert len(asked) == 3
    answers = []
    for command in asked:
        words = [x.replace("localhost:8080", f"127.0.0.1:{router.port}") for x in command]
        done = subprocess.run([*words, "--fail"], capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout))
    assert answers[0]["selection_id"] == "r1"
    assert answers[0]["worker"] in router.states()


_reserved = ExitStack()
"""Sockets that never listen: a server that reuses addresses can have their ports."""
atexit.register(_reserved.close)


def free_ports(count: int) -> list[str]:
    """Return ports that the kernel gives to nobody else before this process ends."""
    probes = [_reserved.enter_context(socket.socket()) for _ in range(count)]
    for probe in probes:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            probe.setsockopt(socket.SOL_SOCKET, option, 1)
        probe.bind(("127.0.0.1", 0))
    return [str(probe.getsockname()[1]) for probe in probes]


CLI = "hetero_connector.tools.cli"


def is_ready(url: str) -> bool:
    try:
        return set(httpx.get(f"{url}/ready").json()["workers"].values()) == {"up"}
    except httpx.TransportError:
        return False
