"""A router that places by policy: stub workers, and a directory in memory of what they have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.stub_fleet import StubFleet
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Worker
from ownership.directory.memory import MemoryDirectory
from ownership.router.decision_log import DecisionLog
from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.policy_placer import PolicyPlacer
from ownership.router.view import FleetChains, PrefixViews, PublishedChain, Trust
from ownership.scheduling import scheduling_policy
from ownership.scheduling.fleet import Role
from tests.ownership.router.bench import RunningRouter, config_of
from tests.planner.chains import DENSE

SIZE = 64
PROMPT = [token % 251 for token in range(20 * SIZE + 5)]


def chain_answer(worker: str) -> dict[str, Any]:
    """Return what an engine answers about its chains."""
    return {
        "format": 1,
        "engine": {"worker": worker, "model": "m", "served_as": "stub-model", "tokenizer": ""},
        "root": "ab" * 16,
        "chunk_tokens": SIZE,
        "is_shared": True,
        "clearings": {},
        "adapters": {},
        "model_spec": DENSE.as_plain(),
    }


def published(worker: str) -> PublishedChain:
    return PublishedChain.of(chain_answer(worker))


class KnownFleet:
    """A router before stub workers, whose state is what a test says."""

    def __init__(
        self, fleet: StubFleet, folder: Path, policy: str, roles: Sequence[Role], **keys: Any
    ) -> None:
        self.directory = MemoryDirectory(lambda: 1_000.0)
        self.names = [url.removeprefix("http://") for url in fleet.urls]
        self._epochs = [self.directory.register(Worker(x), 60.0).epoch for x in self.names]
        chains = FleetChains(silent_after_s=1e9)
        for name in self.names:
            chains.told(name, [published(name)], 0.0)
        self.views = PrefixViews(
            PromptIdentity(None, ChainCache()), chains, Trust(), self.directory, 5.0
        )
        self.log = DecisionLog(folder / "decisions.jsonl")
        chosen = scheduling_policy(policy, Random(0))
        self.placer = PolicyPlacer(chosen, self.views, WorkerFigures(), self.log)
        given = dict(zip(fleet.urls, roles, strict=False))
        workers = [{"url": x, "role": str(given.get(x, Role.BOTH))} for x in fleet.urls]
        config = config_of(folder, workers=workers, **keys)
        self.router = RunningRouter(config, placer=self.placer)
        self.lines = folder / "decisions.jsonl"

    def store(self, worker: int, chunks: int, prompt: Sequence[int] = PROMPT) -> None:
        """Say that a worker has the first chunks of a prompt in DRAM."""
        found = asyncio.run(self.views.find("/v1/completions", {"prompt": prompt}, 1.0))
        [chain] = found.chains.values()
        assert len(chain.keys) > chunks
        claims = [
            Claim(ArtifactId(key, StateType.DENSE_KV), Copy(10, bytes(16), 0))
            for key in chain.keys[:chunks]
        ]
        self.directory.claim_owner(self._epochs[worker], claims)

    def complete(self, session: str = "", **fields: Any) -> httpx.Response:
        headers = {"x-session-id": session} if session else {}
        body = {"prompt": PROMPT, **fields}
        answer = self.router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def decisions(self) -> list[dict[str, Any]]:
        """Return the lines of decisions; those of fleets are for a replay."""
        lines = [json.loads(line) for line in self.lines.read_text().splitlines()]
        return [line for line in lines if line["kind"] == "decision"]


@contextmanager
def running(
    fleet: StubFleet,
    folder: Path,
    policy: str = "ownerserve",
    roles: Sequence[Role] = (),
    **keys: Any,
) -> Iterator[KnownFleet]:
    """Run a router; `keys` are of its configuration."""
    known = KnownFleet(fleet, folder, policy, roles, **keys)
    with known.router:
        yield known
    known.views.close()
    known.log.close()


def worker_of(answer: httpx.Response) -> str:
    return answer.headers["x-heterocache-worker"]
