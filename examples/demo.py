"""`make demo`: an agent session that survives kill -9 of its server.

For a dense, a sliding-window and a DeepSeek-V4-type model it starts the stock OpenAI server with
HeteroConnector, plays a session over HTTP, kills the server, starts it again and plays the next
turn, whose prefix is restored from SSD. It prints the time to the first token by the source of the
prefix, the tokens restored, the bytes stored, and the largest difference between answers. It ends
with status 1 if no model could run, nothing was restored, an answer differs, or restoring was not
faster.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from examples.agent_session import AgentSession
from examples.checkpoints import add_models, write_checkpoint
from examples.cpu_kernels import runnable
from examples.serving import (
    Reply,
    Server,
    kv_transfer_config,
    logprob_distance,
    stop_servers_on_sigterm,
)
from examples.stored_bytes import StoredBytes, measure_stored_bytes
from examples.tables import table

MODELS = ("dense", "gemma3", "deepseek_v4")
CHUNK = 256
"""Tokens per stored chunk, and a boundary at which all three models can resume."""
TASK_TOKENS = 20 * CHUNK
REPLY_TOKENS = 8
VOCABULARY = 512
QUIET_S, MAX_WAIT_S = 2.0, 30.0
"""Sealed state is written to SSD within about a second, later on a busy machine. So the server is
killed when its store has not changed for `QUIET_S`, or after `MAX_WAIT_S`."""
_SOURCES = {
    "cold": "computed cold",
    "local": "the engine's own prefix hit",
    "dram": "restored from DRAM",
    "ssd": "restored from SSD after kill -9",
}


@dataclass
class Outcome:
    """The results of one model."""

    model: str
    prompt_tokens: int = 0
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    """Replies to the same prompt, by the source of its prefix."""
    restored: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tokens restored by one request, by tier and state type."""
    stored: StoredBytes | None = None
    failures: float = 0.0

    def ttft_s(self, source: str) -> float:
        """Return the median of the seconds to the first token."""
        return statistics.median(reply.ttft_s for reply in self.replies[source])

    def delta(self, source: str) -> float:
        """Return the largest |difference| of a logprob from the engine's own prefix hit."""
        reference = self.replies["local"][0]
        return max(logprob_distance(reference, reply) for reply in self.replies[source])

    def problems(self) -> list[str]:
        """Return a line for each result that a user should not accept."""
        found = []
        tolerance = 0.0 if self.model == "deepseek_v4" else 1e-4
        for tier in ("dram", "ssd"):
            replies = self.replies[tier]
            if not self.restored[tier]:
                found.append(f"nothing was restored from {tier}")
            if {r.cached_tokens for r in replies} != {self.replies["local"][0].cached_tokens}:
                found.append(f"{tier}: not the same number of cached tokens as the prefix hit")
            if self.delta(tier) > tolerance:
                found.append(f"{tier}: logprobs differ by {self.delta(tier):.2g}")
            if self.ttft_s(tier) >= self.ttft_s("cold"):
                found.append(f"{tier}: not faster than computing")
        if self.failures:
            found.append(f"{self.failures:.0f} transfers or checks failed")
        return [f"{self.model}: {problem}" for problem in found]


def prepare(model: str, directory: Path) -> Server:
    """Return the server of one model, not started, with an empty store of its own."""
    checkpoint = write_checkpoint(model, directory / "checkpoints")
    store = directory / "store" / model
    shutil.rmtree(store, ignore_errors=True)
    log = directory / f"{model}.log"
    log.unlink(missing_ok=True)
    extra = {"dram_gib": 0.5, "ssd_dir": str(store), "ssd_gib": 1, "chunk_tokens": CHUNK}
    extra["checkpoints"] = "full"  # `stored_bytes` counts a checkpoint for each chunk
    # Models this small compute nearly as fast as a busy machine reads: then loading less is right,
    # but answers are compared at the same number of cached tokens.
    extra["planner"] = "always_load"
    engine_args = {"max_model_len": 8192, "max_logprobs": VOCABULARY}
    return Server(checkpoint, log, kv_transfer_config(extra), engine_args)


def play(server: Server, following: Server | None) -> Outcome:
    """Play the session on one model's server, with a kill before its last turn.

    `following`, the next model's server, starts while this one restarts: starting takes most of
    the demo's time, and nothing is measured then.
    """
    model = server.model.name
    outcome = Outcome(model)
    session = AgentSession(server.model / "tokenizer.json", seed=len(model))
    other = session.draw_text(CHUNK + 50)
    _say(model, "starting the server")
    server.start()
    _warm_up(server, other)
    _say(model, f"first prompt of {TASK_TOKENS:,} tokens, then the session's turns")
    session.add_text(TASK_TOKENS)
    outcome.stored = measure_stored_bytes(server, session.tokens, CHUNK)
    _turns(server, session)
    _measure_live(server, session, outcome)
    _wait_until_written(_store_of(server))
    _say(model, "kill -9, and starting it again")
    server.kill()
    server.launch()
    if following is not None:
        following.start()
    server.start()
    _warm_up(server, other)
    _say(model, "the next turn, from SSD")
    _measure_restart(server, session, outcome)
    server.stop()
    return outcome


def _warm_up(server: Server, prompt: list[int]) -> None:
    """Send the first requests of a process, which pay for lazy initialisation."""
    server.complete(prompt, REPLY_TOKENS, VOCABULARY)
    server.reset_prefix_cache()
    server.complete(prompt, REPLY_TOKENS, VOCABULARY)
    time.sleep(0.5)  # until the counters of these requests are published


def _turns(server: Server, session: AgentSession) -> None:
    """Play three turns. The last tool output ends just after a boundary.

    So the next prompt resumes at the same boundary from every source, and answers are compared
    at the same number of cached tokens.
    """
    for num_tokens in (300, 420):
        session.add_reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
        session.add_text(num_tokens)
    session.add_reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
    session.add_text(-len(session.tokens) % CHUNK + 4)
    session.add_reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
    session.add_text(12)


def _measure_live(server: Server, session: AgentSession, outcome: Outcome) -> None:
    prompt = session.tokens
    outcome.prompt_tokens = len(prompt)
    replies = outcome.replies = {"cold": [], "local": [], "dram": []}
    for repeat in range(3):
        replies["local"].append(_ask(server, prompt))
        server.reset_prefix_cache()
        before = _restored(server)
        replies["dram"].append(_ask(server, prompt))
        if repeat == 0:
            outcome.restored["dram"] = _since(before, _restored(server, before), "dram")
    for repeat in range(2):  # nothing is stored under a new salt
        replies["cold"].append(_ask(server, prompt, cache_salt=f"another user {repeat}"))
    outcome.failures += _failures(server)


def _store_of(server: Server) -> Path:
    assert server.kv_transfer is not None
    return Path(server.kv_transfer["kv_connector_extra_config"]["ssd_dir"])


def _wait_until_written(store: Path) -> None:
    began = changed = time.monotonic()
    last_ns = 0
    while time.monotonic() < min(changed + QUIET_S, began + MAX_WAIT_S):
        newest_ns = max((_changed_ns(path) for path in store.rglob("*")), default=0)
        if newest_ns != last_ns:
            last_ns, changed = newest_ns, time.monotonic()
        time.sleep(0.1)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # SQLite creates and removes files of its own
        return 0


def _measure_restart(server: Server, session: AgentSession, outcome: Outcome) -> None:
    before = _restored(server)
    outcome.replies["ssd"] = [_ask(server, session.tokens)]
    outcome.restored["ssd"] = _since(before, _restored(server, before), "ssd")
    outcome.replies["local"].append(_ask(server, session.tokens))
    outcome.failures += _failures(server)


def _ask(server: Server, prompt: list[int], **request: str) -> Reply:
    return server.complete(prompt, REPLY_TOKENS, VOCABULARY, **request)


def _restored(
    server: Server, unlike: dict[tuple[str, str], int] | None = None
) -> dict[tuple[str, str], int]:
    """Return the tokens restored so far by (tier, state type).

    With `unlike` it waits up to 3 s for other values than those.
    """
    deadline = time.monotonic() + (3.0 if unlike is not None else 0.0)
    while True:
        found = {
            (labels["tier"], labels["state_type"]): int(value)
            for labels, value in server.series("heterocache_restored_tokens_total")
        }
        if found != unlike or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _since(
    before: dict[tuple[str, str], int], after: dict[tuple[str, str], int], tier: str
) -> dict[str, int]:
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    return {kind: tokens for (at, kind), tokens in gained.items() if at == tier and tokens}


def _failures(server: Server) -> float:
    return sum(value for _, value in server.series("heterocache_failures_total"))


def print_report(outcome: Outcome) -> None:
    """Print the tables of one model."""
    print(f"\n== {outcome.model}: next turn of {outcome.prompt_tokens:,} tokens ==")
    print(f"\n{_time_table(outcome)}\n\n{_restored_table(outcome)}")
    if outcome.stored is not None:
        print(f"\n{outcome.stored.as_table()}")
    print(flush=True)


def _time_table(outcome: Outcome) -> str:
    rows = []
    for source, title in _SOURCES.items():
        reply = outcome.replies[source][0]
        speedup = outcome.ttft_s("cold") / outcome.ttft_s(source)
        rows.append(
            (
                title,
                f"{outcome.ttft_s(source) * 1e3:,.0f} ms",
                f"{speedup:.1f} x",
                f"{reply.cached_tokens or 0:,}",
                f"{outcome.delta(source):.1e}",
            )
        )
    header = ("prefix", "TTFT", "faster", "cached tokens", "max |delta logprob|")
    return table(header, rows)


def _restored_table(outcome: Outcome) -> str:
    kinds = {kind for tokens in outcome.restored.values() for kind in tokens}
    rows = [
        (kind, *(f"{outcome.restored[tier].get(kind, 0):,}" for tier in ("dram", "ssd")))
        for kind in sorted(kinds)
    ]
    return table(("tokens restored", "from DRAM", "from SSD"), rows)


def _say(model: str, message: str) -> None:
    print(f"{model}: {message}", flush=True)


def main() -> int:
    """Play the session with each model and report."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    add_models(parser, MODELS)
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="checkpoints, stores, logs")
    arguments = parser.parse_args()
    stop_servers_on_sigterm()
    directory = arguments.dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    servers = [prepare(model, directory) for model in runnable(arguments.models)]
    outcomes = []
    try:
        for pair in zip_longest(servers, servers[1:]):
            outcomes.append(play(*pair))
            print_report(outcomes[-1])
    finally:
        for server in servers:
            server.kill()
    problems = [problem for outcome in outcomes for problem in outcome.problems()]
    print(f"{time.monotonic() - began:.0f} s; logs in {directory}")
    for problem in problems:
        print(f"FAILED  {problem}")
    return 0 if outcomes and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
