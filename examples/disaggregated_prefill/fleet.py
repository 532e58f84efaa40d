"""A fleet on this machine: embedded Redis, stock servers that share one cache, and the proxy."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.checkpoints import write_checkpoint
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Server, kv_transfer_config

CHUNK = 256
"""Tokens per stored chunk, and a boundary at which all small models can resume."""
VOCABULARY = 512
_JOIN_TIMEOUT_S = 60.0


@dataclass
class ProxyServer(Server):
    """The proxy in a process of its own."""

    prefillers: Sequence[Server] = ()
    decoders: Sequence[Server] = ()

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "examples.disaggregated_prefill.proxy"]
        command += ["--prefill", *(server.url for server in self.prefillers)]
        command += ["--decode", *(server.url for server in self.decoders)]
        return [*command, "--port", str(self.port)]


@dataclass(frozen=True)
class Fleet:
    """The processes of a running fleet."""

    redis: EmbeddedRedis
    prefillers: list[Server]
    decoder: Server
    proxy: Server
    """The client of the fleet sends its requests here."""

    @property
    def servers(self) -> list[Server]:
        """The servers that store state."""
        return [*self.prefillers, self.decoder]


@contextmanager
def fleet_of(
    model: str,
    checkpoints: Path,
    logs: Path,
    prefillers: int = 1,
    extra: Mapping[str, Any] | None = None,
    connector: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Iterator[Fleet]:
    """Start a fleet, and stop all of it at the end or at an error.

    `extra`: more configuration of the connector; with `ssd_gib` each server gets a new directory
    in `logs`. `connector`: more of `--kv-transfer-config`. `engine_args`: more arguments of vLLM.
    """
    checkpoint = write_checkpoint(model, checkpoints)
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        given = {
            "directory": redis.url,
            "dram_gib": 0.25,
            "chunk_tokens": CHUNK,
            # Computing so small a model is faster than reading its state.
            "planner": "always_load",
            "load_deadline_s": 100,  # a lookup gets 1 s of it: the machine may be busy
            **(extra or {}),
        }
        names = [*(f"prefill-{i}" for i in range(prefillers)), "decode"]
        servers = [
            Server(
                checkpoint,
                logs / f"{name}.log",
                kv_transfer_config(given | _own(name, logs, given), **(connector or {})),
                {"max_logprobs": VOCABULARY, "max_model_len": 8192, **(engine_args or {})},
            )
            for name in names
        ]
        for server in servers:
            stack.callback(server.stop)
            server.launch()
        for server in servers:
            server.start()
            _wait_until_joined(server)
        *before, decoder = servers
        proxy = ProxyServer(
            checkpoint,
            logs / "proxy.log",
            prefillers=before,
            decoders=[decoder],
        )
        stack.callback(proxy.stop)
        yield Fleet(redis, before, decoder, proxy.start())


def _own(name: str, logs: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that differs between servers."""
    own: dict[str, Any] = {"worker_name": name}
    if "ssd_gib" in given:
        own["ssd_dir"] = tempfile.mkdtemp(prefix=f"{name}-", dir=logs)
    return own


def value(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a connector metric's series with these labels, as of now."""
    server.complete([1, 2, 3], max_tokens=1)  # an engine publishes metrics with a step
    found = [*server.series(f"heterocache_{name}"), *server.series(f"heterocache_{name}_total")]
    return sum(n for have, n in found if labels.items() <= have.items())


def _wait_until_joined(server: Server) -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while value(server, "directory_joined") != 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server has not joined the fleet:\n{server.log_tail()}")
        time.sleep(0.1)
