"""The figures of workers that placements are priced by: their costs and the size of their pages."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.profile import CostProfile
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType
from ownership.router.alike import pooled
from ownership.router.view import PublishedChain
from ownership.router.view.checks import Ask
from ownership.scheduling import FleetView, StateFootprint, WorkerView
from ownership.scheduling.fleet import Role

_PAGES = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_DRAM = re.compile(r'^heterocache_capacity_bytes\{[^}\n]*tier="dram"[^}\n]*\} (\S+)$', re.MULTILINE)
_LABEL = re.compile(r'(block_size|num_gpu_blocks)="(\d+)"')
_UNKNOWN_MODEL = StateFootprint({}, {}, 0.0, 1)
_UNKNOWN_BYTES = 1 << 50
"""More than any prompt needs: pages of unknown size are no reason against a worker."""

_log = logging.getLogger(__name__)


class Figures(NamedTuple):
    """The figures that one worker has told."""

    profile: CostProfile | None = None
    told: bytes = b""
    """The JSON that the profile was read from."""
    page_tokens: int = 0
    """Tokens of all its pages; 0 if unknown."""
    cache_bytes: int = 0
    """Size of its store's DRAM, the engines together; 0 if unknown."""


class WorkerFigures:
    """Asks workers for their figures, and makes a `FleetView` of them. Used on the event loop."""

    def __init__(self) -> None:
        self._known: dict[str, Figures] = {}
        self._priced: tuple[object, dict[str, CostModel]] = None, {}
        """All that costs were made of last, and the costs of each worker."""

    async def ask_all(self, servers: Mapping[str, Ask]) -> None:
        """Ask every worker once, and forget those that have left."""
        for gone in self._known.keys() - servers.keys():
            del self._known[gone]
        await asyncio.gather(*(self._ask(name, ask) for name, ask in servers.items()))

    def costs_of(self, worker: str) -> str:
        """Return the source of a worker's costs: `learned` by itself, or the `default`."""
        return "learned" if self._known.get(worker, Figures()).profile else "default"

    def fleet(self, workers: Mapping[str, Role], published: Sequence[PublishedChain]) -> FleetView:
        """Return the view of these workers, of which there is at least one, without loads.

        The model is the first one published. Workers that have told nothing have default costs;
        those that have measured little are taken to be like others of their kind (`alike`).
        """
        footprint, types = _UNKNOWN_MODEL, tuple[StateType, ...]()
        if published:
            model = published[0].model
            footprint = _footprint(model, published[0].chunk_tokens)
            types = tuple(model.state_types)
        told = {name: self._known.get(name, Figures()) for name in workers}
        known_costs = self._costs(told, types)
        views = []
        for name, role in workers.items():
            costs = known_costs.get(name) or CostModel(ComputeRegression(), LoadModel(types))
            page_bytes = int(told[name].page_tokens * footprint.page_bytes_per_token)
            size_bytes = page_bytes or _UNKNOWN_BYTES
            cache_bytes = told[name].cache_bytes
            views.append(WorkerView(name, costs, size_bytes, role, cache_bytes=cache_bytes))
        return FleetView(footprint, views)

    def _costs(
        self, told: Mapping[str, Figures], types: Sequence[StateType]
    ) -> Mapping[str, CostModel]:
        """Return the costs of the workers that have told them."""
        given = {name: x.profile for name, x in told.items() if x.profile is not None}
        if self._priced[0] != (given, types):  # an idle fleet learns nothing
            found = {name: x.cost_model(types) for name, x in pooled(given).items()}
            self._priced = (given, types), found
        return self._priced[1]

    async def _ask(self, name: str, ask: Ask) -> None:
        known = self._known.get(name, Figures())
        try:
            # One that tells no costs has no connector, whose store would be in its metrics.
            if not known.page_tokens or (known.profile is not None and not known.cache_bytes):
                metrics = await ask("GET", "/metrics", None)
                known = known._replace(
                    page_tokens=page_tokens(metrics), cache_bytes=_cache_bytes(metrics)
                )
            costs = _told_costs(await ask("GET", "/v1/heterocache/costs", None))
            if costs != known.told:
                known = known._replace(profile=CostProfile.from_json(costs), told=costs)
        except (OSError, ValueError, TimeoutError) as error:
            if name not in self._known:
                _log.info("worker %s has default costs: %s", name, error)
        self._known[name] = known


@lru_cache(maxsize=8)
def _footprint(model: ModelSpec, chunk_tokens: int) -> StateFootprint:
    return StateFootprint.of(ArtifactLayout(model, chunk_tokens))


def _told_costs(answer: object) -> bytes:
    """Return the costs of a worker's first engine. Raises ValueError if it has told none."""
    engines = answer.get("engines") if isinstance(answer, Mapping) else None
    if not isinstance(engines, list):
        raise ValueError("the answer about costs names no engines")
    told = [x["costs"] for x in engines if isinstance(x, Mapping) and "costs" in x]
    if not told:
        raise ValueError("no engine tells its costs")
    return msgspec.json.encode(told[0])


def _cache_bytes(metrics: object) -> int:
    """Return the size of a worker's DRAM for state by its metrics, the engines together; or 0."""
    found = _DRAM.findall(metrics if isinstance(metrics, str) else "")
    total = sum(map(float, found))
    return int(total) if math.isfinite(total) else 0


def page_tokens(metrics: object) -> int:
    """Return the tokens of a worker's pages by vLLM's metrics, the engines together; 0: unknown."""
    total = 0
    for labels in _PAGES.findall(metrics if isinstance(metrics, str) else ""):
        sizes = dict(_LABEL.findall(labels))
        total += int(sizes.get("block_size", 0)) * int(sizes.get("num_gpu_blocks", 0))
    return total
