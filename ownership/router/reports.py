"""Reads from workers' own metrics if they sleep, and how busy they are: other clients may use them,
too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from time import monotonic
from typing import NamedTuple

from ownership.router.figures import page_tokens
from ownership.router.view.checks import Ask
from ownership.scheduling import WorkerLoad

_FIGURES = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    r"|request_prompt_tokens_sum|request_prompt_tokens_count)\{[^}\n]*\} (\S+)$",
    re.MULTILINE,
)
# Not `/is_sleeping`: a vLLM whose engine dies while it is asked never ends, nor is restarted.
_SLEEPS = re.compile(
    r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} 0(\.0)?$', re.MULTILINE
)


class LoadReport(NamedTuple):
    """A worker's load, and if it sleeps, as it was at some moment between two times."""

    worker: str
    load: WorkerLoad
    asked_s: float
    told_s: float
    is_asleep: bool
    """True if one of its engines sleeps (vLLM's sleep mode)."""


class LoadReports:
    """Asks all workers for their metrics once in each period. Used on the event loop."""

    def __init__(
        self,
        servers: Callable[[], Mapping[str, Ask]],
        on_report: Callable[[LoadReport], None],
        period_s: float,
    ) -> None:
        """`servers`: those that serve now, by name."""
        self._servers, self._on_report, self._period_s = servers, on_report, period_s

    async def run(self) -> None:
        """Ask until the task is cancelled."""
        while True:
            await self.ask_all()
            await asyncio.sleep(self._period_s)

    async def ask_all(self) -> None:
        """Ask every worker once."""
        servers = self._servers()
        await asyncio.gather(*(self._ask(name, ask) for name, ask in servers.items()))

    async def _ask(self, name: str, ask: Ask) -> None:
        asked_s = monotonic()
        try:
            metrics = await ask("GET", "/metrics", None)
            metrics = metrics if isinstance(metrics, str) else ""
            load = reported_load(metrics)
        except (OSError, ValueError, OverflowError, TimeoutError):
            return  # the probes tell if it serves; a report that is missing only grows old
        if load is not None:
            is_asleep = _SLEEPS.search(metrics) is not None
            self._on_report(LoadReport(name, load, asked_s, monotonic(), is_asleep))


def reported_load(metrics: str) -> WorkerLoad | None:
    """Return the load of a server's engines together, by vLLM's metrics; None if they say nothing.

    Prompts that wait count with the mean length of those before.
    """
    found: dict[str, list[float]] = {}
    for name, value in _FIGURES.findall(metrics):
        found.setdefault(name, []).append(float(value))
    if "num_requests_running" not in found:
        return None
    totals = {name: sum(values) for name, values in found.items()}
    usages = found.get("kv_cache_usage_perc", [0.0])
    usage = sum(usages) / len(usages)
    waiting = int(totals.get("num_requests_waiting", 0))
    prompts = totals.get("request_prompt_tokens_count", 0.0)
    mean_tokens = totals.get("request_prompt_tokens_sum", 0.0) / prompts if prompts else 0.0
    return WorkerLoad(
        queued_tokens=int(waiting * mean_tokens),
        waiting_requests=waiting,
        running_requests=int(totals["num_requests_running"]),
        context_tokens=int(usage * page_tokens(metrics)),
    )
