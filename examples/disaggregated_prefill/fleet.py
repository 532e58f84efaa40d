"""A fleet on this machine: embedded Redis, stock servers that share one cache, the proxy."""

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
        """The command line."""
        command = [sys.executable, "-m", "examples.disaggregated_prefill.proxy"]
        command += ["--prefill", *(server.url for server in self.prefillers)]
        command += ["--decode", *(server.url for server in self.decoders)]
        return [*command, "--port", str(self.port)]


@dataclass(frozen=True)
class Fleet:
    """Everything that runs."""

    redis: EmbeddedRedis
    prefillers: list[Server]
    decoder: Server
    proxy: Server
    """A client of it is a client of the fleet."""

    @property
    def servers(self) -> list[Server]:
        """All that hold state."""
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
    """Start it all, and stop it all whatever happens.

    `extra`: more of the connector's own config; with `ssd_gib` each server gets a new
    directory in `logs`. `connector`: more of `--kv-transfer-config`. `engine_args`:
    more of vLLM's.
    """
    checkpoint = write_checkpoint(model, checkpoints)
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        given = {
            "directory": redis.url,
            "dram_gib": 0.25,
            "chunk_tokens": CHUNK,
            # So small a model is computed faster than read; the example is about reading.
            "planner": "always_load",
            "load_deadline_s": 100,  # of which 1 s for a lookup: the machine may be busy
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
            _until_joined(server)
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
    """What servers do not share."""
    own: dict[str, Any] = {"worker_name": name}
    if "ssd_gib" in given:
        own["ssd_dir"] = tempfile.mkdtemp(prefix=f"{name}-", dir=logs)
    return own


def value(server: Server, name: str, **labels: str) -> float:
    """Sum of one of our metric's series with these labels, as of now."""
    server.complete([1, 2, 3], max_tokens=1)  # metrics come out with a step of the engine
    found = [*server.series(f"heterocache_{name}"), *server.series(f"heterocache_{name}_total")]
    return sum(n for have, n in found if labels.items() <= have.items())


def _until_joined(server: Server) -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while value(server, "directory_joined") != 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"it has not joined the fleet:\n{server.log_tail()}")
        time.sleep(0.1)
