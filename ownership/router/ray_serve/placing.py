"""Gives each request one replica, and counts it there until Ray tells of its end.

Ray tells neither the first token of an answer nor if it was complete. So the first token is taken
to come when the policy has predicted it, or at the end, if that comes first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import monotonic

from ownership.router.config import KEYS, RouterConfig, check_keys
from ownership.router.doors import Reason, Refusal
from ownership.router.metrics import RouterMetrics
from ownership.router.opening import open_placer
from ownership.router.placer import LeastLoaded, Placed, Placer
from ownership.router.ray_serve.replicas import Replicas
from ownership.router.requests import RefusedError, RouterRequest
from ownership.router.workers import Exchange, Worker
from ownership.scheduling.registry import DEFAULT_POLICY

_KEYS = tuple(
    key for key in KEYS if key.name in ("model_path", "directory", "directory_s", "policy")
)
_UNSEEN_S = 10.0
"""Seconds for which a request counts whose end Ray does not tell."""

_log = logging.getLogger(__name__)


def replica_config(given: Mapping[str, object]) -> RouterConfig:
    """Check Ray's `request_router_kwargs`: some of the router's keys. Raises RouterConfigError."""
    config = check_keys("request_router_kwargs", given, _KEYS)
    return replace(config, policy=config.policy or DEFAULT_POLICY)


@dataclass(slots=True)
class _Held:
    """A request under way."""

    placer: Placer
    placed: Placed
    exchange: Exchange
    first_token: asyncio.TimerHandle
    has_begun: bool = False
    """True once its first token is taken to have come."""
    unseen: asyncio.TimerHandle | None = None
    """Ends it, if Ray will not tell its end."""

    @property
    def worker(self) -> Worker:
        return self.placed.worker


class ReplicaPlacing:
    """The placer of one of Ray's routers. Used on its event loop; nothing here raises."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.replicas = Replicas()
        self._opening: asyncio.Task[Placer] | None = None
        self._stack = AsyncExitStack()
        self._held: dict[str, _Held] = {}

    async def place(
        self, name: str, request: RouterRequest, candidates: Sequence[str]
    ) -> Placed | None:
        """Choose one of the candidates, and count the request there; None if all have left.

        `name`: the request's. One that is placed again was not taken where it was placed before.
        """
        placer = await self.opened()
        self._free(name, has_failed=True)

        def present() -> Sequence[Worker]:
            found = self.replicas.named(candidates)
            if not found:
                raise RefusedError(Refusal(Reason.NO_WORKER, "no replica is left"))
            return found

        try:
            placed = await placer.place(request, present)
        except RefusedError:
            return None
        if isinstance(placed, Refusal):
            return None
        self._hold(placer, name, placed)
        return placed

    def routed(self, name: str, replica: str) -> None:
        """Ray sends a request to a replica: to another one than was chosen, if that was full."""
        held = self._held.get(name)
        if held is None or held.worker.name == replica:
            return
        self._free(name, has_failed=True)
        found, ledger = self.replicas.named([replica]), held.placer.ledger
        if found and (ledger is None or replica in ledger.workers):
            held.placed.move(found[0])
            self._hold(held.placer, name, held.placed)
            if held.unseen is not None:
                self.end_unseen(name)

    def ended(self, name: str, replica: str) -> None:
        """A replica has ended a request, in whatever way."""
        held = self._held.get(name)
        if held is not None and held.worker.name == replica:
            self._free(name)

    def left(self, name: str) -> None:
        """A request is not sent: its client has gone."""
        self._free(name, has_failed=True)

    def end_unseen(self, name: str) -> None:
        """Ray will not tell the end of a request, so it counts for a fixed time."""
        held = self._held.get(name)
        if held is not None:
            held.unseen = asyncio.get_running_loop().call_later(_UNSEEN_S, self._free, name)

    def begin(self) -> None:
        """Begin to open the placer: a tokenizer takes seconds, and Ray's proxy waits for five."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def opened(self) -> Placer:
        """Return the placer, once it is open."""
        self.begin()
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """End what was opened. Ray's routers end with their process, without this."""
        for name in list(self._held):
            self._free(name, has_failed=True)
        await self._stack.aclose()

    async def _open(self) -> Placer:
        """Open the configured placer, else one that knows sessions only: requests must not hang."""
        by_sessions = RouterConfig(policy=self._config.policy)
        for config in (self._config, by_sessions):
            try:
                opening = open_placer(config, self.replicas, RouterMetrics())
                return await self._stack.enter_async_context(opening)
            except Exception as error:
                _log.error("requests are placed by their sessions alone: %s", error)
        return LeastLoaded()

    def _hold(self, placer: Placer, name: str, placed: Placed) -> None:
        now_s = monotonic()
        exchange = Exchange(asyncio.timeout(None), now_s)
        placed.worker.exchanges.add(exchange)
        placer.on_sent(placed, now_s)
        first_token = asyncio.get_running_loop().call_later(
            placed.predicted_ttft_s or 0.0, self._on_first_token, name
        )
        self._held[name] = _Held(placer, placed, exchange, first_token)

    def _on_first_token(self, name: str) -> None:
        held = self._held.get(name)
        if held is not None:
            held.has_begun = True
            held.placer.on_first_byte(held.placed, monotonic())

    def _free(self, name: str, *, has_failed: bool = False) -> None:
        held = self._held.pop(name, None)
        if held is None:
            return
        held.worker.exchanges.discard(held.exchange)
        held.first_token.cancel()
        if held.unseen is not None:
            held.unseen.cancel()
        now_s = monotonic()
        if has_failed:
            held.placer.on_failed(held.placed, now_s)
            return
        if not held.has_begun:
            held.placer.on_first_byte(held.placed, now_s)
        held.placer.on_ended(held.placed, 0, now_s)
