"""Keeps the view current: each server is asked how it names chains, and checked when it starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ownership.router.view.checks import Ask, Checks
from ownership.router.view.prompts import PrefixViews

_log = logging.getLogger(__name__)


class FleetWatch:
    """Asks all servers once each period. Used on the event loop."""

    def __init__(
        self,
        views: PrefixViews,
        servers: Callable[[], Mapping[str, Ask]],
        period_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`servers`: those that serve now, by name. `clock`: as for `PrefixViews.find`."""
        self._views = views
        self._servers = servers
        self._period_s = period_s
        self._clock = clock
        self._checks = Checks(views)
        self._probed: dict[str, frozenset[str]] = {}
        """The engines of each server when it was probed."""
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Ask until the task is cancelled."""
        while True:
            await self.ask_all()
            await asyncio.sleep(self._period_s)

    async def ask_all(self) -> None:
        """Ask every server once. One that has left is forgotten."""
        servers = self._servers()
        for gone in self._views.fleet.servers - servers.keys():
            self._forget(gone)
            self._views.fleet.forget(gone)
        await asyncio.gather(*(self._ask(name, ask) for name, ask in servers.items()))

    async def _ask(self, name: str, ask: Ask) -> None:
        fleet = self._views.fleet
        try:
            await self._checks.refresh(name, ask, self._clock())
            instances = fleet.instances(name)
            if self._probed.get(name) != instances:
                self._forget(name)
                differences = await self._checks.probe(name, ask)
                self._probed[name] = instances
                self._tell(name, ", ".join(sorted(set(differences))))
        except (OSError, ValueError, TimeoutError) as error:
            if name not in fleet.servers:
                fleet.told(name, (), self._clock())
            self._tell(name, str(error) or type(error).__name__)

    def _forget(self, name: str) -> None:
        self._probed.pop(name, None)
        self._problems.pop(name, None)
        self._views.trust.forget(name)

    def _tell(self, name: str, problem: str) -> None:
        """Log a problem once."""
        if problem and problem != self._problems.get(name):
            _log.warning("the prefixes of worker %s are uncertain: %s", name, problem)
        self._problems[name] = problem
