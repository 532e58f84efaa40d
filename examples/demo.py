"""`make demo`: an agent session that survives kill -9 of its server.

For a dense, a sliding-window and a DeepSeek-V4-type model it starts the stock OpenAI
server with HeteroConnector, plays a session over HTTP, kills the server, starts it again
and plays the next turn, whose prefix comes back from SSD. It prints what each way to the
first token costs, what was restored and stored, and how far the answers differ. It ends
with status 1 if nothing was restored, an answer differs, or restoring was not faster.
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
from examples.checkpoints import write_checkpoint
from examples.cpu_kernels import runnable
from examples.demo_report import print_report
from examples.serving import (
    Reply,
    Server,
    kv_transfer_config,
    logprob_distance,
    stop_servers_on_sigterm,
)
from examples.stored_bytes import StoredBytes, measure_stored_bytes

MODELS = ("dense", "gemma3", "deepseek_v4")
CHUNK = 256
"""Tokens per stored chunk, and a boundary at which all three models can resume."""
TASK_TOKENS = 20 * CHUNK
REPLY_TOKENS = 8
VOCABULARY = 512
SPILL_WAIT_S, MOST_SPILL_WAIT_S = 2.0, 30.0
"""What is sealed is written on to SSD within about a second, on a busy machine later: the kill
comes when nothing has been written for so long."""


@dataclass
class Outcome:
    """What happened with one model."""

    model: str
    prompt_tokens: int = 0
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    """Way to the first token -> replies to the same prompt."""
    restored: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tier -> state type -> tokens restored by one request."""
    stored: StoredBytes | None = None
    failures: float = 0.0

    def ttft_s(self, way: str) -> float:
        """Median seconds to the first token."""
        return statistics.median(reply.ttft_s for reply in self.replies[way])

    def delta(self, way: str) -> float:
        """Largest |difference| of a logprob from the engine's own prefix hit."""
        reference = self.replies["local"][0]
        return max(logprob_distance(reference, reply) for reply in self.replies[way])

    def complaints(self) -> list[str]:
        """What a user should not accept; empty when all is well."""
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
    """The server of one model, with an empty store of its own. Not started."""
    checkpoint = write_checkpoint(model, directory / "checkpoints")
    store = directory / "store" / model
    shutil.rmtree(store, ignore_errors=True)
    log = directory / f"{model}.log"
    log.unlink(missing_ok=True)
    extra = {"dram_gib": 0.5, "ssd_dir": str(store), "ssd_gib": 1, "chunk_tokens": CHUNK}
    extra["checkpoints"] = "full"  # as the arithmetic counts that the bytes are held against
    engine_args = {"max_model_len": 8192, "max_logprobs": VOCABULARY}
    return Server(checkpoint, log, kv_transfer_config(extra), engine_args)


def play(server: Server, following: Server | None) -> Outcome:
    """The whole story with one model.

    `following`, the next model's server, starts while this one restarts: starting is
    most of the demo's time, and nothing is measured meanwhile.
    """
    model = server.model.name
    outcome = Outcome(model)
    session = AgentSession(server.model / "tokenizer.json", seed=len(model))
    other = session.text(CHUNK + 50)
    _say(model, "starting the server")
    server.start()
    _warm_up(server, other)
    _say(model, f"first prompt of {TASK_TOKENS:,} tokens, then the session's turns")
    session.task(TASK_TOKENS)
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
    """The first requests of a process pay for lazy initialisation: let it be this one."""
    server.complete(prompt, REPLY_TOKENS, VOCABULARY)
    server.reset_prefix_cache()
    server.complete(prompt, REPLY_TOKENS, VOCABULARY)
    time.sleep(0.5)  # the counters of these requests come in first


def _turns(server: Server, session: AgentSession) -> None:
    """Reply and tool output, three times; the last output ends just after a boundary.

    So the next turn's prompt resumes at the same boundary however its prefix comes back,
    and answers are compared at the same number of cached tokens.
    """
    for num_tokens in (300, 420):
        session.reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
        session.tool_output(num_tokens)
    session.reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
    session.tool_output(-len(session.tokens) % CHUNK + 4)
    session.reply(server.complete(session.tokens, REPLY_TOKENS, 0).tokens)
    session.tool_output(12)


def _measure_live(server: Server, session: AgentSession, outcome: Outcome) -> None:
    prompt = session.tokens
    outcome.prompt_tokens = len(prompt)
    ways = outcome.replies = {"cold": [], "local": [], "dram": []}
    for repeat in range(3):
        ways["local"].append(_ask(server, prompt))
        server.reset_prefix_cache()
        before = _restored(server)
        ways["dram"].append(_ask(server, prompt))
        if repeat == 0:
            outcome.restored["dram"] = _since(before, _restored(server, before), "dram")
    for repeat in range(2):  # a salt makes the same tokens another conversation's
        ways["cold"].append(_ask(server, prompt, cache_salt=f"another user {repeat}"))
    outcome.failures += _failures(server)


def _store_of(server: Server) -> Path:
    assert server.kv_transfer is not None
    return Path(server.kv_transfer["kv_connector_extra_config"]["ssd_dir"])


def _wait_until_written(store: Path) -> None:
    """Until nothing in the directory has changed for a while."""
    began = changed = time.monotonic()
    last_ns = 0
    while time.monotonic() < min(changed + SPILL_WAIT_S, began + MOST_SPILL_WAIT_S):
        newest_ns = max((_changed_ns(path) for path in store.rglob("*")), default=0)
        if newest_ns != last_ns:
            last_ns, changed = newest_ns, time.monotonic()
        time.sleep(0.1)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # SQLite's own come and go
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
    """(tier, state type) -> tokens restored so far; waits a moment to differ from `unlike`."""
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


def _say(model: str, message: str) -> None:
    print(f"{model}: {message}", flush=True)


def main() -> int:
    """Play the session with each model and report."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="checkpoints, stores, logs")
    arguments = parser.parse_args()
    stop_servers_on_sigterm()
    directory = arguments.dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    servers = [prepare(model, directory) for model in runnable(arguments.models)]
    try:
        outcomes = [play(*pair) for pair in zip_longest(servers, servers[1:])]
    finally:
        for server in servers:
            server.kill()
    for outcome in outcomes:
        print_report(outcome)
    complaints = [problem for outcome in outcomes for problem in outcome.complaints()]
    print(f"\n{time.monotonic() - began:.0f} s; logs in {directory}")
    for problem in complaints:
        print(f"FAILED  {problem}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
