"""A request router that keeps each session at the replica that has its state."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from examples.ray_serve.sessions import SessionOwners, session_of


class SessionRouter(RequestRouter):
    """Keeps sessions at their replicas, and spreads new ones.

    Each process that routes has an instance of its own, so with several ingress replicas a session
    may have several owners; what they store is shared all the same. Ray's FIFOMixin must not be
    mixed in: it gives the chosen replica to the first request of the queue, not to this one.
    """

    def initialize_state(self, sessions: int = 100_000) -> None:
        """Called by Ray Serve with `request_router_kwargs`. `sessions`: how many are remembered."""
        self._owners: SessionOwners[ReplicaID] = SessionOwners(sessions)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one: the next is asked if one is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all were asked
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        lengths = {replica: self.replica_queue_len_cache.get(replica) or 0 for replica in replicas}
        session = _session(pending_request)
        ranked = self._owners.rank(session, list(replicas), lengths)
        if ranked:
            # With direct streaming Ray does not call on_request_routed.
            self._owners.settle(session, ranked[0])
        return [[replicas[replica]] for replica in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Move the session if its owner was full."""
        self._owners.settle(_session(pending_request), replica_id)


def _session(request: PendingRequest) -> str | None:
    return session_of(request.metadata.session_id, request.args[0] if request.args else None)
