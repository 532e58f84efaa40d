"""Requests that another proxy sends: placed here, counted here, until it tells of their end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Container
from contextlib import ExitStack
from time import monotonic

from ownership.router.placer import Placed, Placer
from ownership.router.proxy import Proxy
from ownership.router.requests import RouterRequest
from ownership.router.workers import Worker

_log = logging.getLogger(__name__)


class Reservation:
    """One request, counted as one that the router itself has sent.

    Make it in the same step of the event loop in which the request was placed.
    """

    def __init__(self, proxy: Proxy, placer: Placer, placed: Placed) -> None:
        self._placer, self._placed = placer, placed
        self._counted = ExitStack()
        exchange = self._counted.enter_context(proxy.under_way(placed.worker))
        self.sent_s = exchange.sent_s
        # Nothing of the worker's is seen here, so it is not given up for silence.
        exchange.heard_s = math.inf
        self.output_tokens = 0
        self._has_answered = False
        placer.on_sent(placed, self.sent_s)

    def answered(self, output_tokens: int = 0) -> None:
        """The worker has computed the prompt, and so many more tokens."""
        self.output_tokens += output_tokens
        if not self._has_answered:
            self._has_answered = True
            self._placer.on_first_byte(self._placed, monotonic())

    def free(self, *, has_failed: bool = False) -> None:
        """The request has ended. `has_failed`: the worker did not serve it."""
        self._counted.close()
        if has_failed:
            self._placer.on_failed(self._placed, monotonic())
        else:
            self._placer.on_ended(self._placed, self.output_tokens, monotonic())


class _Lease:
    """A reservation, and the timer that frees it."""

    def __init__(self, placed: Placed, reservation: Reservation, end: asyncio.TimerHandle) -> None:
        self.placed, self.reservation, self.end = placed, reservation, end


class Reservations:
    """The requests under way of other proxies, by the name that they give. Used on the event loop.

    A reservation is freed when its proxy says so, or `lease_s` after the last that was told of it.
    """

    def __init__(self, proxy: Proxy, placer: Placer, lease_s: float) -> None:
        self._proxy, self._placer, self._lease_s = proxy, placer, lease_s
        self._held: dict[str, _Lease] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    async def place(self, request: RouterRequest, excluded: Container[Worker] = ()) -> Placed:
        """Choose one worker, and count nothing. Raises RefusedError."""
        request.is_whole = True
        return await self._proxy.place(request, excluded)

    def reserve(self, name: str, placed: Placed) -> None:
        """Count a request at its worker. Call it in the same step of the event loop in which it was
        placed. Raises KeyError if the name is in use."""
        if name in self._held:
            raise KeyError(name)
        reservation = Reservation(self._proxy, self._placer, placed)
        self._held[name] = _Lease(placed, reservation, self._end(name))

    def answered(self, name: str, output_tokens: int = 0) -> None:
        """The worker has computed the prompt, and so many more tokens. Raises KeyError.

        So it serves: after a pause this may be the one request that tries again.
        """
        held = self._held[name]
        held.end.cancel()
        held.end = self._end(name)
        held.placed.worker.breaker.on_success()
        held.reservation.answered(output_tokens)

    def free(self, name: str) -> None:
        """The request has ended. Raises KeyError."""
        held = self._held.pop(name)
        held.end.cancel()
        held.placed.request.is_stream = held.reservation.output_tokens > 0
        held.reservation.free()

    def close(self) -> None:
        """Free all."""
        for name in list(self._held):
            self.free(name)

    def _end(self, name: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._lease_s, self._lapse, name)

    def _lapse(self, name: str) -> None:
        _log.warning(
            "reservation %r was freed: nothing was told of it for %g s", name, self._lease_s
        )
        self.free(name)
