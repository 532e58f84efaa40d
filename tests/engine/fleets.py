"""Helpers for servers that share a cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from examples.checkpoints import write_checkpoint
from examples.disaggregated_prefill.fleet import value
from examples.serving import Reply, Server, kv_transfer_config
from tests import waiting
from tests.engine.harness import CHECKPOINTS, prompt_tokens

LEASE_S = 3.0
MAX_TOKENS = 8
TOLERANCE = 1e-4

until = partial(waiting.until, pause_s=0.1)
"""Wait with fewer questions: each is a request to a server."""


def server_of(
    model: str,
    folder: Path,
    name: str,
    directory: str,
    engine_args: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Server:
    given = {
        "dram_gib": 0.1,
        "planner": "always_load",
        "checkpoints": "full",
        "directory": directory,
        "lease_s": LEASE_S,
        "load_deadline_s": 100,  # a lookup gets 1 s of it: the machine may be busy
        "worker_name": name,
        **extra,
    }
    return Server(
        write_checkpoint(model, CHECKPOINTS),
        folder / f"{name}.log",
        kv_transfer_config(given),
        engine_args or {},
    )


def what_happened(*servers: Server) -> str:
    """Return what servers logged as warnings or errors, and how their lookups and reads ended, for
    a test that fails.
    """
    lines = [line for server in servers for line in server.log_path.read_text().splitlines()]
    lines = [line for line in lines if " WARNING " in line or " ERROR " in line]
    for server in servers:
        for name in ("directory_lookups", "directory_failures", "failures", "restores_replanned"):
            found = server.series(f"heterocache_{name}_total")
            counts = {" ".join(labels.values()): count for labels, count in found if count}
            lines.append(f"{server.log_path.stem}: {name}: {counts}")
    return "\n".join(lines)


def same(reply: Reply, answer: Reply) -> None:
    assert reply.tokens == answer.tokens
    for ours, theirs in zip(reply.top_logprobs, answer.top_logprobs, strict=True):
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= len(theirs) - 1  # the last places may swap
        assert max(abs(ours[token] - theirs[token]) for token in shared) <= TOLERANCE


def computed(server: Server, prompt: list[int]) -> Reply:
    """Let the server compute and claim a prompt; return its answer from its own prefix."""
    before = value(server, "artifacts", tier="dram")
    server.complete(prompt, max_tokens=1)
    answer = server.complete(prompt, MAX_TOKENS)
    until(lambda: value(server, "artifacts", tier="dram") > before, "it is sealed")
    until(lambda: all_claimed(server), "the fleet knows")
    return answer


def all_claimed(server: Server) -> bool:
    """True if every artifact of a server without evictions was claimed, by it or another."""
    owned = value(server, "directory_claims", outcome="owned")
    return owned + value(server, "replicas") >= value(server, "artifacts", tier="dram")


def is_answered(server: Server, seed: int) -> bool:
    """True if the directory answers the server's lookup of an unknown prompt."""
    before = value(server, "directory_lookups", outcome="nothing")
    server.complete(prompt_tokens(600, seed), max_tokens=1)
    return value(server, "directory_lookups", outcome="nothing") > before
