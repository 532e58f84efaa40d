"""The panels of the Grafana dashboards, with their queries.

A test fails if a query names a metric or a label that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Query(NamedTuple):
    """One query of a panel, in which `%` stands for the labels that the variables select."""

    expr: str
    legend: str
    is_rate: bool = False
    """True for counts per second."""

    def full(self, selected: str) -> str:
        """Return the query as Grafana sends it, its own variables apart."""
        return self.expr.replace("%,", f"{selected}, ").replace("%", selected)


class Panel(NamedTuple):
    """One panel: a time series unless `kind` says otherwise, a third of the width by default."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: str = ""
    """Grafana's name of it; "": counts per second if all queries are such rates, else numbers."""
    kind: str = "timeseries"
    width: int = 8
    is_stacked: bool = False
    most: float | None = None
    """The upper end of the axis; None: as the values need."""

    @property
    def unit_shown(self) -> str:
        """Grafana's name of the unit."""
        return self.unit or ("cps" if all(query.is_rate for query in self.queries) else "short")


def rate(metric: str, *by: str, unit: str = "", where: str = "") -> Query:
    """Return a counter's rate by these labels."""
    chosen = f"%,{where}" if where else "%"
    grouped = f" by ({', '.join(by)})" if by else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or unit or "all"
    expr = f"sum{grouped} (rate({metric}{{{chosen}}}[$__rate_interval]))"
    return Query(expr, legend, is_rate=True)


def total(metric: str, *by: str) -> Query:
    """Return the sum of a gauge over engines, by these labels."""
    grouped = f" by ({', '.join(by)})" if by else ""
    return Query(f"sum{grouped} ({metric}{{%}})", " ".join(f"{{{{{x}}}}}" for x in by) or "all")


def quantile(share: float, metric: str, *by: str) -> Query:
    """Return a quantile of a histogram by these labels."""
    grouped = ", ".join(("le", *by))
    legend = " ".join((f"p{100 * share:g}", *(f"{{{{{label}}}}}" for label in by)))
    inner = f"sum by ({grouped}) (rate({metric}_bucket{{%}}[$__rate_interval]))"
    return Query(f"histogram_quantile({share}, {inner})", legend)


def mean(metric: str, where: str, legend: str) -> Query:
    """Return the mean of a histogram's samples."""
    over, under = (
        f"sum (rate({metric}_{part}{{%,{where}}}[$__rate_interval]))" for part in ("sum", "count")
    )
    return Query(f"{over} / {under}", legend)


def _saved() -> str:
    """Return seconds of waiting that restores saved per second."""
    return " - ".join(
        f'sum (rate(heterocache_reuse_benefit_seconds_sum{{%,kind="{kind}"}}[$__rate_interval]))'
        for kind in ("observed", "lost")
    )


_SHARES = (0.5, 0.95, 0.99)
_COMPUTED = 'vllm:prompt_tokens_by_source_total{%,source="local_compute"}'
OF_ENGINES: dict[str, Sequence[Panel]] = {
    "Is it worth it": (
        Panel(
            "Prompt tokens not computed",
            "Share of prompt tokens that came from a cache: the engine's own or this one.",
            [
                Query(
                    f"1 - sum (rate({_COMPUTED}[$__rate_interval])) / "
                    "sum (rate(vllm:prompt_tokens_by_source_total{%}[$__rate_interval]))",
                    "not computed",
                )
            ],
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Waiting time saved",
            "Seconds of time to first token that restores saved, per second, against computing.",
            [Query(_saved(), "saved")],
            "s",
            "stat",
            4,
        ),
        Panel(
            "Prompt tokens by source",
            "device: the engine's own cache. host, disk and p2p: restored by this one.",
            [
                rate("vllm:prompt_tokens_cached_by_source_total", "source"),
                rate(
                    "vllm:prompt_tokens_by_source_total",
                    unit="computed",
                    where='source="local_compute"',
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            "Restored tokens by tier",
            "Each token counts for the farthest tier that its chunk needed.",
            [
                rate("heterocache_hit_tokens_total", "tier"),
                rate("heterocache_replayed_tokens_total", unit="replayed"),
            ],
            is_stacked=True,
        ),
        Panel(
            "Decisions",
            "What the planner chose for requests of which something was stored.",
            [
                rate("heterocache_decisions_total", "choice"),
                rate("heterocache_hits_total", unit="restored"),
            ],
        ),
        Panel(
            "Time to first token",
            "Of all requests, as vLLM measures it.",
            [quantile(share, "vllm:time_to_first_token_seconds") for share in _SHARES],
            "s",
        ),
        Panel(
            "Moved between pages and DRAM",
            "Bytes without padding.",
            [
                rate("heterocache_restored_bytes_total", unit="restored"),
                rate("heterocache_saved_bytes_total", unit="saved"),
            ],
            "Bps",
        ),
    ),
    "Predicted and observed": (
        Panel(
            "Observed over predicted time to first token",
            "1 is exact. Far from 1: calibrate, or look at what the prediction cannot know.",
            [
                quantile(0.5, "heterocache_prediction_ratio", "choice"),
                quantile(0.95, "heterocache_prediction_ratio", "choice"),
            ],
        ),
        Panel(
            "Mean time to first token",
            "Of planned requests, from the decision on.",
            [
                mean("heterocache_ttft_seconds", f'kind="{kind}"', kind)
                for kind in ("predicted", "observed")
            ],
            "s",
        ),
        Panel(
            "Lost and repeated",
            "Restores that took longer than computing would have, and plans made again after a "
            "failed read.",
            [
                rate("heterocache_lost_restores_total", unit="lost"),
                rate("heterocache_restores_replanned_total", unit="planned again"),
            ],
        ),
        Panel(
            "Time of loads and saves",
            "Staging: from the match until everything is in DRAM. Load: one step's copies. "
            "Save: the worker's thread in one step; on CUDA it only issues the copies.",
            [
                quantile(0.95, f"heterocache_{name}_seconds")._replace(legend=f"p95 {name}")
                for name in ("stage", "load", "save")
            ],
            "s",
        ),
        Panel(
            "Restored tokens by state type",
            "Counted once for each state type and its tier.",
            [rate("heterocache_restored_tokens_total", "tier", "state_type")],
        ),
    ),
    "Tiers by state type": (
        Panel(
            "Stored",
            "Useful bytes.",
            [total("heterocache_bytes", "tier", "state_type")],
            "bytes",
            is_stacked=True,
        ),
        Panel(
            "Fill",
            "Stored over capacity. A tier that has been full once stays nearly full.",
            [
                Query(
                    "sum by (tier) (heterocache_bytes{%}) / "
                    "sum by (tier) (heterocache_capacity_bytes{%})",
                    "{{tier}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Artifacts",
            "Number stored.",
            [total("heterocache_artifacts", "tier", "state_type")],
        ),
        Panel(
            "Evictions",
            "Artifacts that left a tier.",
            [rate("heterocache_evictions_total", "tier", "state_type")],
        ),
        Panel(
            "Eviction regret",
            "Tokens computed again within 10 minutes of their eviction. It is what a larger tier "
            "would have saved.",
            [rate("heterocache_eviction_regret_tokens_total", "tier", "state_type")],
        ),
        Panel(
            "Evicted before all others",
            "Bytes that left first because computing them again costs less.",
            [rate("heterocache_evicted_first_bytes_total", "tier", "state_type")],
            "Bps",
        ),
    ),
    "SSD": (
        Panel(
            "Written",
            "Wear: bytes written to SSD, without padding.",
            [rate("heterocache_ssd_written_bytes_total", "state_type")],
            "Bps",
            is_stacked=True,
        ),
        Panel(
            "Write budget",
            "Written in 24 hours over what may be; empty without a budget.",
            [
                Query(
                    "heterocache_ssd_written_24h_bytes{%} / heterocache_ssd_write_budget_bytes{%}",
                    "{{instance}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Writes refused",
            "Artifacts that the budget kept off the SSD.",
            [rate("heterocache_ssd_writes_refused_total", "state_type")],
        ),
        Panel(
            "Read for restores and prefetches",
            "Bytes taken from each tier.",
            [rate("heterocache_read_bytes_total", "tier", "state_type")],
            "Bps",
        ),
        Panel(
            "Time of a batch",
            "95th percentile.",
            [
                quantile(0.95, f"heterocache_{name}_seconds")._replace(legend=f"p95 {name}")
                for name in ("ssd_read", "ssd_write")
            ],
            "s",
        ),
        Panel(
            "Prefetches",
            "Sessions that were expected back, by what became of their prefetch.",
            [rate("heterocache_prefetches_total", "outcome")],
        ),
        Panel(
            "Prefetched bytes",
            "Staged before a turn; then used, or wasted.",
            [
                rate(f"heterocache_{name}_bytes_total", unit=name)
                for name in ("prefetched", "prefetch_used", "prefetch_wasted")
            ],
            "Bps",
        ),
    ),
    "Fleet": (
        Panel(
            "Engines in the directory",
            "1 while an engine is registered, and while others find what it stores. "
            "Empty without a fleet.",
            [
                Query("heterocache_directory_joined{%}", "{{instance}} {{engine}}"),
                Query("heterocache_shared{%}", "{{instance}} {{engine}} shared"),
            ],
            most=1,
        ),
        Panel(
            "Lookups",
            "Chains looked up in the directory.",
            [rate("heterocache_directory_lookups_total", "outcome")],
        ),
        Panel(
            "Times",
            "95th percentile of a lookup and of a batch of reads from a peer.",
            [
                quantile(0.95, f"heterocache_{name}_seconds")._replace(legend=f"p95 {name}")
                for name in ("directory_lookup", "peer_read")
            ],
            "s",
        ),
        Panel(
            "Claims",
            "Answered claims, and those discarded because too many were queued.",
            [
                rate("heterocache_directory_claims_total", "outcome"),
                rate("heterocache_directory_claims_discarded_total", unit="discarded"),
            ],
        ),
        Panel(
            "Replicas",
            "Stored here and owned by another worker.",
            [
                total("heterocache_replicas")._replace(legend="artifacts"),
                rate("heterocache_replicas_expired_total", unit="expired per second"),
            ],
        ),
        Panel(
            "Bytes of replicas",
            "Stored here and owned by another worker.",
            [total("heterocache_replica_bytes")._replace(legend="bytes")],
            "bytes",
        ),
        Panel(
            "Adopted from dead workers",
            "Bytes.",
            [rate("heterocache_adopted_bytes_total", "state_type")],
            "Bps",
        ),
    ),
    "Health": (
        Panel(
            "Works",
            "1: works. 0: see the runbook.",
            [
                Query(f"min by (instance) (heterocache_{name}{{%}})", f"{name} {{{{instance}}}}")
                for name in ("cache_alive", "io_alive", "ssd_writable", "ssd_readable")
            ],
            most=1,
        ),
        Panel(
            "Failures",
            "Each one is a cache miss, never an error of a request.",
            [
                rate("heterocache_failures_total", "cause", "tier"),
                rate("heterocache_directory_failures_total", "cause")._replace(
                    legend="directory {{cause}}"
                ),
            ],
        ),
        Panel(
            "Errors in hooks",
            "Errors and exits are defects of HeteroCache: please report them with the log. "
            "Reports of requests are dropped when the log or the tracing backend is too slow.",
            [
                rate("heterocache_hook_errors_total", "hook"),
                rate("heterocache_peer_process_exits_total", unit="exits of the peer process"),
                rate("heterocache_reports_dropped_total", unit="reports dropped"),
            ],
        ),
        Panel(
            "Memory in quarantine",
            "DRAM that a transfer without an end may still fill.",
            [
                total(f"heterocache_{name}_quarantined_bytes")._replace(legend=name)
                for name in ("ssd", "peer")
            ],
            "bytes",
        ),
        Panel(
            "Not cached",
            "Requests whose adapter or media has no known identity, and saves that were not made.",
            [
                rate("heterocache_unidentified_requests_total", unit="unidentified requests"),
                rate("heterocache_saves_abandoned_total", "cause"),
            ],
        ),
        Panel(
            "Engines",
            "Versions and what they store. Engines share state if their fingerprints are equal.",
            [Query("heterocache_info{%}", "")],
            kind="table",
        ),
    ),
}


OF_ROUTERS: dict[str, Sequence[Panel]] = {
    "Requests": (
        Panel(
            "Answers by status",
            "Of workers and of the router itself.",
            [rate("heterocache_router_requests_total", "status")],
            is_stacked=True,
        ),
        Panel(
            "Time to first byte",
            "From the end of a request's body.",
            [quantile(share, "heterocache_router_first_byte_seconds") for share in _SHARES],
            "s",
        ),
        Panel(
            "Time in the router",
            "Until a request is sent to a worker: naming, placing, and waiting for room.",
            [quantile(share, "heterocache_router_wait_seconds") for share in _SHARES],
            "s",
        ),
        Panel(
            "Refused",
            "Answers of the router itself, by reason, and connections beyond `max_connections`.",
            [
                rate("heterocache_router_refused_total", "reason"),
                rate("heterocache_router_connections_refused_total", unit="connections"),
            ],
        ),
        Panel(
            "Waiting for room",
            "Requests in the router's queue.",
            [total("heterocache_router_queued")._replace(legend="queued")],
        ),
        Panel(
            "Clients that left",
            "Before their answer's end. The worker is told at once.",
            [rate("heterocache_router_clients_left_total", unit="left")],
        ),
    ),
    "Placements": (
        Panel(
            "By certainty",
            "exact: it was known what each worker has.",
            [rate("heterocache_router_placements_total", "certainty")],
            is_stacked=True,
        ),
        Panel(
            "By action",
            "Where the state was and what was done with it.",
            [rate("heterocache_router_placements_total", "action")],
            is_stacked=True,
        ),
        Panel(
            "Why not exact",
            "Requests by each reason that speaks against certainty.",
            [rate("heterocache_router_doubts_total", "reason")],
        ),
        Panel(
            "Prompt tokens known already",
            "Share of prompt tokens that needed no new tokenisation.",
            [
                Query(
                    "1 - sum (rate(heterocache_router_tokenized_total{%}[$__rate_interval])) / "
                    "sum (rate(heterocache_router_prompt_tokens_total{%}[$__rate_interval]))",
                    "known",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Prompts computed for another worker",
            "A failed one costs only time.",
            [rate("heterocache_router_prefills_total", "worker", "result")],
        ),
        Panel(
            "Lost lines of decisions",
            "The disk is full or slow.",
            [rate("heterocache_router_decisions_lost_total", unit="lost")],
        ),
    ),
    "Workers and other routers": (
        Panel(
            "Workers that serve",
            "1: serves. 0: refuses connections, or its probes fail.",
            [Query("min by (worker) (heterocache_router_worker_up{%})", "{{worker}}")],
            most=1,
        ),
        Panel(
            "Requests under way",
            "Sent by these routers.",
            [total("heterocache_router_in_flight", "worker")],
            is_stacked=True,
        ),
        Panel(
            "Sent again and cut",
            "Sent again: the worker was lost, or refused it, before the first byte. Cut: the "
            "client got an error after it.",
            [
                rate("heterocache_router_retried_total", "worker")._replace(
                    legend="{{worker}} sent again"
                ),
                rate("heterocache_router_cut_total", "worker")._replace(legend="{{worker}} cut"),
            ],
        ),
        Panel(
            "Other routers",
            "That share their load with one of these.",
            [Query("heterocache_router_peers{%}", "known to {{instance}}")],
        ),
        Panel(
            "Requests of other routers",
            "Under way, as they say.",
            [Query("heterocache_router_peer_requests{%}", "known to {{instance}}")],
        ),
    ),
}
