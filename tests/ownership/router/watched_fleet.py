"""Two routers before stub workers whose state is in a directory, and sessions that load them.

It looks like a fleet of engines with the connector; no engine runs.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.stub_fleet import StubFleet
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Worker
from ownership.directory.opening import open_directory
from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.view import FleetChains, PrefixViews, PublishedChain, Trust
from tests.ownership.redis_bench import new_fleet, shared_server
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.planner.chains import DENSE
from tests.waiting import until

CHUNK = 256
TOKEN_BYTES = 98_304
DRAM_BYTES, SSD_BYTES = 16 << 30, 128 << 30
SECONDS_PER_TOKEN = 1e-4
"""The costs that a router assumes of a worker that tells none."""
_SYSTEM_TOKENS = 6 * CHUNK
_LONGEST_TOKENS = 9_000
_TEXT_SHARE = 0.06
"""Requests whose tokens the routers cannot know: they have no tokenizer."""


def chain_answer(worker: str) -> dict[str, Any]:
    """Return what an engine says of its chains."""
    about = {"worker": worker, "model": "m", "served_as": "stub-model", "tokenizer": ""}
    return {
        "format": 1,
        "engine": about,
        "root": "ab" * 16,
        "chunk_tokens": CHUNK,
        "is_shared": True,
        "clearings": {},
        "adapters": {},
        "model_spec": DENSE.as_plain(),
    }


class WatchedFleet:
    """Use it as a context manager. `keys` are of the routers' configuration."""

    def __init__(self, folder: Path, workers: int = 4, **keys: Any) -> None:
        self._folder, self._keys, self._count = folder, keys, workers
        self._stack = ExitStack()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._stored: dict[str, int] = {}
        """Bytes at each worker."""

    def __enter__(self) -> WatchedFleet:
        self.stubs = self._stack.enter_context(StubFleet(self._count))
        self.names = [f"worker-{number}" for number in range(1, self._count + 1)]
        url = f"{shared_server().url}?fleet={new_fleet()}"
        self._directory = open_directory(url)
        self._stack.callback(self._directory.close)
        chains = FleetChains(silent_after_s=1e9)
        for name in self.names:
            chains.told(name, [PublishedChain.of(chain_answer(name))], 0.0)
        identity = PromptIdentity(None, ChainCache())
        self._views = PrefixViews(identity, chains, Trust(), self._directory, PATIENCE_S)
        self._stack.callback(self._views.close)
        register = self._directory.register
        self._epochs = {x: register(Worker(x), 3600.0).epoch for x in self.names}
        for name in self.names:
            self._tell(name)
        self.routers = [self._router(x, url) for x in "ab"]
        until(lambda: all(x.metric("peers") == 1 for x in self.routers))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._stack.close()

    @property
    def page(self) -> str:
        """The address of the first router's page."""
        return f"{self.routers[0].url}/v1/heterocache/dashboard"

    def load(self, sessions: int, pause_s: float, headers: dict[str, str] | None = None) -> None:
        """Let sessions take turns until the end, every third one through the other router."""
        threads = [
            threading.Thread(target=self._work, args=(x, pause_s, headers or {}))
            for x in range(sessions)
        ]
        for thread in threads:
            thread.start()

        def end() -> None:
            self._stopped.set()
            for thread in threads:
                thread.join(PATIENCE_S)

        self._stack.callback(end)

    def _router(self, name: str, directory: str) -> RunningRouter:
        folder = self._folder / name
        folder.mkdir()
        named = zip(self.names, self.stubs.urls, strict=True)
        workers = [{"name": name, "url": url} for name, url in named]
        keys = {"workers": workers, "directory": directory, "directory_s": 2.0}
        config = config_of(folder, **{"probe_s": 0.5} | keys | self._keys)
        return self._stack.enter_context(RunningRouter(config))

    def _work(self, number: int, pause_s: float, headers: dict[str, str]) -> None:
        chance = random.Random(number)
        system = random.Random("system").choices(range(50_000), k=_SYSTEM_TOKENS)
        url = self.routers[0 if number % 3 else 1].url
        conversation = 0
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stopped.is_set():
                conversation += 1
                tokens = system + chance.choices(range(50_000), k=chance.randint(400, 2_000))
                known = _SYSTEM_TOKENS if conversation > 1 else 0
                while len(tokens) < _LONGEST_TOKENS and not self._stopped.is_set():
                    session = {"x-session-id": f"agent {number}, {conversation}"}
                    trace = {"traceparent": f"00-{chance.randbytes(16).hex()}-{'1' * 16}-01"}
                    slower = chance.lognormvariate(0.1, 0.25)
                    first_s = (0.005 + SECONDS_PER_TOKEN * (len(tokens) - known)) * slower
                    stub = {"events": chance.randint(20, 60), "gap_s": 0.02, "first_s": first_s}
                    body = {"prompt": tokens, "stream": chance.random() < 0.9, "stub": stub}
                    is_text = chance.random() < _TEXT_SHARE
                    if is_text:
                        body["prompt"] = f"Agent {number} says something without tokens."
                    try:
                        answer = client.post(
                            "/v1/completions", json=body, headers=headers | session | trace
                        )
                    except httpx.HTTPError:
                        continue  # the router has ended
                    if answer.status_code == 200 and not is_text:
                        self._store(answer.headers["x-heterocache-worker"], tokens, known)
                        known = len(tokens) // CHUNK * CHUNK
                    tokens = tokens + chance.choices(range(50_000), k=chance.randint(200, 900))
                    self._stopped.wait(pause_s * chance.uniform(0.3, 1.7))

    def _store(self, worker: str, tokens: Sequence[int], known: int) -> None:
        """Let a worker have the state of a prompt, and tell so."""
        found = asyncio.run(self._views.find("/v1/completions", {"prompt": tokens}, 1.0))
        [chain] = found.chains.values()
        size_bytes = CHUNK * TOKEN_BYTES
        claims = [
            Claim(ArtifactId(key, StateType.DENSE_KV), Copy(size_bytes, bytes(16), 0))
            for key in chain.keys
        ]
        with self._lock:
            grants = self._directory.claim_owner(self._epochs[worker], claims)
            read = [x for x, y in zip(claims, grants, strict=True) if y.outcome == "foreign"]
            self._directory.replicate_readonly(self._epochs[worker], read, 120.0)
            new_bytes = (len(tokens) - known) * TOKEN_BYTES
            self._stored[worker] = self._stored.get(worker, 0) + new_bytes
            self._tell(worker)

    def _tell(self, worker: str) -> None:
        """Let a stub worker answer as an engine with the connector does."""
        stored = self._stored.get(worker, 0)
        dram = min(stored, int(0.97 * DRAM_BYTES))
        labels = 'engine="0",model_name="m",state_type="dense_kv"'
        metrics = (
            f'heterocache_bytes{{tier="dram",{labels}}} {dram}\n'
            f'heterocache_bytes{{tier="ssd",{labels}}} {min(stored, SSD_BYTES)}\n'
            f'heterocache_capacity_bytes{{tier="dram"}} {DRAM_BYTES}\n'
            f'heterocache_capacity_bytes{{tier="ssd"}} {SSD_BYTES}\n'
            f'heterocache_read_bytes_total{{tier="dram",{labels}}} {3 * dram}\n'
            f'heterocache_read_bytes_total{{tier="ssd",{labels}}} {stored // 9}\n'
            f'heterocache_read_bytes_total{{tier="peer",{labels}}} {stored // 21}\n'
            f"heterocache_ssd_written_bytes_total{{{labels}}} {stored}\n"
            f'vllm:kv_cache_usage_perc{{engine="0"}} {0.2 + 0.6 * dram / DRAM_BYTES:.3f}\n'
        )
        answers = {
            "/v1/heterocache/chain": {"engines": [chain_answer(worker)]},
            "/metrics": metrics,
        }
        url = self.stubs.urls[self.names.index(worker)]
        with suppress(httpx.HTTPError):  # it was killed
            httpx.post(f"{url}/stub/answers", json=answers, timeout=PATIENCE_S, trust_env=False)
