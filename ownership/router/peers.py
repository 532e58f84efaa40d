"""Keeps a router's ledger and those of its peers alike, by messages in the directory's Redis."""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING

from hetero_connector.errors import DirectoryError
from ownership.router.metrics import RouterMetrics
from ownership.router.shared_ledger import SharedLedger
from ownership.scheduling import FleetView, LedgerLimits

if TYPE_CHECKING:
    from ownership.directory.redis import RedisMessageLog

_PERIOD_S = 0.02
"""Seconds between two exchanges: two routers differ by what was sent in so long."""

_log = logging.getLogger(__name__)


class Peers:
    """The other routers of a fleet. Used on the event loop; Redis is asked on another thread."""

    def __init__(self, log: RedisMessageLog, metrics: RouterMetrics) -> None:
        self._messages, self._metrics = log, metrics
        self._thread = ThreadPoolExecutor(1, "router-peers")
        self._ledger: SharedLedger | None = None
        self._cursor = "0-0"
        self._problem = ""

    def open_ledger(self, fleet: FleetView, limits: LedgerLimits) -> SharedLedger:
        """Return the ledger that is shared from now on."""
        self._ledger = SharedLedger(secrets.token_hex(8), fleet, limits)
        return self._ledger

    async def run(self) -> None:
        """Exchange messages until the task is cancelled."""
        while True:
            if self._ledger is not None:
                try:
                    while await self._exchange(self._ledger):
                        pass
                except Exception:  # messages of an unknown kind must not end the exchange
                    _log.exception("messages of other routers are left out")
                self._metrics.peers.set(self._ledger.num_peers)
                self._metrics.peer_requests.set(self._ledger.num_peer_requests)
            await asyncio.sleep(_PERIOD_S)

    async def close(self) -> None:
        """Send what has ended, and close the connections."""
        if self._ledger is not None:
            await self._exchange(self._ledger)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._messages.close()

    async def _exchange(self, ledger: SharedLedger) -> bool:
        """Exchange once. Returns True if there are more messages to read."""
        message, asking = ledger.take_message(monotonic()), asyncio.get_running_loop()
        try:
            found = await asking.run_in_executor(
                self._thread, self._messages.exchange, message, self._cursor
            )
        except DirectoryError as error:
            ledger.on_lost(monotonic())
            self._tell(str(error))
            return False
        self._tell("")
        self._cursor, now_s = found.cursor, monotonic()
        for sent in found.messages:
            ledger.take_in(sent.content, now_s - sent.age_s, now_s)
        ledger.on_exchanged(now_s)
        return found.has_more

    def _tell(self, problem: str) -> None:
        """Log that messages are exchanged, or not, when that changes."""
        if bool(problem) != bool(self._problem):
            if problem:
                _log.warning("other routers are not heard: %s", problem)
            else:
                _log.info("other routers are heard again")
        self._problem = problem
