"""Ray Serve's request router. It needs Ray; everything that is decided here is in `placing`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter

from hetero_connector.errors import RouterConfigError
from ownership.router.placer import Placed
from ownership.router.ray_serve.asked import PICK, request_of
from ownership.router.ray_serve.placing import ReplicaPlacing, replica_config

_log = logging.getLogger(__name__)


class OwnerRouter(RequestRouter):
    """Sends a request to the replica at which it costs least, by the state that each one has.

    Ray's mixins must not be mixed in: FIFOMixin gives the chosen replica to the first request of
    the queue, and not to the one that it was chosen for.
    """

    def initialize_state(self, **keys: Any) -> None:
        """Take `request_router_kwargs`: `model_path`, `directory`, `directory_s` and `policy`."""
        try:
            config = replica_config(keys)
        except RouterConfigError as error:  # raised here, it would leave all requests waiting
            _log.error("requests are placed by their sessions alone: %s", error)
            config = replica_config({})
        self._placing = ReplicaPlacing(config)
        self._heard = WeakSet[Any]()
        """The futures whose ends are followed: a request that a replica rejects gets another."""
        self._placements = Counter(
            "heterocache_router_placements",
            "Requests placed by a policy, by certainty (exact, degraded, blind) and action",
            ("certainty", "action"),
        )
        self._doubts = Counter(
            "heterocache_router_doubts",
            "Requests placed without being certain, by each reason",
            ("reason",),
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when replicas come or go, or have told something else.

        It is called first when there is none yet, so the placer is open when requests come.
        """
        super().update_replicas(replicas)
        with suppress(RuntimeError):  # called outside a loop: the first request begins it
            self._placing.begin()
        self._placing.replicas.update({x.replica_id.unique_id: x.routing_stats for x in replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others: Ray asks them if that one is full."""
        if pending_request is None:
            return [candidate_replicas]
        context = pending_request.routing_context
        is_first, context.should_backoff = not context.should_backoff, True  # all were asked
        by_name = {x.replica_id.unique_id: x for x in candidate_replicas}
        try:
            placed = await self._place(pending_request, list(by_name))
            if placed is not None and is_first:  # Ray asks again while all replicas are full
                self._count(placed)
        except Exception:  # raised here, it would leave the request waiting
            _log.exception("a request is placed by queue lengths alone")
            placed = None
        if placed is None:
            return [candidate_replicas]
        chosen = by_name.pop(placed.worker.name)
        return [[chosen], list(by_name.values())]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when an answer has ended, or its replica or client has."""
        self._placing.ended(internal_request_id, replica_id.unique_id)

    async def _place(self, pending: PendingRequest, candidates: list[str]) -> Placed | None:
        """Return the placement of a request, counted until Ray tells of its end; None if all
        candidates have left."""
        metadata, args = pending.metadata, pending.args
        request = request_of(
            metadata.call_method,
            args[0] if args else None,
            getattr(args[1], "headers", {}) if len(args) > 1 else {},
            metadata.session_id,
        )
        name = metadata.internal_request_id
        on_future = self._on_future(name)
        if pending.future not in self._heard:  # Ray asks hundreds of times for the same
            self._heard.add(pending.future)
            pending.future.add_done_callback(on_future)
        placed = await self._placing.place(name, request, candidates)
        if placed is None:
            return None
        if metadata.call_method == PICK:
            self._placing.end_unseen(name)
        if pending.future.done():  # while it was placed, so it did not count yet
            on_future(pending.future)
        return placed

    def _count(self, placed: Placed) -> None:
        if placed.certainty:
            tags = {"certainty": str(placed.certainty), "action": str(placed.action)}
            self._placements.inc(tags=tags)
            for reason in placed.reasons:
                self._doubts.inc(tags={"reason": str(reason)})

    def _on_future(self, name: str) -> Callable[[Any], None]:
        def on_done(future: Any) -> None:
            if future.cancelled():
                self._placing.left(name)
            else:  # a client may leave before the replica has accepted
                self._placing.routed(name, future.result().replica_id.unique_id)

        return on_done
