"""Tables of benchmark results, with the goals that they met or missed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS, is_met
from made import NOTE, ROOT, table

RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Result:
    """One file of `benchmarks/results`."""

    path: Path
    benchmark: str
    date: str
    machine: str
    """CPU model, without cores and load."""
    cores_and_load: str
    figures: Mapping[str, Any]
    details: Mapping[str, Any]

    @property
    def link(self) -> str:
        """Return a link to the text file from a page one folder below `docs`."""
        name = self.path.with_suffix(".txt").name
        return f"[{self.date}](../../benchmarks/results/{name})"


_STEM = re.compile(r"(?P<benchmark>.+?)-(?P<date>\d{4}-\d\d-\d\d)(-[\w-]+)?")


def results(benchmark: str) -> list[Result]:
    """Return the newest result of this benchmark for each machine, newest first."""
    found: dict[str, Result] = {}
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        name = _STEM.fullmatch(path.stem)
        if name is None or name["benchmark"] != benchmark:
            continue
        document = json.loads(path.read_text())
        if set(document) < {"figures", "machine"}:
            continue
        machine, _, rest = document["machine"].partition(", ")
        machine = machine.replace("(R)", "").replace(" Processor @ ", " ")
        rest = rest.partition(";")[0]
        figures, details = document["figures"], document.get("details", {})
        if benchmark == "router":
            figures |= {"requests": details["requests"]}
        result = Result(path, benchmark, name["date"], machine, rest, figures, details)
        found.setdefault(machine, result)
    return sorted(found.values(), key=lambda x: (x.date, x.path.name), reverse=True)


_TTFT_ROWS = {
    "dense-bench": ("dense, float32", 8096),
    "dense-bench-bf16": ("dense, bfloat16", 8096),
    "gemma3": ("Gemma type (windows)", 8096),
    "deepseek_v4": ("DeepSeek-V4 type", 3840),
}
_TTFT_HEADER = ["model", "tokens", "cold", "engine's own prefix", "DRAM", "SSD"]


def _ttft(result: Result) -> str:
    rows = []
    for model, (shown, tokens) in _TTFT_ROWS.items():
        seconds = result.details["restore"].get(model)
        if seconds is None:  # a CPU without AVX-512 cannot run it
            continue
        ways = [seconds[way] for way in ("cold", "local", "dram", "ssd")]
        rows.append([shown, f"{tokens:,}", *(f"{1e3 * s:,.0f}" for s in ways)])
    return table(_TTFT_HEADER, rows)


def times() -> str:
    """Return the table of the README, with its machine and date."""
    restore, peer = results("restore")[0], results("peer")[0]
    seconds = peer.details["seconds"]["restore"]
    cores = restore.cores_and_load.partition(",")[0]
    elsewhere = "" if peer.machine == restore.machine else f" on {peer.machine}"
    return (
        f"{_ttft(restore)}\n\n{restore.machine}, {cores}, {restore.date}; small models, random "
        "weights.\nReading 128 MiB from a peer on one host takes "
        f"{1e3 * seconds:.0f} ms{elsewhere}, verified ({128 * 2**20 / seconds / 1e9:.1f} GB/s, "
        f"{peer.date})."
    )


FIGURES: Mapping[str, Mapping[str, str]] = {
    "restore": {
        "dram_over_memcpy": (
            "Time that a restore of 199 MB from DRAM adds to the engine's own prefix hit, over a "
            "memcpy of these bytes"
        ),
        "ssd_over_dd": (
            "Bandwidth of a restore from SSD, by the time it adds, over an O_DIRECT `dd`"
        ),
        "ssd_over_limit": (
            "The same over four parallel O_DIRECT reads into huge pages, which is the most that "
            "the device gives"
        ),
        "prefill_save_ratio": "Prefill that saves, over an engine without a connector",
        "decode_ratio": "The same for decoding",
        "prefill_save_ratio_vs_off": (
            "Prefill that saves, over the same engine when it computes what it has stored"
        ),
        "decode_ratio_vs_off": "The same for decoding",
        "prefill_save_ratio_with_ssd": "Prefill that saves to DRAM and SSD",
        "decode_ratio_with_ssd": "The same for decoding",
    },
    "scheduler_hook": {
        "hook_ms_131k": (
            "Milliseconds of the scheduler's thread for a prompt of 131,072 tokens, without "
            "hashing, until its load is released; worst of three models"
        ),
        "hash_ms_131k": "Milliseconds to hash that prompt",
        "queue_us_1024": (
            "Microseconds to find the work before a request, with 1,024 running and 1,024 waiting"
        ),
        "decode_us_1024": "Microseconds to order a step in which those 1,024 decode",
    },
    "layerwise_transfer": {
        "overlap_over_at_start": (
            "Time that a restore of 199 MB from DRAM adds if its layers are loaded while earlier "
            "ones compute, over that if all are loaded before; below 1 the overlap pays"
        ),
        "copy_load_worst": (
            "Copies from the DRAM tier to the engine's pages, over a memcpy of these bytes, worst "
            "of all state types and orders of blocks"
        ),
        "copy_save_worst": "The same from the pages to the DRAM tier",
        "nixl_read_over_dd": (
            "Bandwidth of NIXL's reads of a file over an O_DIRECT `dd`, best size of an extent"
        ),
        "nixl_write_over_dd": "The same of its writes",
        "pread_read_over_dd": "The same of reads with `pread`",
        "pread_write_over_dd": "The same of writes with `pwrite`",
    },
    "planner": {
        "decision_us_131k": (
            "Microseconds of one decision for 131,072 tokens, worst of three models"
        ),
        "decision_us_131k_with_replay": "The same with replays to price",
        "decision_us_1m": "The same for 1,048,576 tokens, without replays",
        "cost_error_median": (
            "Relative error of the predicted time to first token on a real engine, median, worst "
            "of two models"
        ),
        "cost_error_p95": "The same, 95th percentile",
        "cost_noise_median": "Difference of two equal requests, median",
        "cost_noise_p95": "The same, 95th percentile",
    },
    "planner_grid": {
        "worst_cell_over_best": (
            "Planned time to first token over the better of always and never loading, worst of 104 "
            "cells"
        ),
        "surely_over": "Cells that are above 1.05 with 95 % confidence",
        "geomean_over_single": (
            "Planned over the better single policy, as geometric means over all cells"
        ),
        "geomean_limit": "The same for the best of everything tried in each cell",
        "regret_p95": "Planned over the best of everything tried, less 1, 95th percentile",
        "worst_alike": "Largest difference of equal requests in one cell",
    },
    "peer": {
        "peer_over_memcpy": (
            "One-sided reads of 1 MiB over NIXL UCX on one host, over a memcpy between processes"
        ),
        "limit_over_memcpy": (
            "The kernel's own copy between processes (`process_vm_readv`), over the same memcpy"
        ),
        "peer_over_limit": "NIXL over the kernel's own copy",
        "peer_restore_over_memcpy": "A whole restore of 128 MiB, verified",
    },
    "directory": {
        "lookup_ms_1m": (
            "Milliseconds to look up a chain of 1,048,576 tokens on a local Redis, of the call "
            "alone: no record is decoded"
        ),
        "lookup_decoded_ms_1m": "The same with every record decoded",
        "found_ms_1m": "Milliseconds from an engine's question until it has these copies",
        "claims_per_s": "Claims per second, 1,024 in one call",
        "redis_bytes_per_artifact": "Bytes of Redis per artifact, at a million",
        "renew_ms": "Milliseconds to renew a lease, with a million artifacts owned",
        "ping_ms": "Milliseconds of a PING to the same server",
    },
    "router_identity": {
        "times_cheaper": (
            "Time to identify the last turn's prompt from its beginning, over the router's, which "
            "knows the turn before"
        ),
        "us_per_new_token": "Microseconds per new token of a turn",
        "us_per_old_token": "Microseconds per token of the turns before",
        "whole_us_per_token": "Microseconds per token from the beginning",
        "new_tokens_of_the_last_turn": "New tokens of the turn that was timed",
        "tokens": "Tokens of a session at its end",
        "kib_per_session": "KiB kept of a session of so many tokens",
    },
    "router": {
        "added_ms_p50": "Milliseconds that it adds to a request, median; stub workers, one process",
        "added_ms_p99": "The same, 99th percentile",
        "relay_ms_p50": "Milliseconds that a relay adds which only passes bytes on, median",
        "streams_per_s_core": "Streams of 16 events for each second of the router's CPU",
        "relay_streams_per_s_core": "The same of that relay",
        "page_ratio": (
            "Streams for each second of the router's CPU with a viewer of its page, over without"
        ),
        "memory_growth": "Resident memory after `requests` over that after a tenth of them",
        "memory_mib": "MiB of resident memory then",
        "requests": "Requests of which a quarter are streams, and some clients leave",
        "placed_new_ms_p50": (
            "Milliseconds that it adds where it names a new prompt of 2 KB, asks the directory and "
            "places by price among 100 workers, median"
        ),
        "placed_new_ms_p99": "The same, 99th percentile",
        "decision_us_64": "Microseconds of CPU to place a request among 64 workers, its view given",
        "cores_at_100_rps_100k": (
            "Cores of the router at 100 requests a second of sessions with 100,000 tokens, among "
            "100 workers, from the CPU time of a request at lower rates; the highest of these"
        ),
        "cores_at_100_rps_100k_least": "The lowest of these",
        "measured_rps": "The highest of these rates, as served",
        "measured_cores": "Cores at that rate",
        "idle_cores": "Cores without a request: 100 workers are watched",
        "ms_of_cpu_per_request": "Milliseconds of CPU for each such request",
        "redis_cores_at_100_rps": "Cores of Redis at 100 a second, likewise",
        "prompt_tokens": "Tokens of their prompts, mean",
        "new_tokens": "New tokens of a turn, mean",
        "exact_share": "Share of them that were placed `exact`",
        "tokenized_over_new": "Tokens that its processes make, all together, for each new token",
        "first_byte_ms_p50": "Milliseconds to their first byte, median, at that rate",
        "first_byte_ms_p99": "The same, 99th percentile",
    },
    "router_overload": {
        "goodput_of_capacity": (
            "Answers per second at ten times the load over what the workers can take"
        ),
        "served_per_s": "Answers per second at 80 % of what the workers take",
        "served_per_s_10x": "The same at ten times that load",
        "served_per_s_after": "The same when the load fits again",
        "served_ms_p50": "Milliseconds of an answer where the load fits, median",
        "served_ms_p99_10x": "Milliseconds of an answer under overload, 99th percentile",
        "bound_ms": "The same as the queue's length allows it, without any overhead",
        "refused_share_10x": "Share that is answered 429, with `Retry-After` and a reason",
        "silent": "Requests that ended otherwise",
        "hung": "Requests that took over a minute",
    },
    "router_clients": {
        "requests": "Requests that clients of others had answered through the router",
        "cancelled": "Requests that they left",
        "errors": "Requests that failed, were sent again or were cut",
        "uncounted": (
            "Requests by which their reports, the router's answers and its placements differ"
        ),
        "cached_mismatch": "Tokens by which counts of cached tokens differ",
        "exact_share": "Share of placements that were `exact`",
        "returned": "Requests whose prompt begins as one that was answered before",
        "stayed_share": "Share of them that went to a worker that had answered it",
        "reused_share": (
            "Prompt tokens that were not computed again, over those of these beginnings in whole "
            "chunks"
        ),
    },
    "faults": {
        "rounds": "Rounds with injected faults",
        "wrong_answers": "Rounds with a wrong answer",
        "hangs": "Rounds that hung",
        "engine_deaths": "Rounds in which the engine ended",
        "stuck": "Rounds after which something was left over",
        "open_s_per_million_rows": "Seconds to open a journal of a million rows",
        "bytes_per_chunk": "Bytes of memory for a chunk of two state types on SSD",
        "gc_pause_ms": "Longest garbage collection while the index grows, ms",
    },
    "observability": {
        "events_per_s": (
            "Chunks of 256 tokens that one core announces for the first time in a second"
        ),
        "event_us_step": "Microseconds of a step without news",
        "event_bytes_chunk": "Bytes of memory for an announced chunk",
        "status_ms_p99": (
            "Milliseconds for the status of an engine with a million chunks, 99th percentile"
        ),
        "live_ms_p99": "The same for what the live page asks",
        "sessions_ms_p99": "The same for its sessions",
        "decode_ratio_observed": (
            "Seconds of decodes on a real server with a viewer of the live page, over without; "
            "median of twelve turns"
        ),
        "decode_ratio_observed_least": "The least of these turns",
        "decode_ratio_observed_most": "The most",
    },
    "host_memory": {
        "reserve_4k": (
            "Time of several threads to reserve shared memory on pages of 4 KiB, over one thread's"
        ),
        "reserve_huge": "The same on huge pages",
        "checksum_4_mib": "Time of several threads for the checksums of 4 MiB, over one thread's",
        "checksum_16_mib": "The same of 16 MiB",
        "checksum_over_memcpy": "Checksums of one thread over a plain copy",
    },
    "device_path": {
        "launches_70b_tp8": (
            "Kernel launches of a restore of 131,072 tokens on stand-ins of CUDA: Llama 70B, 8 GPUs"
        ),
        "launches_v4_flash": "The same for DeepSeek-V4 Flash, 8 GPUs",
        "launches_gpt_oss_120b": "The same for gpt-oss-120b",
        "launches_gemma_3_27b_tp2": "The same for Gemma 3 27B, 2 GPUs",
        "issue_ms_70b_tp8": (
            "Milliseconds of the CPU to plan and issue that restore: Llama 70B, 8 GPUs"
        ),
        "issue_ms_v4_flash": "The same for DeepSeek-V4 Flash, 8 GPUs",
        "issue_ms_gpt_oss_120b": "The same for gpt-oss-120b",
        "issue_ms_gemma_3_27b_tp2": "The same for Gemma 3 27B, 2 GPUs",
        "syncs_per_step": "Times that the CPU waits for the device in a step",
    },
    "scheduling": {
        "scheduling_decision_us_64": (
            "Microseconds to place one request over 64 workers, worst class"
        ),
        "scheduling_decision_us_8": "The same over 8 workers",
        "colocated_us_64": "The policy that looks for the least loaded worker only",
        "ledger_us_64": "Microseconds of a decision that the router's ledger takes, 64 workers",
        "ledger_request_us_64": "The same with the request's first token and its end",
    },
    "live_policies": {
        "live_over_best": (
            "Mean task time under `ownerserve` over the best policy's, on three and on four real "
            "servers; the worse"
        ),
        "transfers_where_it_loses": (
            "Fetches, moves and remote prefills of `ownerserve` where computing is cheaper"
        ),
        "transfer_loses_by": (
            "There, time to first token under `static_pd`, which must transfer, over `ownerserve`'s"
        ),
        "decided_again": (
            "Share of the placements that come out again on the views of the router's log. This "
            "and the next ones are of the setup in which they are farthest from 1"
        ),
        "placements_equal": (
            "Share of the requests that the policy sends to the same worker in the simulator, on a "
            "fleet that has served what the real one has"
        ),
        "turns_equal": "Share of the later turns that stay or leave alike, simulated by itself",
        "simulated_over_real_ttft": "Mean time to first token, simulated over real",
        "simulated_over_real_task": "Mean task time, simulated over real",
    },
    "live_redrawn": {
        "redrawn_over_best": (
            "The same servers and costs, simulated on 40 other draws of the sessions: mean task "
            "time under `ownerserve` over the best policy's; the worse of three and four. The "
            "machine is that of the costs"
        ),
    },
    "simulator": {
        "mooncake_requests_per_s": "Requests of the Mooncake trace per second",
        "agent_file_s": "Seconds for 20,843 requests of coding agents",
        "simulator_decision_us_64": "Microseconds of a decision over 64 workers",
        "growth_ratio": (
            "Time of a request in a trace that is ten times as long, over that in the shorter one"
        ),
        "peak_gib": "Peak memory, GiB",
    },
    "side_by_side": {
        "added_over_best_rival": (
            "Time that a restore from memory adds to the own prefix hit, over the best of the "
            "other connectors; worst model"
        ),
        "dram_over_memcpy": "The same over a memcpy; worst model with large restores",
        "restore_fixed_ms": (
            "Milliseconds that it adds beyond the memcpy; worst model with small restores"
        ),
        "ssd_over_limit": (
            "Bandwidth of a restore after a restart, over the device's limit; worst model with "
            "large restores"
        ),
        "ssd_over_verified_limit": (
            "The same over its limit into memory that has been idle, with checksums"
        ),
        "rivals_run": "Other connectors that restored and answered right with at least one model",
        "wrong_answers_ours": "Wrong answers of HeteroConnector, also after faults",
        "unanswered_ours": "Its errors and hangs",
    },
    "checkpoint_policies": {
        "over_hull_gemma-3-27b": (
            "Seconds of restores under `adaptive`, over the front of the fixed policies at the "
            "same bytes written: Gemma 3 27B"
        ),
        "over_hull_deepseek-v4-flash": "The same for DeepSeek-V4 Flash",
        "objective_gemma-3-27b": (
            "Seconds of writing and restoring under `adaptive`, over the best fixed policy's: "
            "Gemma 3 27B"
        ),
        "objective_deepseek-v4-flash": "The same for DeepSeek-V4 Flash",
    },
}
"""By benchmark and figure: its meaning."""
_TITLES = {
    "restore": "Restoring and saving",
    "scheduler_hook": "The scheduler's thread",
    "layerwise_transfer": "Parts of a restore",
    "planner": "Decisions of the planner",
    "planner_grid": "Planned against always and never loading",
    "peer": "Reading from a peer",
    "directory": "The directory in Redis",
    "router_identity": "Identifying a router's prompts",
    "router": "The router",
    "router_overload": "The router under ten times its load",
    "router_clients": "Clients of others through the router",
    "faults": "Faults and big tiers",
    "observability": "Telling others what is stored",
    "host_memory": "Host memory by several threads",
    "device_path": "The CPU's part of a restore on a GPU",
    "scheduling": "Placing requests",
    "live_policies": "Policies on real servers",
    "live_redrawn": "The same policies on more sessions, simulated",
    "simulator": "The simulator",
    "side_by_side": "Side by side with other connectors",
    "checkpoint_policies": "Checkpoint policies",
}


def figures() -> str:
    """Return the page of figures by machine and date."""
    parts = [
        f"{NOTE}# Figures by machine and date\n\n"
        "The newest result of each benchmark on each machine. A date links to the full tables, "
        "with the load under which they were taken. **Bold** figures miss their goal.",
    ]
    for benchmark, figures in FIGURES.items():
        found = results(benchmark)
        header = ["figure", *(f"{x.machine}, {x.link}" for x in found), "goal"]
        rows = []
        for name, meaning in figures.items():
            goal = GOALS.get(benchmark, {}).get(name, "")
            values = [_shown(x.figures.get(name), goal) for x in found]
            if not any(values):
                continue  # no result has it
            shown = goal.replace(">=", "≥").replace("<=", "≤")
            rows.append([f"`{name}`: {meaning}", *values, shown])
        command = f"`python -m benchmarks.{benchmark}`"
        parts.append(f"## {_TITLES[benchmark]}\n\n{command}\n\n{table(header, rows)}")
        if benchmark == "restore":
            for result in found:
                where = f"Time to first token, ms; {result.machine}, {result.date}:"
                parts.append(f"{where}\n\n{_ttft(result)}")
        if benchmark == "checkpoint_policies":
            parts.append(_checkpoints(found[0]))
    return "\n\n".join([*parts, _corpora(), _separate_prefill()]) + "\n"


_CORPORA = {
    "hot64": "the same ones again",
    "cold": "never the same",
    "mixed90": "nine of ten again",
    "long_shared_prefix": "the same but for the last 64 bytes",
    "utf8": "the same ones again, without ASCII",
}


def _corpora() -> str:
    result = results("router_corpora")[0]
    sizes = sorted({int(name.rsplit("_", 2)[1][:-1]) for name in result.figures})
    rows = [
        [f"`{name}`: {shown}", *(f"{result.figures[f'{name}_{kib}k_ms']:,.1f}" for kib in sizes)]
        for name, shown in _CORPORA.items()
    ]
    header = ["prompts", *(f"{kib:,} KiB" for kib in sizes)]
    return (
        f"## What the router adds, by kind of prompt\n\n`python -m benchmarks.router_corpora`, "
        f"{result.link}, {result.machine}, {result.cores_and_load}\n\n"
        "Milliseconds that it adds to a request where it names the prompt, asks the directory and "
        "places by price, median; four stub workers, one request at a time. A prompt costs what "
        "is new of it: its tokens and keys are made once. On a busy machine they are upper "
        f"limits.\n\n{table(header, rows)}"
    )


def _checkpoints(result: Result) -> str:
    header = ["model", "policy", "kB written per token", "seconds of restores"]
    rows = []
    for found in result.details["policies"]:
        written = f"{found['written_per_token'] / 1e3:,.4g}"
        restores = f"{found['load_s'] + found['recompute_s']:,.4g}"
        rows.append([found["model"], f"`{found['policy']}`", written, restores])
    return (
        "On recorded requests of coding agents (`--trace FILE`). The forward pass and the SSD are "
        "priced here, not run, so these figures do not depend on the machine.\n\n"
        f"{table(header, rows)}"
    )


def _separate_prefill() -> str:
    result = results("xpyd")[0]
    header = ["servers", "every artifact has", "DRAM", "SSD", "MB moved"]
    factors, on_ssd, moved = (
        result.figures[name] for name in ("duplicate_factor", "ssd_duplicate_factor", "bytes_moved")
    )
    rows = [
        [
            servers.upper(),
            owners,
            f"{factors[servers][owners]:.2f}",
            f"{on_ssd[servers][owners]:.2f}",
            f"{moved[servers][owners] / 1e6:.1f}",
        ]
        for servers in factors
        for owners in factors[servers]
    ]
    return (
        f"## Prefill and decode apart\n\n`python -m benchmarks.xpyd`, {result.link}\n\n"
        "Bytes in all DRAM tiers and on all SSDs, over the distinct bytes, and bytes moved between "
        f"servers.\n\n{table(header, rows)}"
    )


def _shown(value: object, goal: str) -> str:
    if not isinstance(value, (int, float)):
        return ""
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return shown if is_met(value, goal) else f"**{shown}**"
