"""The server that the README tells to start does what the README says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]  # a server start

README = Path(__file__).parents[2] / "README.md"
START_PAGE = README.parent / "docs/start.md"


def readme_command() -> list[str]:
    """Return the words of the README's `vllm serve`."""
    lines = re.findall(r"^\S*vllm serve .*$", README.read_text(), re.MULTILINE)
    assert len(lines) == 1
    return shlex.split(lines[0])


@dataclass
class ReadmeServer(Server):
    """Served by the README's line, with a port and what a small checkpoint needs added."""

    ssd_dir: Path = Path()

    def command(self) -> list[str]:
        told = [word.replace("/tmp/heterocache", str(self.ssd_dir)) for word in readme_command()]
        vllm = str(Path(sys.executable).with_name("vllm"))
        model = [str(self.model) if word == "MODEL" else word for word in told[1:]]
        settings = super().command()[3:]  # after `python -m module`
        settings = settings[settings.index("--served-model-name") :]
        return [vllm, *model, *settings]


def send_start_page_request(server: Server) -> dict[str, Any]:
    """Send the request of the quickstart as its reader does; return the report."""
    blocks = re.findall(r"```bash\n(.*?)```", START_PAGE.read_text(), re.DOTALL)
    (script,) = [x for x in blocks if "curl" in x]
    script = script.replace("localhost:8000", server.url)
    script = script.replace("/tmp/models/dense", server.model.name)
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)["kv_transfer_params"]["heterocache"]["report"]
    return report


def server_status(ssd_dir: Path) -> dict[str, Any]:
    """Return what `heterocache status --json` prints of the engine with this SSD tier."""
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "status", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    engines: list[dict[str, Any]] = json.loads(done.stdout)
    (status,) = [x for x in engines if x["engine"]["config"]["ssd_dir"] == str(ssd_dir)]
    return status


def stored(server: Server, tier: str) -> float:
    """Return the bytes in a tier by `/metrics`."""
    return sum(x for labels, x in server.series("heterocache_bytes") if labels["tier"] == tier)


def test_a_prompt_sent_again_is_restored(tmp_path: Path) -> None:
    model = write_checkpoint("dense", CHECKPOINTS)
    log, ssd_dir = tmp_path / "server.log", tmp_path / "ssd"
    with ReadmeServer(model, log, ssd_dir=ssd_dir) as server:
        prompt = prompt_tokens(1100, seed=3)
        first = server.complete(prompt, max_tokens=4)
        server.reset_prefix_cache()
        second = server.complete(prompt, max_tokens=4)
        restored = server.series("heterocache_hit_tokens_total")
        status = server_status(ssd_dir)
        first_report = send_start_page_request(server)
        server.reset_prefix_cache()
        second_report = send_start_page_request(server)
        # No request follows: the engine is idle, and the gauges still show what is stored.
        until(lambda: stored(server, "dram") > 0 and stored(server, "ssd") > 0, pause_s=0.05)
        server.reset_prefix_cache(external=True)
        until(lambda: stored(server, "dram") == stored(server, "ssd") == 0, pause_s=0.05)
    assert sum(status["tiers"][0]["bytes"].values()) > 0
    reasons = [(x["choice"], x["reason"]) for x in status["decisions"]]
    assert reasons == [("compute", "nothing_stored"), ("load", None)]
    assert status["decisions"][-1]["boundary"] >= 1024
    assert (first_report["choice"], first_report["reason"]) == ("compute", "nothing_stored")
    assert (second_report["choice"], second_report["restored_tokens"]) == ("load", {"dram": 2048})
    assert second.tokens == first.tokens
    assert second.cached_tokens is not None
    assert second.cached_tokens >= 1024
    assert sum(value for _, value in restored) >= 1024
    assert list(ssd_dir.glob("*/journal.sqlite"))
