"""Pages made from declarations in the code: keys, metrics, commands, errors, requests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from made import NOTE, table


def config() -> str:
    """Return the page of configuration keys."""
    from hetero_connector.config import KEYS, markdown_table

    return f"""{NOTE}# Configuration

These are the keys of `kv_connector_extra_config`. All are optional. A wrong key or value stops the
engine at start with a `ConfigError` that names the key and what it takes.

{markdown_table(KEYS)}

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


def router() -> str:
    """Return the page of the router's keys and metrics."""
    from hetero_connector.config import markdown_table
    from ownership.router.config import KEYS
    from ownership.router.metrics import RouterMetrics

    metrics = RouterMetrics()
    labels = {name: ", ".join(f"`{x}`" for x in given) for name, given in metrics.labels().items()}
    rows = [
        [f"`{metric.name}`", metric.type, labels[metric.name], metric.documentation]
        for metric in metrics.registry.collect()
    ]
    return f"""{NOTE}# The router's configuration and metrics

These are the keys of the YAML file of `heterocache router` ([guide](../guides/router.md)).
One of `workers`, `workers_file`, `workers_dns` and `workers_kubernetes` is needed.

{markdown_table(KEYS)}

## Metrics

Served at `/metrics`. Prometheus adds `_total` to counters.

{table(["name", "kind", "labels", "meaning"], rows)}
"""


def metrics() -> str:
    """Return the page of metrics."""
    from hetero_connector.metrics import COUNTERS, GAUGES, HISTOGRAMS, METRICS_BY_KIND, NATIVE_NAMES

    titles = {COUNTERS: "Counters", GAUGES: "Gauges", HISTOGRAMS: "Histograms"}
    parts = [
        f"{NOTE}# Metrics\n\n"
        "vLLM serves them on `/metrics`. All names begin with `heterocache_`. Every metric also "
        "has vLLM's own labels `model_name` and `engine`; Prometheus adds `_total` to counters. "
        "The tokens restored for each request appear in vLLM's external prefix cache metrics, "
        "too, as `host`, `disk` and `p2p`.\n\n"
        "Bytes of loads and saves, and seconds of loads, appear a second time under the names of "
        "vLLM's native offloading, so that its panels show them: "
        f"{', '.join(f'`{name}`' for name in NATIVE_NAMES)}. Inside a MultiConnector with native "
        "offloading these names are its own."
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
        parts.append(f"## {titles[kind]}\n\n{table(['name', 'labels', 'meaning'], rows)}")
    return "\n\n".join(parts) + "\n"


def cli() -> str:
    """Return the page of commands."""
    from typer.main import get_command

    from hetero_connector.tools.cli import app

    parts = [
        f"{NOTE}# Commands\n\n"
        "The package installs one command, `heterocache`. `heterocache --install-completion` "
        "completes commands in your shell. Exit status: 0 if all is well, 1 if a problem was "
        "found, 2 if the arguments or the input cannot be used. `simulate` needs the extra "
        "`sim`, `reset` the extra `redis`, `router` the extra `router`: in a clone "
        "`pip install '.[router]'`."
    ]
    for name, command in _commands(get_command(app), ""):
        examples = [
            line for line in command.epilog.split("\n\n") if line.startswith("heterocache ")
        ]
        rows = [
            [_parameter(x), _default(x), (x.help or "").replace("|", "\\|")] for x in command.params
        ]
        arguments = table(["argument", "default", "meaning"], rows)
        shown = "\n".join(examples)
        parts.append(f"## {name}\n\n{command.help}\n\n```text\n{shown}\n```\n\n{arguments}")
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of every command that does something."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    is_shown = parameter.default not in (None, False, (), "")
    return f"`{parameter.default}`" if is_shown else ""


def _parameter(parameter: Any) -> str:
    """Return an argument, or an option with what it takes."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    name = parameter.opts[0]
    takes = parameter.metavar or name.removeprefix("--").upper().replace("-", "_")
    return f"`{name}`" if parameter.is_flag else f"`{name} {takes}`"


def errors() -> str:
    """Return the page of errors."""
    from hetero_connector import errors

    classes = [
        x
        for x in vars(errors).values()
        if inspect.isclass(x) and issubclass(x, errors.HeteroCacheError)
    ]
    rows = [[f"`{x.__name__}`", (inspect.getdoc(x) or "").split("\n\n")[0]] for x in classes]
    rows = [[name, " ".join(text.split())] for name, text in rows]
    return f"""{NOTE}# Errors

Errors at start are raised, and their text says what to change. An error while serving, such as a
failed read, a bad checksum or a missed deadline, never reaches the engine: it is counted and
becomes a cache miss ([failures](../guides/failures.md)). One error may end a running engine,
because the answer would be wrong: `LoadLostError` ([hooks](../internals/hooks.md)).

All are in `hetero_connector.errors`, and pickling keeps their text and attributes.

```text
{_tree(errors.HeteroCacheError)}
```

{table(["error", "meaning"], rows)}
"""


def _tree(kind: type, depth: int = 0) -> str:
    """Return the class and those derived from it, each on a line, indented by its depth."""
    derived = [
        _tree(x, depth + 1) for x in kind.__subclasses__() if x.__module__ == kind.__module__
    ]
    return "\n".join([f"{'    ' * depth}{kind.__name__}", *derived])


_OWN = {
    "no_store": (
        "true or false",
        "`true`: nothing of this request is stored. What is stored already is restored",
    ),
    "ttl_s": (
        "seconds, 0 to 2592000",
        "What only this request stored is forgotten about so long after its end, in every tier. A "
        "later request without `ttl_s` that uses it lifts that",
    ),
    "pin_s": (
        "seconds, 0 to 86400",
        "Nothing of the session's chain is evicted for so long, and of what its later turns add. "
        "0 ends the pin. The pins of a `cache_salt` keep a quarter of the smallest tier at most, "
        "and all pins a half: beyond that there is one warning and no pin",
    ),
    "priority": (
        "`low`, `normal`, `high`",
        "`low`: what only this request stored is evicted first, until it is used again. `high`: "
        "the session's chain is evicted last, for an hour. `ttl_s` comes before `low`",
    ),
    "session_id": (
        "text",
        "The session that this request belongs to. vLLM's own request field `session_id` and its "
        "header `X-Session-ID` mean the same and come first",
    ),
    "expected_back_s": (
        "seconds, 0 to 2592000",
        "Time from the end of this answer to the session's next request",
    ),
    "fork": (
        "text",
        "The id of the session, under the same `cache_salt`, whose prompt this session continues: "
        "a sub-agent's parent. Its chain is evicted last while this turn runs, for an hour at most",
    ),
    "end_session": (
        "true or false",
        "`true`: this was the session's last turn. Its pin ends, it is expected no more, and what "
        "no other chain needs is evicted first",
    ),
    "report": ("true or false", "`true`: the answer says what was restored; see below"),
}
_VLLM = {
    "max_load_tokens": (
        "a whole number, 0 or more",
        "Most tokens to restore, beyond those in the engine's own cache; 0: none",
    ),
    "max_offload_tokens": (
        "a whole number, 0 or more",
        "State is stored of no token beyond this one, in whole chunks; 0: of none",
    ),
    "kv_load_tiers": (
        'a list of `{"medium": ..., "locality": ...}`',
        "Where state may be read from besides DRAM, which always serves: the SSD is `STORAGE` and "
        "`LOCAL`, peers are `REMOTE`. An empty list: nowhere. An entry that is wrong is skipped; "
        "if all are, the list is ignored",
    ),
}


def requests() -> str:
    """Return the page of request parameters."""
    from hetero_connector.engine.scheduler import handoff
    from hetero_connector.engine.scheduler.request_params import (
        OWN_FIELDS,
        SESSION_FIELDS,
        VLLM_FIELDS,
    )
    from hetero_connector.engine.scheduler.request_report import REPORT

    assert set(_OWN) == {*OWN_FIELDS, REPORT}, "describe every field of OWN_FIELDS here"
    assert set(_VLLM) == set(VLLM_FIELDS), "describe every field of VLLM_FIELDS here"
    own = [[f"`{name}`", *about] for name, about in _OWN.items()]
    vllm = [[f"`{name}`", *about] for name, about in _VLLM.items()]
    outside = " and ".join(f"`{name}`" for name in SESSION_FIELDS)
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
    return f"""{NOTE}# Request parameters

A request needs no parameters. These are read from `kv_transfer_params` in the request's body, or in
Python from `SamplingParams.extra_args["kv_transfer_params"]`. A parameter of the wrong type or
range is ignored, and the request is served, except for
[values that vLLM cannot send to its engine](../guides/limits.md#defects-of-vllm). Each wrong or
unknown name is logged once, with the name that is nearest; outside `heterocache` only if it is
nearly one of ours, because others may be another connector's. See the
[guide](../guides/requests.md).

## In `heterocache`

{table(["field", "takes", "meaning"], own)}

{outside} may be outside of `heterocache`, too. Ids are valid within the request's `cache_salt`.

```json
{{
  "model": "MODEL",
  "prompt": "...",
  "kv_transfer_params": {{
    "heterocache": {{"session_id": "agent-7", "expected_back_s": 12.5, "pin_s": 600}}
  }}
}}
```

## vLLM's own

These mean what they mean to vLLM's offloading connector.

{table(["field", "takes", "meaning"], vllm)}

vLLM's `SamplingParams.skip_reading_prefix_cache` is obeyed: such a request computes everything, and
is stored.

## Prefill and decode apart

{table(["field", "goes", "meaning"], handoffs)}

See the [guide](../guides/prefill-decode.md). vLLM's `cache_salt` separates tenants: requests with
different salts share nothing.

## A report of the request

With `{{"heterocache": {{"report": true}}}}` the answer's `kv_transfer_params` say what was
restored, from where, and why not more.

```json
{{
  "model": "MODEL",
  "prompt": "...",
  "kv_transfer_params": {{"heterocache": {{"report": true}}}}
}}
```

An answer of vLLM has the report of its first prompt; streams and answers that a stop string ends
have none. All of them can be had by id: `GET /v1/heterocache/requests/ID`, where the server runs
with `VLLM_PLUGINS=heterocache`.
"""
