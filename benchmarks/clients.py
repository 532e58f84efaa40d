"""`python -m benchmarks.clients [--json]`: load generators that others wrote, with and without us.

Two stock servers of one small dense model differ only in the connector. Each client sends the same
requests to both, by turns, and its own report gives the figures. All of a round's prompts are about
three times as large as the engine's KV cache, and none are sent in two rounds.

Per client, as ratios of what it measured with the connector over without:

`CLIENT_ttft`: its median (LMBenchmark: mean) time to first token.
`CLIENT_throughput`: requests per second.

`errors`: failed requests of all clients and both servers; `cancelled`: those that a client left.
`cached_mismatch`: tokens by which the counts of cached tokens differ: those of our restores from
vLLM's own of external hits, and aiperf's sum over the answers' usage from the server's.

Each client has an environment of its own below `.cache/clients`, made by `make bench-clients`.
LMBenchmark is no package: `--lmbenchmark` is a checkout of github.com/LMCache/LMBenchmark.
`benchmarks.router_clients` sends the same through the router.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import is_default, machine_line, publish, rounded, table
from examples.checkpoints import write_checkpoint
from examples.serving import (
    Server,
    engine_environment,
    kv_transfer_config,
    stop_servers_on_sigterm,
)

ENVIRONMENTS = Path(".cache/clients")
MODEL = "dense-bench"
BLOCK_TOKENS = 32
KV_TOKENS = 8192
"""Tokens of the engine's KV cache: a round's prompts have about three times as many."""
ENGINE_ARGUMENTS: Mapping[str, Any] = {
    "num_gpu_blocks_override": KV_TOKENS // BLOCK_TOKENS,
    "max_model_len": KV_TOKENS // 2,
    "max_num_seqs": 4,
}
PREFIX_TOKENS = 2048
TURN_TOKENS = 128
REPLY_TOKENS = 16
SESSIONS = 10
CONCURRENCY = 2
CANCELLED_PERCENT = 10
AGENTS_S = 60
_TIMEOUT_S = 400.0
_TRACE_BLOCK = 256
_AGENT_BLOCK = 64
_CACHE_READ = "usage_prompt_cache_read_tokens"
_LMBENCHMARK_FIRST = 10
"""Requests with which its script warms a server up."""


@dataclass(frozen=True)
class Report:
    """The figures that a client reported of one run."""

    requests: int
    errors: int
    ttft_s: float
    requests_per_s: float
    cancelled: int = 0
    """Requests that the client left on purpose."""
    cached_tokens: int | None = None
    """Sum over the answers' usage; None if the client does not read it."""
    unreported: int = 0
    """Requests that the client sends besides, before those that it reports."""


@dataclass(frozen=True)
class Target:
    """A server that clients send to, or a router before several."""

    url: str
    model: Path
    """The checkpoint, which has the tokenizer. The served model has its name."""


@dataclass(frozen=True)
class Run:
    """One run of a client, with what the server counted meanwhile."""

    report: Report
    restored_tokens: int
    """By the connector's own counter."""
    external_tokens: int
    """By vLLM's counter of what a connector brought."""
    local_tokens: int
    """By vLLM's counter of hits in its own prefix cache."""

    @property
    def mismatch(self) -> int:
        """Tokens by which three counts of the same differ."""
        cached = self.external_tokens + self.local_tokens
        reported = cached if self.report.cached_tokens is None else self.report.cached_tokens
        return abs(self.restored_tokens - self.external_tokens) + abs(cached - reported)


Client = Callable[[Target, int, Path], Report]
"""Runs a client: the target, the round, an empty folder for its output."""


def vllm_prefixes(target: Target, turn: int, folder: Path) -> Report:
    """`vllm bench serve`: each of several long prefixes comes again with other ends."""
    return _vllm_bench(
        target,
        folder,
        *("--dataset-name", "prefix_repetition", "--num-prompts", str(3 * SESSIONS)),
        *("--prefix-repetition-num-prefixes", str(SESSIONS)),
        *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
        *("--prefix-repetition-suffix-len", str(TURN_TOKENS)),
        *("--prefix-repetition-output-len", str(REPLY_TOKENS)),
        *("--max-concurrency", str(CONCURRENCY), "--seed", str(turn)),
    )


def vllm_trace(target: Target, turn: int, folder: Path) -> Report:
    """`vllm bench serve`: a timed trace of sessions whose prompts grow."""
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in trace_of(turn)))
    return _vllm_bench(
        target,
        folder,
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
        *("--timed-trace-chunk-hash-size", str(_TRACE_BLOCK), "--self-timed"),
        *("--timed-trace-sec-multiplier", "1.0", "--num-prompts", str(3 * SESSIONS)),
        *("--disable-shuffle", "--seed", str(1000 + turn)),
    )


def trace_of(turn: int) -> list[dict[str, Any]]:
    """Return a trace in Mooncake's format: three turns of each session, a request a second."""
    lines = []
    blocks = PREFIX_TOKENS // _TRACE_BLOCK
    for at in range(3 * SESSIONS):
        session, round_ = at % SESSIONS, at // SESSIONS
        first = 1 + 1000 * (turn * SESSIONS + session)
        ids = list(range(first, first + blocks + round_))
        lines.append(
            {
                "timestamp": at,
                "input_length": len(ids) * _TRACE_BLOCK,
                "output_length": REPLY_TOKENS,
                "hash_ids": ids,
            }
        )
    return lines


def guidellm(target: Target, turn: int, folder: Path) -> Report:
    """Prompts that begin with one of several long prefixes, over the chat API."""
    data = {
        "kind": "synthetic_text",
        "prefix_tokens": PREFIX_TOKENS,
        "prefix_count": SESSIONS,
        "prompt_tokens": TURN_TOKENS,
        "output_tokens": REPLY_TOKENS,
    }
    output = folder / "guidellm.json"
    _run(
        folder,
        *(_tool("guidellm", "guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={target.url},model={target.model.name}"),
        *("--tokenizer", f"kind=huggingface_auto,model={target.model}"),
        *("--data", _pairs(data), "--seed", f"kind=static,value={turn}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={3 * SESSIONS}"),
        *("--output", f"kind=json,path={output}"),
    )
    (found,) = json.loads(output.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    return Report(
        totals["successful"],
        totals["errored"],
        metrics["time_to_first_token_ms"]["successful"]["median"] / 1000,
        metrics["requests_per_second"]["successful"]["mean"],
        totals["incomplete"],  # at its end it may leave the last ones
    )


def aiperf(target: Target, turn: int, folder: Path) -> Report:
    """Conversations of three turns over the chat API, all at the same time."""
    return _aiperf(target, turn, folder, *_CONVERSATIONS)


def aiperf_cancels(target: Target, turn: int, folder: Path) -> Report:
    """The same, and some clients leave in the middle of an answer."""
    gone = ("--request-cancellation-rate", str(CANCELLED_PERCENT))
    after = ("--request-cancellation-delay", "0.05")
    return _aiperf(target, 1000 + turn, folder, *_CONVERSATIONS, *gone, *after)


_CONVERSATIONS = (
    *("--num-conversations", str(SESSIONS), "--conversation-turn-mean", "3"),
    *("--num-dataset-entries", str(SESSIONS), "--conversation-turn-stddev", "0"),
    *("--user-context-prompt-length", str(PREFIX_TOKENS), "--isl", str(TURN_TOKENS)),
    *("--osl", str(REPLY_TOKENS), "--concurrency", str(SESSIONS)),
)


def aiperf_agents(target: Target, turn: int, folder: Path) -> Report:
    """The AgentX scenario, shortened: agents replay sessions in which they start other agents."""
    traces = folder / "traces"
    traces.mkdir()
    for number in range(SESSIONS):
        path = traces / f"{number}.json"
        path.write_text(json.dumps(agent_trace(f"{turn}-{number}")))
    return _aiperf(
        target,
        2000 + turn,
        folder,
        # Its own traces are large, and it would run for half an hour.
        *("--scenario", "inferencex-agentx-mvp", "--unsafe-override"),
        *("--benchmark-duration", str(AGENTS_S), "--session-header", "X-Session-ID"),
        *("--custom-dataset-type", "weka_trace", "--input-file", str(traces)),
        *("--concurrency", str(CONCURRENCY)),
    )


def agent_trace(name: str) -> dict[str, Any]:
    """Return a session in Weka's format: turns of an agent, and between them one that it starts."""

    def request(at_s: float, blocks: Sequence[int]) -> dict[str, Any]:
        return {
            "t": at_s,
            "type": "s",
            "model": MODEL,
            "in": len(blocks) * _AGENT_BLOCK,
            "out": REPLY_TOKENS,
            "hash_ids": list(blocks),
        }

    prefix, more = PREFIX_TOKENS // _AGENT_BLOCK, TURN_TOKENS // _AGENT_BLOCK
    turns = [request(at, range(prefix + at * more)) for at in range(4)]
    others = [request(at, range(1000, 1000 + prefix // 2 + at * more)) for at in range(2)]
    started = {
        "t": 1.5,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "status": "completed",
        "duration_ms": 1000,
        "models": [MODEL],
        "requests": others,
    }
    for turn in turns[2:]:
        turn["t"] += 2.0
    return {
        "id": name,
        "models": [MODEL],
        "block_size": _AGENT_BLOCK,
        "hash_id_scope": "local",
        "requests": [*turns[:2], started, *turns[2:]],
    }


CLIENTS: dict[str, Client] = {
    "vllm_prefixes": vllm_prefixes,
    "vllm_trace": vllm_trace,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "aiperf_cancels": aiperf_cancels,
    "aiperf_agents": aiperf_agents,
}


def lmbenchmark(checkout: Path) -> Client:
    """Return LMBenchmark's multi-round script as a client: users that share a system prompt."""
    script = checkout / "synthetic-multi-round-qa/multi-round-qa.py"

    def run(target: Target, turn: int, folder: Path) -> Report:
        output = folder / "summary.csv"
        printed = _run(
            folder,
            *(_tool("lmbenchmark", "python"), str(script.resolve()), "--num-users", str(SESSIONS)),
            # Its lengths are words "hi ", three tokens each for this tokenizer.
            *("--shared-system-prompt", "100", "--user-history-prompt", str(PREFIX_TOKENS // 3)),
            *("--answer-len", str(REPLY_TOKENS), "--num-rounds", "4", "--qps", "2"),
            *("--model", target.model.name, "--base-url", f"{target.url}/v1"),
            *("--time", "30", "--output", str(output), "--init-user-id", str(1000 * turn)),
        )
        rows = list(csv.DictReader(output.open()))
        began = min(float(row["launch_time"]) for row in rows)
        ended = max(float(row["finish_time"]) for row in rows)
        return Report(
            len(rows),
            printed.count("Error in _async_launch_request"),
            statistics.mean(float(row["ttft"]) for row in rows),
            len(rows) / (ended - began),
            unreported=_LMBENCHMARK_FIRST,
        )

    return run


def _vllm_bench(target: Target, folder: Path, *arguments: str) -> Report:
    _run(
        folder,
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", target.url, "--model", target.model.name),
        *("--tokenizer", str(target.model), "--ignore-eos", "--temperature", "0"),
        *("--disable-tqdm", "--save-result", "--result-filename", str(folder / "result.json")),
        *arguments,
    )
    found = json.loads((folder / "result.json").read_text())
    return Report(
        found["completed"],
        found["failed"],
        found["median_ttft_ms"] / 1000,
        found["request_throughput"],
    )


def _aiperf(target: Target, seed: int, folder: Path, *arguments: str) -> Report:
    _run(
        folder,
        *(_tool("aiperf", "aiperf"), "profile", "--model", target.model.name, "--url", target.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(target.model)),
        *("--use-server-token-count", "--random-seed", str(seed), "--ui-type", "none"),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "aiperf")),
        *arguments,
    )
    found = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())
    ended = {x["error_details"]["type"]: x["count"] for x in found["error_summary"]}
    cancelled = ended.pop("RequestCancellationError", 0)
    records = map(json.loads, (folder / "aiperf/profile_export.jsonl").read_text().splitlines())
    # AgentX begins with requests that its figures leave out.
    early = [x for x in records if x["metadata"]["benchmark_phase"] == "warmup"]
    cached = found.get(f"total_{_CACHE_READ}", {}).get("avg", 0)
    # A usage without cached tokens does not name them.
    cached += sum(x["metrics"].get(_CACHE_READ, {}).get("value", 0) for x in early)
    return Report(
        int(found["request_count"]["avg"]),
        sum(ended.values()),
        found["time_to_first_token"]["p50"] / 1000,
        found["request_throughput"]["avg"],
        cancelled,
        None if cancelled else int(cached),  # a cancelled request has no usage
        len(early),
    )


def _pairs(values: Mapping[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _tool(environment: str, name: str) -> str:
    path = ENVIRONMENTS.resolve() / environment / "bin" / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: make bench-clients")
    return str(path)


def _run(folder: Path, *command: str) -> str:
    """Run a client; return what it printed. RuntimeError with its end if it fails."""
    environment = engine_environment() | {"PYTHONHASHSEED": "0"}  # vLLM's trace has it in its text
    if command[0] != sys.executable:
        # Offline, aiperf takes the folder of a tokenizer for the name of one on the hub.
        for name in ("PYTHONPATH", "HF_HUB_OFFLINE"):
            environment.pop(name)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def run_client(
    client: Client, target: Target, servers: Sequence[Server], turn: int, folder: Path
) -> Run:
    """Run a client; add what the servers behind its target counted meanwhile."""
    before = _counted(servers)
    report = client(target, turn, folder)
    return Run(report, *(now - then for now, then in zip(_counted(servers), before, strict=True)))


def _counted(servers: Sequence[Server]) -> list[int]:
    for server in servers:
        server.complete([1, 2, 3], max_tokens=1)  # an engine publishes metrics with a step
    return [
        int(sum(value for server in servers for _, value in server.series(name)))
        for name in (
            "heterocache_hit_tokens_total",
            "vllm:external_prefix_cache_hits_total",
            "vllm:prefix_cache_hits_total",
        )
    ]


def measure(clients: Mapping[str, Client], rounds: int, folder: Path) -> dict[str, Any]:
    """Run each client against both servers, by turns; return the runs by client and server."""
    checkpoint = write_checkpoint(MODEL, Path(".cache/checkpoints").resolve())
    configs = {"without": None, "with": kv_transfer_config({"dram_gib": 6})}
    with ExitStack() as stack:
        servers = {
            name: Server(checkpoint, folder / f"{name}.log", config, ENGINE_ARGUMENTS)
            for name, config in configs.items()
        }
        for server in servers.values():
            stack.callback(server.stop)
            server.launch()
        for server in servers.values():
            server.start()
        runs: dict[str, Any] = {client: {name: [] for name in servers} for client in clients}
        for turn in range(rounds + 1):
            # Before the first round one client lets both servers warm up, and costs be learned.
            for client, run in list(clients.items())[: None if turn else 1]:
                order = list(servers) if turn % 2 else list(reversed(servers))
                for name in order:
                    own = folder / f"{client}-{turn}-{name}"
                    own.mkdir()
                    server = servers[name]
                    target = Target(server.url, server.model)
                    done = run_client(run, target, [server], turn, own)
                    print(f"{client} {turn} {name}: {done}", file=sys.stderr)
                    if turn:
                        runs[client][name].append(done)
    return runs


def argument_parser(module: str) -> argparse.ArgumentParser:
    """Return the options of a benchmark with clients of others."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("--lmbenchmark", type=Path, help="a checkout of LMCache/LMBenchmark")
    parser.add_argument("--only", nargs="*", help="names of clients")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    return parser


def chosen(arguments: argparse.Namespace) -> dict[str, Client]:
    """Return the clients that the options ask for, by name."""
    clients = dict(CLIENTS)
    if arguments.lmbenchmark:
        clients["lmbenchmark"] = lmbenchmark(arguments.lmbenchmark)
    return {name: clients[name] for name in arguments.only or clients}


def main() -> None:
    parser = argument_parser("clients")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each client (default 3)")
    arguments = parser.parse_args()
    stop_servers_on_sigterm()
    clients = chosen(arguments)
    with tempfile.TemporaryDirectory(prefix="heterocache-clients-") as folder:
        runs = measure(clients, arguments.rounds, Path(folder))
    text, figures = summarised(runs)
    details = {c: {s: [repr(r) for r in rs] for s, rs in by.items()} for c, by in runs.items()}
    write = is_default(parser, arguments, free=("json", "lmbenchmark"))
    publish("clients", text, figures, details, as_json=arguments.json, write=write)


def summarised(runs: Mapping[str, Mapping[str, list[Run]]]) -> tuple[str, dict[str, float]]:
    """Return a table of the medians, and the figures."""
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    everything = [run for by in runs.values() for them in by.values() for run in them]
    for client, by in runs.items():
        pairs = list(zip(by["with"], by["without"], strict=True))
        ttft = statistics.median(a.report.ttft_s / b.report.ttft_s for a, b in pairs)
        rate = statistics.median(
            a.report.requests_per_s / b.report.requests_per_s for a, b in pairs
        )
        figures |= {f"{client}_ttft": ttft, f"{client}_throughput": rate}
        seconds = [statistics.median(r.report.ttft_s for r in by[n]) for n in ("without", "with")]
        restored = statistics.median(r.restored_tokens for r in by["with"])
        requests = sum(r.report.requests for r in (*by["with"], *by["without"]))
        errors = sum(r.report.errors for r in (*by["with"], *by["without"]))
        rows.append(
            [
                client,
                f"{requests:,}",
                str(errors),
                *(f"{1000 * s:,.0f}" for s in seconds),
                f"{ttft:.2f}",
                f"{rate:.2f}",
                f"{restored:,.0f}",
            ]
        )
    figures["cancelled"] = sum(run.report.cancelled for run in everything)
    figures["errors"] = sum(run.report.errors for run in everything)
    figures["cached_mismatch"] = sum(run.mismatch for by in runs.values() for run in by["with"])
    head = ["client", "requests", "errors", "TTFT without, ms", "with", "TTFT ratio"]
    head += ["requests/s ratio", "tokens restored"]
    return f"{machine_line()}\n\n{table(head, rows)}", rounded(figures)


if __name__ == "__main__":
    main()
