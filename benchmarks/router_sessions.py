"""A router under the load of long agent sessions: 100 stub workers, a directory and a tokenizer.

Sessions grow around `tokens` tokens: each turn sends the whole conversation, with about 2,000 new
tokens, and reads an answer of 16 events. The worker that answered then claims the turn's chunks in
the directory, as an engine does. Requests come at a fixed rate, in blocks of several rates by
turns, so that it is seen if the router's CPU time grows in proportion to the rate. Each has a
connection of its own, as many proxies do it, so any of the router's processes may get it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil

from benchmarks.known_stubs import CHUNK_TOKENS, NAMING, StubAddress, known_stubs
from benchmarks.measure import percentile
from benchmarks.router_identity import Session, texts, write_tokenizer
from benchmarks.router_process import running_router, wait_until_ready
from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.redis import RedisDirectory
from ownership.router.identity import ChainCache, PromptIdentity, open_tokenizer

WORKERS = 100
SESSIONS = 40
TURNS = 6
"""Turns of each session in a block."""
NEW_TOKENS = 2_000
IDLE_S = 30.0
"""Without a request, before the blocks and after them."""
_PATH = "/v1/chat/completions"
_CHARACTERS = 4.2
"""Characters of a token."""
_LEASE_S = 3_600.0
_COPY = Copy(CHUNK_TOKENS * 131_072, bytes(16), 0)
_WARM_AT_ONCE = 4
_TOKENIZED = "heterocache_router_tokenized_total "


@dataclass
class _Turn:
    """A request's body, and the keys of its prompt's full chunks."""

    body: bytes
    keys: Sequence[ChunkKey]
    num_tokens: int


@dataclass
class Block:
    """Requests at one rate."""

    rate: float
    requests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    redis_s: float = 0.0
    first_byte_s: list[float] = field(default_factory=list)

    @property
    def cores(self) -> float:
        return self.cpu_s / self.wall_s

    def cores_at(self, rate: float, idle: Block) -> float:
        """Return the cores at another rate, if each request takes as much CPU time there."""
        request_s = (self.cpu_s - idle.cores * self.wall_s) / self.requests
        return idle.cores + rate * request_s


@dataclass(frozen=True)
class KnownFleet:
    """A router's fleet: workers with names in a directory."""

    model: Path
    directory: RedisDirectory
    redis: EmbeddedRedis
    workers: Sequence[StubAddress]
    epochs: Mapping[str, Epoch]

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a router's configuration."""
        workers = [worker._asdict() for worker in self.workers]
        return {"workers": workers, "model_path": str(self.model), "directory": self.redis.url}

    def claim(self, worker: str, keys: Sequence[ChunkKey], known: int = 0) -> None:
        """Claim a chain for a worker, as its engine does, without the `known` first chunks."""
        parents = [ROOT, *keys]
        claims = [
            Claim(ArtifactId(key, StateType.DENSE_KV), _COPY, parents[at])
            for at, key in enumerate(keys)
            if at >= known
        ]
        self.directory.claim_owner(self.epochs[worker], claims)


@contextmanager
def known_fleet(workers: int) -> Iterator[KnownFleet]:
    """Run stub workers that are registered in a private Redis."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as redis:
        model = Path(folder)
        write_tokenizer(model)
        directory = RedisDirectory(redis.url, deadline_s=5.0)
        with known_stubs(model, workers) as addresses:
            epochs = {x.name: directory.register(Worker(x.name), _LEASE_S).epoch for x in addresses}
            yield KnownFleet(model, directory, redis, addresses, epochs)
        directory.close()


class _Client:
    """Sends the turns of all sessions, and claims what their workers have computed."""

    def __init__(
        self, fleet: KnownFleet, session: aiohttp.ClientSession, url: str, new_tokens: int
    ) -> None:
        """`new_tokens`: of each turn."""
        self._new_tokens = new_tokens
        self._fleet, self._session, self._url = fleet, session, url
        self._identity = PromptIdentity(open_tokenizer(str(fleet.model)), ChainCache(1 << 30))
        self._claimed: dict[int, int] = {}
        self._busy: dict[int, asyncio.Lock] = {}
        self._turns: dict[int, Iterator[_Turn]] = {}
        self.certainties: Counter[str] = Counter()
        self.tokens: list[int] = []
        self.new_tokens: list[int] = []

    def add_session(self, seed: int, lines: list[str], tokens: int) -> None:
        """Add a session that has so many tokens at its first turn."""
        session = Session(random.Random(seed), lines)
        self._turns[seed] = self._made(session, int(tokens * _CHARACTERS))
        self._busy[seed] = asyncio.Lock()

    def _made(self, session: Session, characters: int) -> Iterator[_Turn]:
        while True:
            body = session.add_turn(characters)
            [prompt] = self._identity.read(_PATH, msgspec.json.decode(body))
            chain = self._identity.name(prompt, NAMING).chain
            assert chain is not None
            yield _Turn(body, chain.keys, chain.num_tokens)
            characters = int(self._new_tokens * _CHARACTERS)

    def next_turns(self, count: int) -> list[tuple[int, _Turn]]:
        """Make the next turns of every session, by turns; it takes a while."""
        return [(seed, next(turns)) for _ in range(count) for seed, turns in self._turns.items()]

    async def send(self, seed: int, turn: _Turn, due_s: float | None = None) -> float:
        """Send a turn when its time has come, after the turn before; return its time to first byte.

        That counts from `due_s` if it is given: a router that does not keep up is seen.
        """
        async with self._busy[seed]:
            headers = {"x-session-id": f"session-{seed}", "content-type": "application/json"}
            begun_s = time.monotonic() if due_s is None else due_s
            async with self._session.post(self._url + _PATH, data=turn.body, headers=headers) as x:
                content = await x.content.readany()
                first_s = time.monotonic() - begun_s
                content += await x.read()
                assert x.status == 200, content
                assert content.endswith(b"data: [DONE]\n\n"), content[-200:]
                worker = x.headers["x-heterocache-worker"]
                self.certainties[x.headers["x-heterocache-placement"].partition(";")[0]] += 1
            claim = partial(self._claim, seed, worker, turn)
            await asyncio.get_running_loop().run_in_executor(None, claim)
        self.tokens.append(turn.num_tokens)
        return first_s

    def _claim(self, seed: int, worker: str, turn: _Turn) -> None:
        known = self._claimed.get(seed, 0)
        self._fleet.claim(worker, turn.keys, known)
        self.new_tokens.append((len(turn.keys) - known) * CHUNK_TOKENS)
        self._claimed[seed] = len(turn.keys)

    async def play(self, block: Block, turns: Sequence[tuple[int, _Turn]]) -> None:
        """Send turns at the block's rate."""
        begun_s = time.monotonic()

        async def one(number: int, seed: int, turn: _Turn) -> None:
            due_s = begun_s + number / block.rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            block.first_byte_s.append(await self.send(seed, turn, due_s))

        await asyncio.gather(*(one(at, *turn) for at, turn in enumerate(turns)))
        block.requests += len(turns)
        block.wall_s += time.monotonic() - begun_s


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children until now."""
    times = [x.cpu_times() for x in (process, *process.children(recursive=True))]
    return sum(x.user + x.system for x in times)


@asynccontextmanager
async def _counted(
    block: Block, router: psutil.Process, redis: psutil.Process
) -> AsyncIterator[None]:
    before, redis_before = cpu_s(router), cpu_s(redis)
    yield
    block.cpu_s += cpu_s(router) - before
    block.redis_s += cpu_s(redis) - redis_before


async def _idle(
    block: Block, router: psutil.Process, redis: psutil.Process, seconds: float
) -> None:
    began_s = time.monotonic()
    async with _counted(block, router, redis):
        await asyncio.sleep(seconds)
    block.wall_s += time.monotonic() - began_s


async def _tokenized(session: aiohttp.ClientSession, url: str) -> float:
    """Return the tokens that all processes of the router have made until now."""
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(x.split()[1]) for x in lines if x.startswith(_TOKENIZED))


async def measure(
    rates: Sequence[float],
    *,
    tokens: int = 100_000,
    workers: int = WORKERS,
    sessions: int = SESSIONS,
    turns: int = TURNS,
    new_tokens: int = NEW_TOKENS,
    processes: int = 1,
    idle_s: float = IDLE_S,
) -> tuple[dict[str, float], list[Block]]:
    """Return the figures, and what was measured at each rate; at 0 first.

    Raises AssertionError if an answer is incomplete.
    """
    lines = "".join(texts()).splitlines(keepends=True)
    turns_in_all = 2 * turns * len(rates)
    with (
        known_fleet(workers) as fleet,
        running_router(processes=processes, **fleet.keys) as (url, router),
    ):
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connections) as session:
            await wait_until_ready(session, url, workers, processes)
            client = _Client(fleet, session, url, new_tokens)
            for seed in range(sessions):
                client.add_session(seed, lines, tokens - turns_in_all * new_tokens // 2)
            await asyncio.sleep(6.0)  # the workers are asked for their costs in this time
            await _warm(client)
            redis = psutil.Process(fleet.redis.pid)
            blocks = {rate: Block(rate) for rate in (0.0, *rates)}
            await _idle(blocks[0.0], router, redis, idle_s)
            client.certainties.clear()
            client.tokens.clear()
            client.new_tokens.clear()
            before = await _tokenized(session, url)
            for _ in range(2):
                for rate in rates:
                    made = client.next_turns(turns)
                    async with _counted(blocks[rate], router, redis):
                        await client.play(blocks[rate], made)
            tokenized = await _tokenized(session, url) - before
            await _idle(blocks[0.0], router, redis, idle_s)
    found = list(blocks.values())
    figures = _figures(found, client)
    return figures | {"tokenized_over_new": tokenized / sum(client.new_tokens)}, found


async def _warm(client: _Client) -> None:
    """Send every session's first turn, whose tokens are all new."""
    left = iter(client.next_turns(1))

    async def work() -> None:
        for seed, turn in left:
            await client.send(seed, turn)

    await asyncio.gather(*(work() for _ in range(_WARM_AT_ONCE)))


def _figures(blocks: Sequence[Block], client: _Client) -> dict[str, float]:
    """Return the figures; cores for 100 requests a second from the CPU time of one.

    The rates may disagree by more than a goal allows for, so the highest and the lowest are told.
    """
    idle, *loaded = blocks
    idle_redis = idle.redis_s / idle.wall_s
    requests = sum(x.requests for x in loaded)
    request_s = sum(x.cpu_s - idle.cores * x.wall_s for x in loaded) / requests
    redis_request_s = sum(x.redis_s - idle_redis * x.wall_s for x in loaded) / requests
    highest = max(loaded, key=lambda x: x.rate)
    first_ms = [1e3 * x for x in highest.first_byte_s]
    return {
        "cores_at_100_rps_100k": max(x.cores_at(100, idle) for x in loaded),
        "cores_at_100_rps_100k_least": min(x.cores_at(100, idle) for x in loaded),
        "measured_rps": highest.requests / highest.wall_s,
        "asked_rps": highest.rate,
        "measured_cores": highest.cores,
        "ms_of_cpu_per_request": 1e3 * request_s,
        "idle_cores": idle.cores,
        "redis_cores_at_100_rps": idle_redis + 100 * redis_request_s,
        "exact_share": client.certainties["exact"] / client.certainties.total(),
        "prompt_tokens": float(np.mean(client.tokens)),
        "new_tokens": float(np.mean(client.new_tokens)),
        "first_byte_ms_p50": percentile(first_ms, 0.5),
        "first_byte_ms_p99": percentile(first_ms, 0.99),
    }
