"""Requests that another proxy sends: placed here, counted here, until it tells of their end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from ownership.router.placer import Placed, Placer
from ownership.router.proxy import Proxy
from ownership.router.requests import RouterRequest
from ownership.router.workers import Exchange, Worker

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Reservation:
    placed: Placed
    exchange: Exchange
    lease: asyncio.TimerHandle
    output_tokens: int = 0
    has_answered: bool = False


class Reservations:
    """The requests under way of other proxies, by the name that they give. Used on the event loop.

    A reservation counts as a request that the router itself has sent. It is freed when its proxy
    says so, or `lease_s` after the last that was told of it.
    """

    def __init__(self, proxy: Proxy, placer: Placer, lease_s: float) -> None:
        self._proxy, self._placer, self._lease_s = proxy, placer, lease_s
        self._held: dict[str, _Reservation] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    async def place(self, request: RouterRequest, excluded: Sequence[Worker] = ()) -> Placed:
        """Choose one worker, and count nothing. Raises RefusedError."""
        request.is_whole = True
        return await self._proxy.place(request, excluded)

    def reserve(self, name: str, placed: Placed) -> None:
        """Count a request at its worker. Call it in the same step of the event loop in which it was
        placed. Raises KeyError if the name is in use."""
        if name in self._held:
            raise KeyError(name)
        now_s = monotonic()
        # Nothing of the worker's is seen here, so it is not given up for silence.
        exchange = Exchange(asyncio.timeout(None), math.inf)
        placed.worker.exchanges.add(exchange)
        self._held[name] = _Reservation(placed, exchange, self._lease(name))
        self._placer.on_sent(placed, now_s)

    def answered(self, name: str, output_tokens: int = 0) -> None:
        """The worker has computed the prompt, and so many more tokens. Raises KeyError."""
        held = self._held[name]
        held.lease.cancel()
        held.lease = self._lease(name)
        held.output_tokens += output_tokens
        if not held.has_answered:
            held.has_answered = True
            self._placer.on_first_byte(held.placed, monotonic())

    def free(self, name: str) -> None:
        """The request has ended. Raises KeyError."""
        held = self._held.pop(name)
        held.lease.cancel()
        held.placed.worker.exchanges.discard(held.exchange)
        held.placed.request.is_stream = held.output_tokens > 0
        self._placer.on_ended(held.placed, held.output_tokens, monotonic())
        self._proxy.released()

    def close(self) -> None:
        """Free all."""
        for name in list(self._held):
            self.free(name)

    def _lease(self, name: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._lease_s, self._lapse, name)

    def _lapse(self, name: str) -> None:
        _log.warning(
            "reservation %r was freed: nothing was told of it for %g s", name, self._lease_s
        )
        self.free(name)
