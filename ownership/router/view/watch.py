"""Keeps the view current: each server is asked how it names chains, and checked when it starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ownership.router.view.certainty import Reason
from ownership.router.view.checks import Ask, Checks, base_models
from ownership.router.view.event_reader import EventReader, event_sources
from ownership.router.view.prompts import PrefixViews, PromptView
from ownership.router.view.trust import Kind

_SAMPLE_S = 60.0
"""Seconds between two samples of a kind of requests at a server that agrees with the router."""
_SAMPLED = frozenset({Reason.UNCHECKED, Reason.TOKENS_DIFFER, Reason.KEYS_DIFFER})
"""Only requests that are uncertain for no other reason are samples: a report of others differs."""

_log = logging.getLogger(__name__)


class FleetWatch:
    """Asks all servers once each period. Used on the event loop."""

    def __init__(
        self,
        views: PrefixViews,
        servers: Callable[[], Mapping[str, Ask]],
        clock: Callable[[], float] = time.monotonic,
        events: EventReader | None = None,
        host_of: Callable[[str], str] = str,
    ) -> None:
        """`servers`: those that serve now, by name. `clock`: as for `PrefixViews.find`. `events`:
        None if KV events are not read. `host_of`: the address of a server by its name.
        """
        self._events, self._host_of = events, host_of
        self._views = views
        self._servers = servers
        self._clock = clock
        self._checks = Checks(views)
        self._probed: dict[str, frozenset[str]] = {}
        """The engines of each server when it was probed."""
        self._problems: dict[str, str] = {}
        self._samples: dict[tuple[str, Kind], tuple[str, PromptView, str]] = {}
        """The next one by server and kind: path, view and the id of the answer."""
        self._sampled_s: dict[tuple[str, Kind], float] = {}
        """The time of the last one that agreed."""

    def on_answer(self, server: str, path: str, view: PromptView, answer_id: str) -> None:
        """Compare this request with the server's report of it in the next round, if it is time."""
        key = server, view.kind
        last_s = self._sampled_s.get(key, -_SAMPLE_S)
        if answer_id and self._clock() - last_s >= _SAMPLE_S and _SAMPLED.issuperset(view.reasons):
            self._samples[key] = path, view, answer_id

    async def ask_all(self) -> None:
        """Ask every server once. One that has left is forgotten."""
        servers = self._servers()
        for gone in self._views.fleet.servers - servers.keys():
            self._forget(gone)
            self._views.fleet.forget(gone)
            self._end_events(gone)
        self._samples = {key: x for key, x in self._samples.items() if key[0] in servers}
        await asyncio.gather(*(self._ask(name, ask) for name, ask in servers.items()))

    async def _ask(self, name: str, ask: Ask) -> None:
        fleet, stock = self._views.fleet, self._views.stock
        try:
            try:
                await self._checks.refresh(name, ask, self._clock())
                self._end_events(name)
            except ValueError:
                if fleet.instances(name) or not await self._follow_events(name, ask):
                    raise
            instances = fleet.instances(name) | stock.instances(name)
            if self._probed.get(name) != instances:
                self._forget(name)
                differences = await self._checks.probe(name, ask)
                self._probed[name] = instances
                self._tell(name, ", ".join(sorted(set(differences))))
            await self._compare_samples(name, ask)
        except (OSError, ValueError, TimeoutError) as error:
            if name not in fleet.servers:
                fleet.told(name, (), self._clock())
            self._tell(name, str(error) or type(error).__name__)

    async def _compare_samples(self, name: str, ask: Ask) -> None:
        for key in [x for x in self._samples if x[0] == name]:
            path, view, answer_id = self._samples.pop(key)
            difference = await self._checks.sample(name, ask, view, answer_id)
            if difference is not None:
                self._tell(name, f"{path}: {difference}")
            elif self._views.trust.reason(*key) is None:
                self._sampled_s[key] = self._clock()

    async def _follow_events(self, name: str, ask: Ask) -> bool:
        """Read the KV events of a server without chains; return False if it publishes none."""
        if self._events is None:
            return False
        try:
            answer = await ask("GET", "/kv_event_sources", None)
            sources = event_sources(answer, self._host_of(name))
        except ValueError:
            sources = []  # an older server
        if not sources:
            self._end_events(name)
            return False
        models = base_models(await ask("GET", "/v1/models", None))
        self._events.follow(name, sources)
        self._views.fleet.told(name, (), self._clock())
        self._views.stock.told(name, models)
        return True

    def _end_events(self, name: str) -> None:
        self._views.stock.forget(name)
        if self._events is not None:
            self._events.forget(name)

    def _forget(self, name: str) -> None:
        self._probed.pop(name, None)
        self._problems.pop(name, None)
        self._views.trust.forget(name)
        for kind in Kind:
            self._samples.pop((name, kind), None)
            self._sampled_s.pop((name, kind), None)

    def _tell(self, name: str, problem: str) -> None:
        """Log a problem once."""
        if problem and problem != self._problems.get(name):
            _log.warning("the prefixes of worker %s are uncertain: %s", name, problem)
        self._problems[name] = problem
