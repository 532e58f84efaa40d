"""`python -m benchmarks.router_corpora [--json]`: what the router adds, by kind of prompt, in ms.

Prompts like those that vllm-router's own overhead harness sends, to four stub workers, one at a
time: `hot64` (64 that come again), `cold` (never the same, nor its beginning), `mixed90` (nine of
ten hot), `long_shared_prefix` (the same but for the last 64 bytes) and `utf8` (hot, without ASCII),
of 2 KiB to 1 MiB. The router names them, asks the directory and places by price. Each figure is the
median through the router minus that of the same request sent directly, once the hot ones were all
sent before and the directory has their chunks. Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import aiohttp
import msgspec
import uvloop

from benchmarks.known_stubs import NAMING
from benchmarks.measure import is_default, machine_line, publish, rounded, table
from benchmarks.router_identity import texts
from benchmarks.router_process import running_router, wait_until_ready
from benchmarks.router_sessions import known_fleet
from hetero_connector.artifacts.record import ChunkKey
from ownership.router.identity import ChainCache, PromptIdentity, open_tokenizer

KIB = 1_024
WORKERS = 4
SIZES = (2 * KIB, 16 * KIB, 128 * KIB, 1_024 * KIB)
CORPORA = ("hot64", "cold", "mixed90", "long_shared_prefix", "utf8")
_HOT = 64
_TAIL = 64
_BUDGET_BYTES = 8 << 20
"""Bytes of all hot prompts: there are fewer large ones, but at least eight."""
_PATH = "/v1/completions"
_WIDE = "漢字とかな、絵文字🙂と한글. "


def num_hot(size: int) -> int:
    """Return the number of prompts of a size that come again."""
    return max(8, min(_HOT, _BUDGET_BYTES // size))


def prompts(corpus: str, size: int, count: int) -> Iterator[str]:
    """Yield so many prompts of a corpus, each of about `size` bytes."""
    rng = random.Random(corpus)
    lines = "".join(texts())
    wide = _WIDE * (1 + 2 * size // len(_WIDE.encode()))
    most_hot = num_hot(size)

    def text(name: str) -> str:
        at = random.Random(name).randrange(len(lines))
        return f"{name} {lines[at:]}{lines * (1 + size // len(lines))}"[:size]

    for number in range(count):
        is_hot = corpus == "hot64" or (corpus == "mixed90" and rng.random() < 0.9)
        if corpus == "utf8":
            yield f"{number % most_hot:015d} {wide}".encode()[:size].decode(errors="ignore")
        elif corpus == "long_shared_prefix":
            yield text(corpus)[: size - _TAIL] + f"{number:0{_TAIL}d}"
        else:
            yield text(f"hot {number % most_hot}" if is_hot else f"{corpus} {size} {number}")


async def measure(requests: int) -> tuple[list[list[str]], dict[str, float]]:
    """Return the table's rows and the figures."""
    rows, figures = [], dict[str, float]()
    with known_fleet(WORKERS) as fleet, running_router(**fleet.keys) as (url, _):
        identity = PromptIdentity(open_tokenizer(str(fleet.model)), ChainCache())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await wait_until_ready(session, url, WORKERS)
            direct = fleet.workers[0].url
            for corpus in CORPORA:
                for size in SIZES:
                    samples: dict[str, list[float]] = {url: [], direct: []}
                    known = 0 if corpus == "cold" else num_hot(size)
                    for number, prompt in enumerate(prompts(corpus, size, known + requests)):
                        request = {"model": "m", "prompt": prompt}
                        body = msgspec.json.encode(request)
                        if number < known:
                            worker = await _send(session, url, body)
                            fleet.claim(worker, _keys(identity, request))
                            continue
                        for where in samples:
                            begun_s = time.perf_counter()
                            await _send(session, where, body)
                            samples[where].append(1e3 * (time.perf_counter() - begun_s))
                    through, alone = (statistics.median(samples[x]) for x in (url, direct))
                    figures[f"{corpus}_{size // KIB}k_ms"] = through - alone
                    row = [corpus, f"{size // KIB} KiB", f"{alone:.2f}", f"{through - alone:.2f}"]
                    rows.append(row)
    return rows, figures


async def _send(session: aiohttp.ClientSession, url: str, body: bytes) -> str:
    """Read the answer to a request; return the worker's name if the router tells it."""
    async with session.post(url + _PATH, data=body) as answer:
        await answer.read()
        assert answer.status == 200
        return answer.headers.get("x-heterocache-worker", "")


def _keys(identity: PromptIdentity, request: dict[str, str]) -> Sequence[ChunkKey]:
    [prompt] = identity.read(_PATH, request)
    chain = identity.name(prompt, NAMING).chain
    assert chain is not None
    return chain.keys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_corpora")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--requests", type=int, default=40, help="of each kind (default 40)")
    given = parser.parse_args()
    rows, figures = uvloop.run(measure(given.requests))
    header = ["corpus", "bytes", "direct, ms", "added, ms"]
    text = f"{machine_line()}; medians\n\n{table(header, rows)}"
    write = is_default(parser, given, free=("json",))
    publish("router_corpora", text, rounded(figures), vars(given), as_json=given.json, write=write)


if __name__ == "__main__":
    main()
