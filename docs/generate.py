"""Write the pages that are made from code and from benchmark results.

    python docs/generate.py

The pages are committed, so that they can be read without building the site. `tests/test_docs.py`
fails if one of them differs from what this script would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
_NOTE = "<!-- Made by docs/generate.py. Do not edit. -->\n\n"

README_KEYS = (
    "dram_gib",
    "ssd_dir",
    "ssd_gib",
    "ssd_write_gib_per_day",
    "directory",
    "peer_host",
)


def main() -> int:
    """Write every page, and name those that changed."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


def pages() -> dict[Path, str]:
    """Return the text of every page that is made, by its path."""
    return {
        ROOT / "README.md": _readme(),
        DOCS / "guides/limits.md": _limits(),
        DOCS / "reference/config.md": _config(),
        DOCS / "reference/metrics.md": _metrics(),
        DOCS / "reference/cli.md": _cli(),
        DOCS / "reference/errors.md": _errors(),
        DOCS / "reference/requests.md": _requests(),
        DOCS / "evidence/figures.md": _figures(),
        DOCS / "decisions/index.md": _decisions(),
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- README ---------------------------------------------------------------------------------------


def _readme() -> str:
    text = (ROOT / "README.md").read_text()
    text = _replaced(text, "times", _times())
    return _replaced(text, "keys", _six_keys())


def _limits() -> str:
    from hetero_connector.supported_vllm import SUPPORTED_VLLM

    rows = [(version, tested) for version, tested in SUPPORTED_VLLM.items()]
    text = (DOCS / "guides/limits.md").read_text()
    return _replaced(text, "vllm", _table(("vLLM", "tested"), rows))


def _replaced(text: str, name: str, body: str) -> str:
    """Return the text with the region between the two marks of that name replaced."""
    region = re.compile(rf"(<!-- {name}:begin [^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    assert region.search(text), f"the page has no region {name!r}"
    return region.sub(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text)


def _six_keys() -> str:
    from hetero_connector.config import KEYS

    by_name = {key.name: key for key in KEYS}
    chosen = [by_name[name] for name in README_KEYS]
    return _table(
        ["key", "takes", "default", "meaning"],
        [[f"`{k.name}`", k.takes, k.default, k.meaning] for k in chosen],
    )


# --- Benchmark results ----------------------------------------------------------------------------


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
        if "zen3" in path.stem:
            machine += " without AVX-512"
        rest = rest.partition(";")[0]
        figures, details = document["figures"], document.get("details", {})
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
        seconds = result.details["restore"][model]
        ways = [seconds[way] for way in ("cold", "local", "dram", "ssd")]
        rows.append([shown, f"{tokens:,}", *(f"{1e3 * s:,.0f}" for s in ways)])
    return _table(_TTFT_HEADER, rows)


def _times() -> str:
    restore, peer = results("restore")[0], results("peer")[0]
    seconds = peer.details["seconds"]["restore"]
    cores = restore.cores_and_load.partition(",")[0]
    elsewhere = "" if peer.machine == restore.machine else f" on {peer.machine}"
    return (
        f"{_ttft(restore)}\n\n{restore.machine}, {cores}, {restore.date}; small checkpoints with "
        "random weights.\nReading 128 MiB from a peer on the same host takes "
        f"{1e3 * seconds:.0f} ms{elsewhere}, verified ({128 * 2**20 / seconds / 1e9:.1f} GB/s, "
        f"{peer.date})."
    )


class Figure(NamedTuple):
    """One figure of a benchmark."""

    meaning: str
    goal: str = ""
    """Such as `<= 1.05`; empty: none."""


FIGURES: Mapping[str, Mapping[str, Figure]] = {
    "restore": {
        "dram_over_memcpy": Figure(
            "Time that a restore of 199 MB from DRAM adds to the engine's own prefix hit, over a "
            "memcpy of these bytes",
            "<= 1.15",
        ),
        "ssd_over_dd": Figure(
            "Bandwidth of a restore from SSD, by the time it adds, over an O_DIRECT `dd`", ">= 0.9"
        ),
        "ssd_over_limit": Figure(
            "The same over four parallel O_DIRECT reads into huge pages, which is the most that "
            "the device gives"
        ),
        "prefill_save_ratio": Figure(
            "Prefill that saves, over an engine without a connector", "<= 1.03"
        ),
        "decode_ratio": Figure("The same for decoding", "<= 1.01"),
        "prefill_save_ratio_with_ssd": Figure("Prefill that saves to DRAM and SSD"),
        "decode_ratio_with_ssd": Figure("The same for decoding"),
    },
    "scheduler_hook": {
        "hook_ms_131k": Figure(
            "Milliseconds of the scheduler's thread for a prompt of 131,072 tokens, without "
            "hashing; worst of three models",
            "<= 1",
        ),
        "hash_ms_131k": Figure("Milliseconds to hash that prompt", "<= 10"),
        "queue_us_1024": Figure(
            "Microseconds to find the work before a request, with 1,024 running and 1,024 waiting"
        ),
    },
    "planner": {
        "decision_us_131k": Figure(
            "Microseconds of one decision for 131,072 tokens, worst of three models", "<= 100"
        ),
        "decision_us_131k_with_replay": Figure("The same with replays to price"),
        "decision_us_1m": Figure("The same for 1,048,576 tokens, without replays", "<= 1000"),
        "cost_error_median": Figure(
            "Relative error of the predicted time to first token on a real engine, median, worst "
            "of two models",
            "<= 0.15",
        ),
        "cost_error_p95": Figure("The same, 95th percentile", "<= 0.4"),
        "cost_noise_median": Figure("Difference of two equal requests, median"),
        "cost_noise_p95": Figure("The same, 95th percentile"),
    },
    "planner_grid": {
        "worst_cell_over_best": Figure(
            "Planned time to first token over the better of always and never loading, worst of 104 "
            "cells",
            "<= 1.05",
        ),
        "surely_over": Figure("Cells that are above 1.05 with 95 % confidence", "<= 0"),
        "geomean_over_single": Figure(
            "Planned over the better single policy, as geometric means over all cells", "<= 0.85"
        ),
        "geomean_limit": Figure("The same for the best of everything tried in each cell"),
        "regret_p95": Figure(
            "Planned over the best of everything tried, less 1, 95th percentile", "<= 0.1"
        ),
        "worst_alike": Figure("Largest difference of equal requests in one cell"),
    },
    "peer": {
        "peer_over_memcpy": Figure(
            "One-sided reads of 1 MiB over NIXL UCX on one host, over a memcpy between processes",
            ">= 0.8",
        ),
        "limit_over_memcpy": Figure(
            "The kernel's own copy between processes (`process_vm_readv`), over the same memcpy"
        ),
        "peer_over_limit": Figure("NIXL over the kernel's own copy"),
        "peer_memfd_over_memcpy": Figure("NIXL from a memfd on 4 KiB pages"),
        "peer_restore_over_memcpy": Figure("A whole restore of 128 MiB, verified"),
    },
    "directory": {
        "lookup_ms_1m": Figure(
            "Milliseconds to look up a chain of 1,048,576 tokens on a local Redis", "<= 2"
        ),
        "claims_per_s": Figure("Claims per second, 1,024 in one call", ">= 20000"),
        "redis_bytes_per_artifact": Figure("Bytes of Redis per artifact, at a million", "<= 300"),
        "renew_ms": Figure("Milliseconds to renew a lease, with a million artifacts owned"),
        "ping_ms": Figure("Milliseconds of a PING to the same server"),
    },
    "faults": {
        "rounds": Figure("Rounds with injected faults"),
        "wrong_answers": Figure("Rounds with a wrong answer", "<= 0"),
        "hangs": Figure("Rounds that hung", "<= 0"),
        "engine_deaths": Figure("Rounds in which the engine ended", "<= 0"),
        "stuck": Figure("Rounds after which something was left over", "<= 0"),
        "open_s_per_million_rows": Figure("Seconds to open a journal of a million rows"),
        "bytes_per_chunk": Figure("Bytes of memory for a chunk of two state types on SSD"),
        "gc_pause_ms": Figure("Longest garbage collection while the index grows, ms"),
    },
    "scheduling": {
        "decision_us_64": Figure(
            "Microseconds to place one request over 64 workers, worst class", "<= 200"
        ),
        "decision_us_8": Figure("The same over 8 workers"),
        "colocated_us_64": Figure("The policy that looks for the least loaded worker only"),
    },
    "simulator": {
        "mooncake_requests_per_s": Figure("Requests of the Mooncake trace per second", ">= 5000"),
        "agent_file_s": Figure("Seconds for 20,843 requests of coding agents", "<= 60"),
        "decision_us_64": Figure("Microseconds of a decision over 64 workers", "<= 200"),
        "peak_gib": Figure("Peak memory, GiB", "<= 4"),
    },
}
_TITLES = {
    "restore": "Restoring and saving",
    "scheduler_hook": "The scheduler's thread",
    "planner": "Decisions of the planner",
    "planner_grid": "Planned against always and never loading",
    "peer": "Reading from a peer",
    "directory": "The directory in Redis",
    "faults": "Faults and big tiers",
    "scheduling": "Placing requests",
    "simulator": "The simulator",
}


def _figures() -> str:
    parts = [
        f"{_NOTE}# Figures by machine and date\n\n"
        "The newest result of each benchmark on each machine. A date links to the full tables, "
        "with the load under which they were taken. **Bold** figures miss their goal.",
    ]
    for benchmark, figures in FIGURES.items():
        found = results(benchmark)
        header = ["figure", *(f"{x.machine}, {x.link}" for x in found), "goal"]
        rows = []
        for name, figure in figures.items():
            values = [_shown(x.figures.get(name), figure.goal) for x in found]
            goal = figure.goal.replace(">=", "≥").replace("<=", "≤")
            rows.append([f"`{name}`: {figure.meaning}", *values, goal])
        command = f"`python -m benchmarks.{benchmark}`"
        parts.append(f"## {_TITLES[benchmark]}\n\n{command}\n\n{_table(header, rows)}")
        if benchmark == "restore":
            for result in found:
                where = f"Time to first token, ms; {result.machine}, {result.date}:"
                parts.append(f"{where}\n\n{_ttft(result)}")
    return "\n\n".join([*parts, _checkpoints(), _separate_prefill()]) + "\n"


def _checkpoints() -> str:
    result = results("checkpoint_policies")[0]
    header = ["model", "policy", "kB written per token", "seconds of restores"]
    rows = []
    for found in result.details["policies"]:
        written = f"{found['written_per_token'] / 1e3:,.4g}"
        restores = f"{found['load_s'] + found['recompute_s']:,.4g}"
        rows.append([found["model"], f"`{found['policy']}`", written, restores])
    return (
        "## Checkpoint policies\n\n`python -m benchmarks.checkpoint_policies --trace FILE`, "
        f"{result.link}\n\nOn recorded requests of coding agents. The forward pass and the SSD are "
        "priced here, not run, so these figures do not depend on the machine.\n\n"
        f"{_table(header, rows)}"
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
        f"servers.\n\n{_table(header, rows)}"
    )


def _shown(value: object, goal: str) -> str:
    if not isinstance(value, (int, float)):
        return ""
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return shown if is_met(value, goal) else f"**{shown}**"


def is_met(value: float, goal: str) -> bool:
    """Return whether the value meets a goal such as `<= 1.05`; True without one."""
    if not goal:
        return True
    sense, _, limit = goal.partition(" ")
    return value <= float(limit) if sense == "<=" else value >= float(limit)


# --- Reference ------------------------------------------------------------------------------------


def _config() -> str:
    from hetero_connector.config import markdown_table

    return f"""{_NOTE}# Configuration

These are the keys of `kv_connector_extra_config`. All are optional. A wrong key or value stops the
engine at start with a `ConfigError` that names the key and what it takes.

{markdown_table()}

Keys of a fleet (`lease_s`, `replica_ttl_s`, `worker_name`, `peer_host`, `adopt_from`) are refused
without `directory`, and `ssd_gib` and `ssd_write_gib_per_day` without `ssd_dir`.

```json
{{
  "kv_connector": "HeteroConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {{"dram_gib": 64, "ssd_dir": "/nvme/kv", "ssd_gib": 200}}
}}
```
"""


def _metrics() -> str:
    from hetero_connector.metrics import COUNTERS, GAUGES, METRICS_BY_KIND, TIMINGS

    titles = {COUNTERS: "Counters", GAUGES: "Gauges", TIMINGS: "Histograms"}
    parts = [
        f"{_NOTE}# Metrics\n\n"
        "vLLM serves them on `/metrics`. All names begin with `heterocache_`. Every metric also "
        "has vLLM's own labels `model_name` and `engine`; Prometheus adds `_total` to counters. "
        "The tokens restored for each request appear in vLLM's external prefix cache metrics, "
        "too, as `host`, `disk` and `p2p`."
    ]
    for kind, metrics in METRICS_BY_KIND.items():
        rows = [
            [
                f"`{name.removeprefix('heterocache_')}`",
                ", ".join(f"`{x}`" for x in m.labels),
                m.help,
            ]
            for name, m in metrics.items()
        ]
        parts.append(f"## {titles[kind]}\n\n{_table(['name', 'labels', 'meaning'], rows)}")
    return "\n\n".join(parts) + "\n"


def _cli() -> str:
    from typer.main import get_command

    from hetero_connector.tools.cli import app

    parts = [
        f"{_NOTE}# Commands\n\n"
        "The package installs one command, `heterocache`. `heterocache --install-completion` "
        "completes commands in your shell. Exit status: 0 if all is well, 1 if a problem was "
        "found, 2 if the arguments or the input cannot be used. `simulate` needs the extra "
        "`sim`, `reset` the extra `redis`."
    ]
    for name, command in _commands(get_command(app), ""):
        examples = [
            line for line in command.epilog.split("\n\n") if line.startswith("heterocache ")
        ]
        rows = [[_parameter(x), (x.help or "").replace("|", "\\|")] for x in command.params]
        table = _table(["argument", "meaning"], rows)
        shown = "\n".join(examples)
        parts.append(f"## {name}\n\n{command.help}\n\n```text\n{shown}\n```\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of every command that does something."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _parameter(parameter: Any) -> str:
    """Return an argument, or an option with what it takes."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    name = parameter.opts[0]
    takes = parameter.metavar or name.removeprefix("--").upper().replace("-", "_")
    return f"`{name}`" if parameter.is_flag else f"`{name} {takes}`"


def _errors() -> str:
    from hetero_connector import errors

    classes = [
        x
        for x in vars(errors).values()
        if inspect.isclass(x) and issubclass(x, errors.HeteroCacheError)
    ]
    rows = [[f"`{x.__name__}`", (inspect.getdoc(x) or "").split("\n\n")[0]] for x in classes]
    rows = [[name, " ".join(text.split())] for name, text in rows]
    return f"""{_NOTE}# Errors

Errors at start are raised, and their text says what to change. An error while serving, such as a
failed read, a bad checksum or a missed deadline, never reaches the engine: it is counted and
becomes a cache miss ([failures](../guides/failures.md)). One error may end a running engine,
because the answer would be wrong: `LoadLostError` ([hooks](../internals/hooks.md)).

All are in `hetero_connector.errors`, and pickling keeps their text and attributes.

```text
{_tree(errors.HeteroCacheError)}
```

{_table(["error", "meaning"], rows)}
"""


def _tree(kind: type, depth: int = 0) -> str:
    """Return the class and those derived from it, each on a line, indented by its depth."""
    derived = [
        _tree(x, depth + 1) for x in kind.__subclasses__() if x.__module__ == kind.__module__
    ]
    return "\n".join([f"{'    ' * depth}{kind.__name__}", *derived])


_HINTS = {
    "session_id": (
        "text",
        "The session that this request belongs to. vLLM's own request field `session_id` and its "
        "header `X-Session-ID` mean the same and come first",
    ),
    "expected_back_s": (
        "seconds, 0 to 2592000",
        "Time from the end of this answer to the session's next request",
    ),
}


def _requests() -> str:
    from hetero_connector.engine.scheduler import handoff
    from hetero_connector.engine.scheduler.sessions import SessionHint

    assert set(_HINTS) == set(SessionHint._fields), "describe every field of SessionHint here"
    sessions = [[f"`{name}`", *about] for name, about in _HINTS.items()]
    handoffs = [
        [
            f"`{handoff.TO_DECODE}`",
            "to the prefiller",
            "`true`: another engine decodes this prompt. Send it with `max_tokens` 1",
        ],
        [
            f"`{handoff.PREFILLED}`",
            "from the prefiller to the decoder",
            "`true`: another engine has just computed this prompt",
        ],
        [
            f"`{handoff.PREFILLED_TOKENS}`",
            "from the prefiller to the decoder",
            "The token up to which the prompt is stored, and at which the decoder may resume; 0 if "
            "nothing is stored. The decoder waits for no more than that",
        ],
    ]
    return f"""{_NOTE}# Request parameters

A request needs no parameters. These are read from `kv_transfer_params` in the request's body, or in
Python from `SamplingParams.extra_args["kv_transfer_params"]`. Unknown fields are ignored, because
they may be another connector's; one that is nearly a name of this page is logged once. A value of
the wrong type or range is ignored, with one warning in the log for sessions.

## Sessions

{_table(["field", "takes", "meaning"], sessions)}

An id is valid within its request's `cache_salt`. See the [guide](../guides/sessions.md).

```json
{{
  "model": "MODEL",
  "prompt": "...",
  "kv_transfer_params": {{"session_id": "agent-7", "expected_back_s": 12.5}}
}}
```

## Prefill and decode apart

{_table(["field", "goes", "meaning"], handoffs)}

See the [guide](../guides/prefill-decode.md). vLLM's `cache_salt` separates tenants: requests with
different salts share nothing.
"""


# --- Decisions ------------------------------------------------------------------------------------


def _decisions() -> str:
    rows = []
    for path in sorted(DOCS.glob("decisions/0*.md")):
        title = path.read_text().partition("\n")[0]
        number, _, name = title.removeprefix("# ").partition(". ")
        assert number == str(int(path.stem[:4])), f"{path.name} has another number in its title"
        rows.append([number, f"[{name}]({path.name})"])
    names = "\n".join(path.stem for path in sorted(DOCS.glob("decisions/0*.md")))
    return f"""{_NOTE}# Decisions

One page for each choice that shaped the code: its context, what was decided, and what follows.

{_table(["", "decision"], rows)}

```{{toctree}}
:hidden:
:maxdepth: 1

{names}
```
"""


if __name__ == "__main__":
    sys.exit(main())
