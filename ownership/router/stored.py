"""Reads from workers' own metrics what they store in each tier, and what was moved between tiers.

They are asked only on request, by the viewers of the fleet's page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from time import monotonic

import msgspec

from ownership.router.view.checks import Ask

_PERIOD_S = 10.0
"""Seconds after which what a worker has told is old."""
_PATIENCE_S = 0.5
"""Seconds that who asks waits for the workers' answers."""
_NAMES = (
    "heterocache_bytes{",
    "heterocache_capacity_bytes{",
    "heterocache_read_bytes_total{",
    "heterocache_ssd_written_bytes_total{",
    "vllm:kv_cache_usage_perc{",
)
_LABEL = re.compile(r'(\w+)="(\w+)"')


class StoredTier(msgspec.Struct):
    """One tier of a worker, its engines together."""

    capacity_bytes: float = 0.0
    bytes: dict[str, float] = {}
    """By state type, without padding."""


class StoredState(msgspec.Struct):
    """One worker's own figures of its state. Counters are since its start."""

    told_s: float
    """Monotonic time."""
    hbm_usage: float | None = None
    """The share of the engine's pages that requests occupy; None if it has not told."""
    tiers: dict[str, StoredTier] = {}
    """Empty without a connector."""
    read_bytes: dict[str, float] = {}
    """Taken from each tier, and from peers, by restores and prefetches."""
    ssd_written_bytes: float = 0.0


class StoredStates:
    """The newest of all workers. Used on the event loop."""

    def __init__(self, servers: Callable[[], Mapping[str, Ask]]) -> None:
        """`servers`: those that serve now, by name."""
        self._servers = servers
        self._known: dict[str, StoredState] = {}
        self._asking: asyncio.Task[None] | None = None
        self._due_s = 0.0

    async def newest(self) -> Mapping[str, StoredState]:
        """Return the workers' own figures, after asking for them if they are old.

        An answer that is late is in the next one. A worker that does not serve is left out.
        """
        now_s = monotonic()
        if now_s >= self._due_s and (self._asking is None or self._asking.done()):
            self._due_s = now_s + _PERIOD_S
            self._asking = asyncio.get_running_loop().create_task(self._ask_all())
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=_PATIENCE_S)
        return self._known

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_all(self) -> None:
        servers = self._servers()
        for gone in self._known.keys() - servers.keys():
            del self._known[gone]
        await asyncio.gather(*(self._ask(name, ask) for name, ask in servers.items()))

    async def _ask(self, name: str, ask: Ask) -> None:
        try:
            metrics = await ask("GET", "/metrics", None)
            self._known[name] = stored_state(
                metrics if isinstance(metrics, str) else "", monotonic()
            )
        except (OSError, ValueError, TimeoutError):
            pass  # what it told last grows old


def stored_state(metrics: str, told_s: float) -> StoredState:
    """Return what a server's metrics say. Raises ValueError for a value that is no number."""
    found = StoredState(told_s)
    usages = []
    for line in metrics.splitlines():
        if not line.startswith(_NAMES):
            continue
        name, _, rest = line.partition("{")
        labels, _, text = rest.rpartition("} ")
        value, label = float(text), dict(_LABEL.findall(labels))
        tier = label.get("tier", "")
        match name.removeprefix("heterocache_"):
            case "vllm:kv_cache_usage_perc":
                usages.append(value)
            case "bytes":
                stored = found.tiers.setdefault(tier, StoredTier()).bytes
                _add(stored, label.get("state_type", ""), value)
            case "capacity_bytes":
                found.tiers.setdefault(tier, StoredTier()).capacity_bytes += value
            case "read_bytes_total":
                _add(found.read_bytes, tier, value)
            case "ssd_written_bytes_total":
                found.ssd_written_bytes += value
    if usages:
        found.hbm_usage = sum(usages) / len(usages)
    return found


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value
