"""The cost of the live page: decoding with and without a viewer of its events, by turns.

The viewer reads the events as a browser does, and drops them. A browser that draws them on the
cores of the engine would be measured with its own work.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_process import CHECKPOINTS, prompt_tokens
from benchmarks.page_viewer import viewer
from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config

MODEL = "gemma3"
_DECODE_S = "vllm:request_decode_time_seconds"
"""The engine's histogram of seconds from a request's first token to its last."""
_COUNTED_WITHIN_S = 30.0
_TURNS = 12
_REQUESTS = 8
_PROMPT_TOKENS = 256
_NEW_TOKENS = 500
_SESSIONS = 40
"""More than the page shows, so that each event is as large as it gets."""


@dataclass(frozen=True)
class DecodeTiming:
    """Mean seconds of a batch's decodes, in the order of the turns."""

    alone_s: list[float]
    watched_s: list[float]
    event_bytes: int

    @property
    def ratios(self) -> list[float]:
        """Watched over alone, of each turn."""
        return [x / y for x, y in zip(self.watched_s, self.alone_s, strict=True)]

    def figures(self) -> dict[str, float]:
        """Return the median of the turns' ratios, the least and the most."""
        name, ratios = "decode_ratio_observed", self.ratios
        least, most = min(ratios), max(ratios)
        return {name: statistics.median(ratios), f"{name}_least": least, f"{name}_most": most}


def measure(turns: int = _TURNS) -> DecodeTiming:
    """Time a server with the connector, the page's routes and a full event."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as server:
        for number in range(_SESSIONS):
            _fill(server, number)
        seeds = itertools.count(_SESSIONS)
        _decode(server, seeds)
        alone, watched, sizes = list[float](), list[float](), list[int]()
        for turn in range(1, turns + 1):
            for is_watched in (turn % 2 == 0, turn % 2 == 1):
                if not is_watched:
                    alone.append(_decode(server, seeds))
                    continue
                with viewer(f"{server.url}/v1/heterocache/live") as size_bytes:
                    watched.append(_decode(server, seeds))
                    sizes.append(size_bytes)
    return DecodeTiming(alone, watched, max(sizes))


def _server(folder: Path) -> Server:
    return Server(
        write_checkpoint(MODEL, CHECKPOINTS),
        folder / "log",
        kv_transfer_config({"dram_gib": 0.25, "planner": "always_load"}),
        environment={"VLLM_PLUGINS": "heterocache"},
    )


def _fill(server: Server, number: int) -> None:
    """Make a session with some stored state, and a decision to restore it."""
    prompt = prompt_tokens(600, number)
    for _ in range(2):
        _complete(server, prompt, 2, session=f"session {number}")
        server.reset_prefix_cache()


def _decode(server: Server, seeds: Iterator[int]) -> float:
    """Return the mean seconds of a batch's decodes, each from its first token to the end.

    The prompts are new: restored state would shorten what comes before the first token, and let
    decodes of one batch begin at other times than those of another.
    """
    prompts = [prompt_tokens(_PROMPT_TOKENS, next(seeds)) for _ in range(_REQUESTS)]
    before, before_s = _decodes(server)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(lambda prompt: _complete(server, prompt, _NEW_TOKENS), prompts))
    deadline = time.monotonic() + _COUNTED_WITHIN_S
    while True:  # an answer may arrive before it is counted
        count, seconds = _decodes(server)
        if count - before == _REQUESTS:
            return (seconds - before_s) / _REQUESTS
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count - before} of {_REQUESTS} decodes were counted")


def _decodes(server: Server) -> tuple[int, float]:
    """Return the number of all decodes until now, and their seconds."""
    count, seconds = (
        sum(value for _, value in server.series(f"{_DECODE_S}_{what}")) for what in ("count", "sum")
    )
    return int(count), seconds


def _complete(server: Server, prompt: list[int], tokens: int, session: str = "") -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    if session:
        body["kv_transfer_params"] = {"session_id": session}
    server.post("/v1/completions", body)
