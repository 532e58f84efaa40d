"""`python -m benchmarks.directory [--json]`: the cost of the directory in Redis.

`lookup_ms_1m`: median milliseconds to look up a chain of 1,048,576 tokens, the worse of a dense and
a DeepSeek-V4 model; prefill steps claimed the chunks. It is of the call alone: no
record is decoded.
`lookup_decoded_ms_1m`: the same for the dense model, with every record decoded.
`found_ms_1m`: from an engine's question on the directory's thread until it has these copies.
`claims_per_s`: claims of one client that sends `CLAIMS_PER_CALL` in a call.
`redis_bytes_per_artifact`: memory of a server that knows a million artifacts of the dense model,
over their number.
References from the same run: a PING, the bytes of the dense lookup as one plain value, and the
same chunks as fields of a plain hash. The server is private, on this machine, over loopback TCP.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import redis

from benchmarks.goals import goal_table
from benchmarks.measure import machine_line, percentile, publish, rounded, table, timed
from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from hetero_connector.spec.presets import PRESETS
from hetero_connector.spec.state_types import Family
from ownership.directory import Claim, Copy, Grant, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.redis import RedisDirectory
from ownership.member.chain_lookup import ChainLookups
from ownership.member.directory_thread import DirectoryThread, ThreadHooks
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.live_peers import LivePeers

TOKENS = 1_048_576
STEP_TOKENS = 8_192
"""Tokens of a prefill step, whose chunks are claimed in one call."""
CHECKPOINT_CHUNKS = 8
"""Every 8th chunk has a checkpoint."""
CLAIMS_PER_CALL = 1_024
ARTIFACTS = 1_000_000
MODELS = {"dense": "llama-3.1-8b", "DeepSeek-V4": "deepseek-v4-flash"}
_DECODED = "dense, every record decoded"
_FOUND = "dense, found by an engine"
_LEASE_S = 3_600.0
_COPY_BYTES = 786_432
_FIND_DEADLINE_S = 60.0
_POLL_S = 1e-4


@dataclass(frozen=True)
class Chain:
    """A prompt of `TOKENS` tokens and a worker's claims for it."""

    keys: list[ChunkKey]
    claims: list[list[Claim]]
    """The claims of each chunk."""

    @property
    def num_artifacts(self) -> int:
        return sum(map(len, self.claims))


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one kind of call."""

    name: str
    num_artifacts: int
    median_ms: float
    p95_ms: float
    least_ms: float


def make_chain(
    rng: random.Random, state_types: Sequence[StateType], chunk_tokens: int, parents: bool = True
) -> Chain:
    """Make a chain: prefix-proportional state in every chunk, checkpoints in every 8th."""
    keys = [ChunkKey(rng.randbytes(16)) for _ in range(TOKENS // chunk_tokens)]
    claims = []
    for index, key in enumerate(keys):
        parent = keys[index - 1] if parents and index else ROOT
        at_checkpoint = index % CHECKPOINT_CHUNKS == CHECKPOINT_CHUNKS - 1
        kept = [x for x in state_types if x.family is Family.PREFIX or at_checkpoint]
        claims.append([Claim(ArtifactId(key, x), _copy(rng, index), parent) for x in kept])
    return Chain(keys, claims)


def chain_of(rng: random.Random, preset: str) -> Chain:
    """Make a model's chain at its default chunk size."""
    model = PRESETS[preset]()
    return make_chain(rng, model.state_types, model.default_chunk_tokens())


def claim_chain(directory: RedisDirectory, epoch: Epoch, chain: Chain, chunks_a_call: int) -> None:
    """Claim a chain as engines do: the chunks of a step in one call."""
    for first in range(0, len(chain.keys), chunks_a_call):
        step = chain.claims[first : first + chunks_a_call]
        directory.claim_owner(epoch, [claim for chunk in step for claim in chunk])


def fill(directory: RedisDirectory, epoch: Epoch, rng: random.Random, artifacts: int) -> Chain:
    """Claim chains of the dense model until there are `artifacts`; return the last chain."""
    claimed = 0
    while True:
        chain = chain_of(rng, MODELS["dense"])
        claim_chain(directory, epoch, chain, STEP_TOKENS * len(chain.keys) // TOKENS)
        claimed += chain.num_artifacts
        if claimed >= artifacts:
            return chain


def claim_rates(
    directory: RedisDirectory, epoch: Epoch, rng: random.Random, rounds: int
) -> dict[int, float]:
    """Measure claims per second by the claims in one call. All are released again."""
    rates = {}
    for size in (1, 32, CLAIMS_PER_CALL):
        per_round = []
        for _ in range(rounds):
            keys = [
                ChunkKey(rng.randbytes(16)) for _ in range(min(4 * CLAIMS_PER_CALL, 512 * size))
            ]
            claims = [
                Claim(ArtifactId(key, StateType.DENSE_KV), _copy(rng, at), keys[at - 1])
                for at, key in enumerate(keys)
            ]
            calls = [claims[at : at + size] for at in range(0, len(claims), size)]
            grants: list[Grant] = []
            seconds = timed(partial(_claim_all, directory, epoch, calls, grants))
            owned = {c.artifact: grant.token for c, grant in zip(claims, grants, strict=True)}
            directory.release(epoch, owned)
            per_round.append(len(claims) / seconds)
        rates[size] = statistics.median(per_round)
    return rates


def _claim_all(
    directory: RedisDirectory, epoch: Epoch, calls: Sequence[Sequence[Claim]], grants: list[Grant]
) -> None:
    for call in calls:
        grants.extend(directory.claim_owner(epoch, call))


def timing(name: str, call: Callable[[], object], repeats: int, num_artifacts: int = 0) -> Timing:
    """Time `repeats` calls, after one that is not counted."""
    call()
    samples = [1e3 * timed(call) for _ in range(repeats)]
    p95_ms = percentile(samples, 0.95)
    return Timing(name, num_artifacts, statistics.median(samples), p95_ms, min(samples))


def lookups(
    directory: RedisDirectory, epoch: Epoch, rng: random.Random, dense: Chain, repeats: int
) -> list[Timing]:
    """Time lookups of a million tokens, by the state stored and the way it was claimed."""
    deepseek = chain_of(rng, MODELS["DeepSeek-V4"])
    claim_chain(directory, epoch, deepseek, STEP_TOKENS * len(deepseek.keys) // TOKENS)
    small = make_chain(rng, [StateType.DENSE_KV], 128)
    claim_chain(directory, epoch, small, STEP_TOKENS // 128)
    lone = make_chain(rng, [StateType.DENSE_KV], 256, parents=False)
    claim_chain(directory, epoch, lone, 1)
    unknown = make_chain(rng, [StateType.DENSE_KV], 256)
    cases = {
        "dense": dense,
        "DeepSeek-V4": deepseek,
        "dense, chunks of 128 tokens": small,
        "dense, claimed one by one, without parents": lone,
        "an unknown prompt": unknown,
    }
    found = [
        timing(name, partial(directory.lookup, chain.keys), repeats, chain.num_artifacts)
        for name, chain in cases.items()
    ]
    found.append(_found_by_an_engine(directory, dense, repeats))
    decoded = timing(
        _DECODED,
        lambda: list(directory.lookup(dense.keys).chunks),
        repeats,
        dense.num_artifacts,
    )
    return [*found, decoded]


def _found_by_an_engine(directory: RedisDirectory, chain: Chain, repeats: int) -> Timing:
    """Time from an engine's question until it has all copies."""
    recorder = Recorder()
    keeper = LeaseKeeper(directory, lambda: Worker("reader"), _LEASE_S, recorder)
    hooks = ThreadHooks(start_epoch=lambda: iter(()), on_granted=lambda *_: None)
    thread = DirectoryThread(directory, keeper, hooks, recorder)
    lookups = ChainLookups(thread, keeper, LivePeers(_LEASE_S), recorder, _FIND_DEADLINE_S)
    thread.start()
    while keeper.lease is None:
        time.sleep(_POLL_S)

    def find() -> None:
        lookup = lookups.find(chain.keys)
        while not lookup.poll():
            time.sleep(_POLL_S)
        assert len(lookup.found) == len(chain.keys)

    try:
        return timing(_FOUND, find, repeats, chain.num_artifacts)
    finally:
        thread.close()


def references(client: redis.Redis, dense: Chain, repeats: int) -> list[Timing]:
    """Time plain Redis commands that move the same bytes."""
    record = 57
    size_bytes = len(dense.keys) * (16 + record)
    client.set("reference-value", bytes(size_bytes))
    client.hset("reference-hash", mapping={key: bytes(record) for key in dense.keys})
    found = [
        timing("PING", client.ping, repeats),
        timing("GET of as many bytes", lambda: client.get("reference-value"), repeats),
        timing(
            "HMGET of as many fields", lambda: client.hmget("reference-hash", dense.keys), repeats
        ),
    ]
    client.delete("reference-value", "reference-hash")
    return found


@contextmanager
def served() -> Iterator[tuple[RedisDirectory, redis.Redis]]:
    """Start a private server; yield its directory and a plain client."""
    with EmbeddedRedis() as server:
        directory = RedisDirectory(server.url, deadline_s=60.0)
        client = redis.Redis.from_url(server.url, protocol=2)
        yield directory, client
        client.close()
        directory.close()


def measure(artifacts: int = ARTIFACTS, repeats: int = 201) -> tuple[dict[str, float], str]:
    """Return the figures and a report."""
    rng = random.Random(1)
    with served() as (directory, client):
        epoch = directory.register(Worker("benchmark"), _LEASE_S).epoch
        renewals = [timing("renewal, nothing owned", lambda: directory.renew_lease(epoch), repeats)]
        before = client.info("memory")["used_memory"]
        dense = fill(directory, epoch, rng, artifacts)
        held = int(client.hget("{heterocache:default}:fleet", "artifacts") or 0)
        bytes_each = (client.info("memory")["used_memory"] - before) / held
        rates = claim_rates(directory, epoch, rng, rounds=5)
        found = lookups(directory, epoch, rng, dense, repeats)
        renewals.append(
            timing(f"renewal, {held:,} owned", lambda: directory.renew_lease(epoch), repeats, held)
        )
        plain = references(client, dense, repeats)
    medians = {x.name: x.median_ms for x in found}
    figures = {
        "lookup_ms_1m": max(medians[name] for name in MODELS),
        "lookup_decoded_ms_1m": medians[_DECODED],
        "found_ms_1m": medians[_FOUND],
        "claims_per_s": rates[CLAIMS_PER_CALL],
        "redis_bytes_per_artifact": bytes_each,
        "lookup_over_get": found[0].median_ms / plain[1].median_ms,
        "renew_ms": renewals[1].median_ms,
        "ping_ms": plain[0].median_ms,
    }
    return figures, report(figures, [*found, *renewals, *plain], rates)


def report(figures: dict[str, float], timings: Sequence[Timing], rates: dict[int, float]) -> str:
    calls = [
        [x.name, f"{x.num_artifacts:,}", *(f"{y:.2f}" for y in (x.median_ms, x.p95_ms, x.least_ms))]
        for x in timings
    ]
    return "\n\n".join(
        [
            goal_table("directory", figures),
            table(["call, 1,048,576 tokens", "artifacts", "median ms", "p95", "least"], calls),
            table(["claims in a call", "claims/s"], [[n, f"{r:,.0f}"] for n, r in rates.items()]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    figures, tables = measure()
    text = f"{machine_line()}\n\n{tables}"
    publish("directory", text, rounded(figures), {}, as_json=arguments.json)


def _copy(rng: random.Random, index: int) -> Copy:
    return Copy(_COPY_BYTES, rng.randbytes(16), index * _COPY_BYTES, 1, True)


if __name__ == "__main__":
    main()
