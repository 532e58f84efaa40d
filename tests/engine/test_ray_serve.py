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
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import waiting
from tests.engine.harness import prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PROMPT = prompt_tokens(1500, seed=92)
WAIT_S = 600.0


class App:
    """One running application."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        return "\nready: " in self.log.read_text()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait with few questions: most are requests to Ray or to the application."""
        waiting.until(is_so, lambda: self.log.read_text()[-6000:], WAIT_S, pause_s=0.5)

    def complete(self, prompt: list[int], session: str, **more: Any) -> tuple[str, int]:
        """Return the text and the tokens that were not computed."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, "ignore_eos": True, **more}).encode(),
            {"Content-Type": "application/json", "X-Session-ID": session},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            answer = json.load(response)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    def series(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric by replica, from Ray's own exporter."""
        lines = self._metrics(name)
        return {have["ReplicaId"]: x for have, x in lines if labels.items() <= have.items()}

    def _metrics(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return a metric's labels and values."""
        address = f"http://127.0.0.1:{self.port + 1}/metrics"
        text = urllib.request.urlopen(address, timeout=WAIT_S).read().decode()
        found = []
        for line in text.splitlines():
            if re.match(rf"ray_heterocache_{name}(_total)?{{", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found.append((labels, float(line.rpartition(" ")[2])))
        return found

    def placements(self, certainty: str) -> float:
        """Return how many requests the router has placed with this certainty."""
        lines = self._metrics("router_placements")
        return sum(x for labels, x in lines if labels["certainty"] == certainty)

    def replica(self, name: str) -> psutil.Process:
        """Return a replica's process, by a line that it has logged."""
        found = re.search(
            rf"pid=(\d+)\).* heterocache_HeteroServer:chat {name} ", self.log.read_text()
        )
        assert found is not None
        return psutil.Process(int(found[1]))

    def replicas(self) -> list[psutil.Process]:
        """Return the replicas that have an engine."""
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "ServeReplica:heterocache:HeteroServer" in "".join(child.cmdline())
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
    environment = {**os.environ, "RAY_metrics_report_interval_ms": "1000", "RAY_DEDUP_LOGS": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    app = App(process, port, log)
    try:
        app.until(app.is_ready)
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
    with running(tmp_path, "fleet", "--policy", "least_loaded") as app:

        def have_joined() -> bool:
            """Ray drops the gauge of a replica that is idle, so each gets a request first."""
            for session in ("x", "y"):
                app.complete(PROMPT[:20], session)
            return sum(app.series("directory_joined").values()) == 2

        app.until(have_joined)
        first_two = set(app.series("directory_joined"))
        text, cached = app.complete(PROMPT, "a")
        assert cached == 0
        app.until(lambda: bool(app.series("directory_claims_total", outcome="owned")))
        # By turns: the other replica restores what the first one has.
        assert app.complete(PROMPT, "b") == (text, 1280)
        app.until(lambda: 1280 in app.series("hit_tokens_total", tier="peer").values())

        before = app.replicas()
        assert len(before) == 2
        before[0].kill()
        app.until(lambda: not before[0].is_running())
        # The next replica of this rank joins under the same name.
        app.until(lambda: bool(set(app.series("directory_joined")) - first_two))
        app.until(lambda: len(app.replicas()) == 2)
        for session in ("a", "b", "c", "d"):
            assert app.complete(PROMPT, session)[0] == text
        app.until(lambda: bool(set(app.series("hit_tokens_total", tier="peer")) - first_two))


def test_requests_go_to_the_replica_with_their_state_and_elsewhere_when_it_is_killed(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "fleet") as app:

        def is_exact() -> bool:
            """Both replicas have told the router how they name chains."""
            app.complete(PROMPT[:20], "other")
            return app.placements("exact") > 0

        app.until(is_exact)
        text, cached = app.complete(PROMPT, "a")
        assert cached == 0
        app.until(lambda: bool(app.series("directory_claims_total", outcome="owned")))
        [owner] = app.series("directory_claims_total", outcome="owned")
        # The owner's engine has more of it than whole chunks, which are all that others could read.
        for session in ("a", "b", "c", "d"):
            found, cached = app.complete(PROMPT, session)
            assert found == text
            assert cached > 1280

        killed = app.replica(owner)
        killed.kill()
        app.until(lambda: not killed.is_running())
        assert app.complete(PROMPT, "a")[0] == text
        assert app.complete(PROMPT, "a") == (text, cached)
        app.until(lambda: len(app.replicas()) == 2)
        assert app.complete(PROMPT, "b") == (text, cached)


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
def test_a_decoder_computes_one_token_and_hints_are_kept(tmp_path: Path, direct: bool) -> None:
    with running(tmp_path, "prefill_decode", *(["--direct"] if direct else [])) as app:
        text, cached = app.complete(PROMPT, "a")
        assert cached == len(PROMPT) - 1
        # Ray's default backend answers a hint with status 500, and min_tokens with 400.
        again = app.complete(PROMPT, "a", kv_transfer_params={"expected_back_s": 5.0}, min_tokens=4)
        assert again == (text, len(PROMPT) - 1)
