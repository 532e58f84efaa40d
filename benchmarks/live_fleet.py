"""Real servers that share a cache, and a router in front of some of them."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from benchmarks.accounts import CACHED_TOKENS, Counters, scraped
from benchmarks.cpu_shares import CpuShare
from benchmarks.engine_process import CHECKPOINTS
from benchmarks.router_process import router_at
from benchmarks.slow_network import SlowNetwork
from examples.checkpoints import write_checkpoint
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Server, kv_transfer_config
from hetero_connector.planner.profile import CostProfile
from ownership.directory.fleet_reset import reset_fleet
from ownership.directory.opening import open_directory
from ownership.scheduling.fleet import Role

LEASE_S = 3
_WITHIN_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Gained:
    """The counts of servers since a reading."""

    hit_tokens: Mapping[str, int]
    """Tokens that were not computed, by tier; `hbm` is the engines' own prefix cache."""
    peer_bytes: int
    copies: float
    """Bytes in DRAM over distinct ones."""


class LiveFleet:
    """Servers of one model, started once. Use it as a context manager."""

    def __init__(
        self,
        model: str,
        count: int,
        folder: Path,
        extra: Mapping[str, Any],
        engine_args: Mapping[str, Any],
        cores: float | None = None,
        network: SlowNetwork | None = None,
    ) -> None:
        """`extra`: configuration of HeteroConnector. `folder` gets the logs.

        `cores`: of each server, which it has to itself; None: they share the machine's.
        `network`: between the servers; None: peers read at the speed of memory.
        """
        self.model, self._folder, self._cores = model, folder, cores
        self._shares = ExitStack()
        self._redis = EmbeddedRedis()
        self._extra, self._engine_args = dict(extra), engine_args
        self._environment = {"VLLM_PLUGINS": "heterocache"}
        if network is not None:
            self._extra |= network.extra
            self._environment |= network.environment
        self.names = [f"w{number}" for number in range(count)]
        self.servers: list[Server] = []

    def __enter__(self) -> LiveFleet:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        self._redis.start()
        checkpoint = write_checkpoint(self.model, CHECKPOINTS)
        for name in self.names:
            own = {"directory": self._redis.url, "lease_s": LEASE_S, "worker_name": name}
            server = Server(
                checkpoint,
                self._folder / f"{name}.log",
                kv_transfer_config({"load_deadline_s": 100, **self._extra, **own}),
                self._engine_args,
                self._environment,
            )
            self.servers.append(server)
            server.launch()
        shares = [self._share(server) for server in self.servers if self._cores is not None]
        for server in self.servers:
            server.start()
        for server in self.servers:
            self._wait("the servers have not joined", partial(_joined, server))
        if self._cores is not None:
            with _told():
                for share in shares:
                    share.limit(self._cores)

    @property
    def cores(self) -> float:
        """The cores that all servers together can use."""
        if self._cores is None:
            return float(psutil.cpu_count() or 1)
        return self._cores * len(self.servers)

    def _share(self, server: Server) -> CpuShare:
        with _told():
            share = CpuShare(f"server-{server.port}")
            self._shares.callback(share.close)
            share.add(server.group)
        return share

    def _stop(self) -> None:
        for server in self.servers:
            server.stop()
        self._shares.close()
        self._redis.stop()

    def reset(self) -> None:
        """Let all servers forget everything stored; what they have learned of costs stays."""
        directory = open_directory(self._redis.url)
        try:
            done = reset_fleet(directory, _WITHIN_S)
        finally:
            directory.close()
        if not done.is_complete:
            raise RuntimeError(f"not reset: {', '.join(done.missing)}")
        for server in self.servers:
            self._wait("a server has requests", partial(_forget, server))

    def costs(self, workers: int) -> list[CostProfile]:
        """Return what the first servers have learned."""
        found = []
        for server in self.servers[:workers]:
            told = httpx.get(f"{server.url}/v1/heterocache/costs", timeout=_WITHIN_S).json()
            found.append(CostProfile.from_json(json.dumps(told["engines"][0]["costs"]).encode()))
        return found

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the servers."""
        roots = [psutil.Process(server.group) for server in self.servers]
        return [*roots, *(child for root in roots for child in root.children(recursive=True))]

    def directory(self) -> psutil.Process:
        """Return the process of the directory."""
        return psutil.Process(self._redis.pid)

    def read(self, workers: int) -> list[Counters]:
        """Return the counters of the first servers."""
        return [scraped(server) for server in self.servers[:workers]]

    def gained(self, before: Sequence[Counters]) -> Gained:
        """Return what the servers have counted since then, and what they hold."""
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        for server, old in zip(self.servers, before, strict=False):
            for key, value in scraped(server).items():
                totals[key[:2]] += value - old.get(key, 0.0)
        hits = {
            tier: round(value)
            for (name, tier), value in totals.items()
            if name == "heterocache_hit_tokens" and value
        }
        hits["hbm"] = round(totals[CACHED_TOKENS, ""]) - sum(hits.values())
        held = copied = 0.0
        for server in self.servers[: len(before)]:
            held += sum(
                n for have, n in server.series("heterocache_bytes") if have["tier"] == "dram"
            )
            copied += sum(n for _, n in server.series("heterocache_replica_bytes"))
        return Gained(
            hits,
            round(totals["heterocache_read_bytes", "peer"]),
            held / (held - copied) if held > copied else 1.0,
        )

    @contextmanager
    def router(
        self, policy: str, roles: Sequence[Role], decisions: Path
    ) -> Iterator[tuple[str, psutil.Process]]:
        """Start a router in front of the first servers; yield its URL and its process.

        It is yielded once it knows all of them: that its placements are exact, and who can read
        from whom.
        """
        workers = [
            {"url": server.url, "name": name, "role": str(role)}
            for server, name, role in zip(self.servers, self.names, roles, strict=False)
        ]
        keys: dict[str, Any] = {
            "workers": workers,
            "policy": policy,
            "directory": self._redis.url,
            "directory_s": 1.0,  # the machine is busy
            "model_path": str(self.servers[0].model),
            "decisions": str(decisions),
            "probe_timeout_s": 60,
        }
        with router_at(decisions, **keys) as (url, process):
            is_ready = partial(_is_ready, url, self.model, decisions)
            self._wait("the router does not know all servers", is_ready)
            yield url, process

    def _wait(self, what: str, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WITHIN_S
        while not is_done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}, after {_WITHIN_S:.0f} s")
            time.sleep(_POLL_S)


@contextmanager
def _told() -> Iterator[None]:
    """Say what to do where control groups are refused."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"no control group for a server ({error}): run as root, or let the servers share the "
            "cores with --shared-cores"
        ) from error


def _joined(server: Server) -> bool:
    server.complete([1, 2, 3], max_tokens=1)  # an engine publishes metrics with a step
    return any(value == 1 for _, value in server.series("heterocache_directory_joined"))


def _forget(server: Server) -> bool:
    return bool(server.post("/reset_prefix_cache", {})["success"])


def _is_ready(url: str, model: str, decisions: Path) -> bool:
    """Place a prompt that is too short to be stored; return True if all was known for it."""
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_WITHIN_S)
    except httpx.ConnectError:
        return False  # it says where it listens before it does
    placement: str = answer.headers.get("x-heterocache-placement", "")
    lines = decisions.read_text().splitlines()
    return placement.startswith("exact") and bool(lines) and '"handoffs":true' in lines[-1]
