"""Ray Serve LLM over engines that share one cache, as its example starts it. `make test-ray`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.harness import prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROMPT = prompt_tokens(1500, seed=92)
WAIT_S = 240.0


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.5)


class App:
    """One running application."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        return "\nready: " in self.log.read_text()

    def complete(self, prompt: list[int], session: str, **more: Any) -> tuple[str, int]:
        """Return the text and the tokens that were not computed."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, "ignore_eos": True, **more}).encode(),
            {"Content-Type": "application/json", "X-Session-ID": session},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    def series(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric by replica, from Ray's own exporter."""
        address = f"http://127.0.0.1:{self.port + 1}/metrics"
        text = urllib.request.urlopen(address, timeout=30).read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith(f"ray_heterocache_{name}{{"):
                have = dict(re.findall(r'(\w+)="([^"]*)"', line))
                if labels.items() <= have.items():
                    found[have["ReplicaId"]] = float(line.rpartition(" ")[2])
        return found

    def replicas(self) -> list[psutil.Process]:
        """Return the replicas that have an engine."""
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "ServeReplica:heterocache:LLMServer" in "".join(child.cmdline())
        ]


@contextmanager
def running(tmp_path: Path, *arguments: str) -> Iterator[App]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 65_000)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "examples.ray_serve", *arguments, "--port", str(port)]
    command += ["--dir", str(ROOT / ".cache")]
    # Metrics are exported every ten seconds, or as this says.
    environment = {**os.environ, "RAY_metrics_report_interval_ms": "1000"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    app = App(process, port, log)
    try:
        until(app.is_ready, log)
        yield app
    finally:
        started = []
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        finally:
            _, left = psutil.wait_procs(started, timeout=20)
            for child in left:
                child.kill()
            process.kill()
    assert not left, f"left behind: {left}"
    [folder] = re.findall(r"logs in (\S+)", log.read_text())
    exists = Path(folder).exists()
    shutil.rmtree(folder, ignore_errors=True)
    assert not exists


def test_replicas_share_and_a_killed_one_s_successor_reads_from_its_peer(tmp_path: Path) -> None:
    """With Ray's default of exporting the engine's metrics, which these assertions read."""
    with running(tmp_path, "fleet") as app:
        until(lambda: sum(app.series("directory_joined").values()) == 2, app.log)
        first_two = set(app.series("directory_joined"))
        text, cached = app.complete(PROMPT, "a")
        assert cached == 0
        until(lambda: bool(app.series("directory_claims_total", outcome="owned")), app.log)
        # Another session goes to the other replica, and restores what the first one has.
        assert app.complete(PROMPT, "b") == (text, 1280)
        until(lambda: 1280 in app.series("hit_tokens_total", tier="peer").values(), app.log)

        # A session stays where it was: its own engine has more than whole chunks.
        assert app.complete(PROMPT, "a")[1] > 1280
        before = app.replicas()
        assert len(before) == 2
        before[0].kill()
        until(lambda: not before[0].is_running(), app.log)
        # The next replica of this rank joins under the same name.
        until(lambda: bool(set(app.series("directory_joined")) - first_two), app.log)
        until(lambda: len(app.replicas()) == 2, app.log)
        for session in ("a", "b", "c", "d"):
            assert app.complete(PROMPT, session)[0] == text
        until(lambda: bool(set(app.series("hit_tokens_total", tier="peer")) - first_two), app.log)


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
def test_a_decoder_computes_one_token_and_hints_are_kept(tmp_path: Path, direct: bool) -> None:
    with running(tmp_path, "prefill_decode", *(["--direct"] if direct else [])) as app:
        text, cached = app.complete(PROMPT, "a")
        assert cached == len(PROMPT) - 1
        # Ray's default backend answers a hint with status 500, and min_tokens with 400.
        again = app.complete(PROMPT, "a", kv_transfer_params={"expected_back_s": 5.0}, min_tokens=4)
        assert again == (text, len(PROMPT) - 1)
