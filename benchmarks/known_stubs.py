"""Stub workers that say what a router asks a vLLM server with the connector, in one process.

`python -m benchmarks.known_stubs --model FOLDER --count 100` opens a port for each and prints them
all. They name chains, tell costs and pages, and tokenise, as workers of a fleet of `MODEL` do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from benchmarks.child_processes import announced
from examples.stub_worker import StubServer
from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec.presets import PRESETS
from ownership.router.identity import ChainCache, ChainNaming, PromptIdentity, open_tokenizer
from ownership.router.view.published import FORMAT

MODEL = "llama-3.1-8b"
SERVED_AS = "m"
CHUNK_TOKENS = 256
NAMING = ChainNaming(ChainHasher(b"stub", CHUNK_TOKENS).root, CHUNK_TOKENS)
_PAGES = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="60000"} 1.0\n'


class StubAddress(NamedTuple):
    """A worker as the router's configuration names it."""

    name: str
    url: str


def costs() -> CostModel:
    """Return costs like an H200's: 100,000 tokens per second."""
    compute = ComputeRegression(ComputeCoefficients(5e-3, 1e-5, 1e-10))
    return CostModel(compute, LoadModel(PRESETS[MODEL]().state_types), step_tokens=8_192)


def chain_answer(worker: str, tokenizer: bytes) -> dict[str, Any]:
    """Return a worker's answer about its chains. `tokenizer`: the digest of its files."""
    engine = {"worker": worker, "model": SERVED_AS, "tokenizer": tokenizer.hex()}
    naming = {"root": NAMING.root.hex(), "chunk_tokens": CHUNK_TOKENS}
    known = {"is_shared": True, "clearings": {}, "adapters": {}}
    spec = PRESETS[MODEL]().as_plain()
    return {"format": FORMAT, "engine": engine, **naming, **known, "model_spec": spec}


class _KnownStub(StubServer):
    """A stub of which a router knows chains, costs and pages."""

    def __init__(self, name: str, identity: PromptIdentity) -> None:
        super().__init__(name, SERVED_AS)
        assert identity.tokenizer is not None
        self._identity, self._tokenizer = identity, identity.tokenizer
        subject = ProfileSubject("stub", "", "bfloat16", "", "auto", 1, "")
        profile = CostProfile.of(costs(), MODEL, subject).as_json()
        self.answers = {
            "/metrics": _PAGES,
            "/v1/heterocache/chain": {"engines": [chain_answer(name, self._tokenizer.digest)]},
            "/v1/heterocache/costs": {"engines": [{"costs": profile}]},
            "/is_sleeping": {"is_sleeping": False},
        }

    def answer(self, path: str, body: bytes) -> Any:
        if path != "/tokenize":
            return super().answer(path, body)
        asked = msgspec.json.decode(body)
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        [prompt] = self._identity.read(path, asked)
        return {"tokens": self._tokenizer.tokens(prompt.text or "")}


@contextmanager
def known_stubs(model: Path, count: int) -> Iterator[list[StubAddress]]:
    """Run `count` workers with the tokenizer in a folder; yield their addresses."""
    command = ["-m", "benchmarks.known_stubs", "--model", str(model), "--count", str(count)]
    with announced(command) as (line, _):
        ports = json.loads(line)
        yield [StubAddress(_name(i), f"http://127.0.0.1:{x}") for i, x in enumerate(ports)]


def _name(number: int) -> str:
    return f"stub-{number:03}"


async def _serve(model: str, count: int) -> None:
    identity = PromptIdentity(open_tokenizer(model), ChainCache())
    loop, servers = asyncio.get_running_loop(), []
    for number in range(count):
        stub = _KnownStub(_name(number), identity)
        servers.append(await loop.create_server(stub.connection, "127.0.0.1", 0, backlog=1024))
    print(json.dumps([x.sockets[0].getsockname()[1] for x in servers]), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_stubs")
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("--count", type=int, default=1)
    given = parser.parse_args()
    uvloop.run(_serve(given.model, given.count))


if __name__ == "__main__":
    main()
