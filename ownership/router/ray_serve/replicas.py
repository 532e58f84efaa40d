"""The replicas of a deployment as workers of the router.

A replica has no address to ask it at. It tells its answers with Ray's routing statistics, which Ray
hands to everyone who routes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ownership.router.config import WorkerAddress
from ownership.router.view.checks import Ask
from ownership.router.workers import Worker, WorkerSet, WorkerState

TOLD = "heterocache"
"""The key of a replica's routing statistics that has its answers."""


class Answer(NamedTuple):
    """The answer of a replica's server to one question."""

    method: str
    path: str
    body: Mapping[str, Any] | None
    answer: Any
    """Decoded JSON, or text."""


def routing_stats(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the routing statistics by which a replica tells these answers.

    Ray sends them to all routers when they change, so they should change rarely.
    """
    return {TOLD: [list(x) for x in answers]}


def told_in(stats: Mapping[str, Any]) -> list[Answer]:
    """Return the answers in a replica's routing statistics: none if its server tells none."""
    told = stats.get(TOLD, ())
    return [Answer(*x) for x in told if len(x) == len(Answer._fields)]


class Replicas:
    """A `Questions` to the replicas that Ray has named last. Used on the event loop."""

    def __init__(self) -> None:
        self.workers = WorkerSet(sys.maxsize)  # Ray itself limits what a replica has at once
        self._told: dict[str, list[Answer]] = {}

    def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Make these the replicas. `stats`: the routing statistics of each, by its name."""
        self._told = {name: told_in(x) for name, x in stats.items()}
        self.workers.set_addresses(WorkerAddress(name, "") for name in stats)
        for worker in self.workers:
            worker.state = WorkerState.UP

    def named(self, names: Sequence[str]) -> list[Worker]:
        """Return the workers with these names that are still there."""
        wanted = set(names)
        return [worker for worker in self.workers if worker.name in wanted]

    def servers(self) -> Mapping[str, Ask]:
        return {name: partial(self._ask, name) for name in self._told}

    def host_of(self, name: str) -> str:
        return name

    async def _ask(self, name: str, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        for answer in self._told.get(name, ()):
            if answer[:3] == (method, path, body):
                return answer.answer
        raise ValueError(f"replica {name} tells nothing of {path}")
