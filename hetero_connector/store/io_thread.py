"""The store's I/O thread: the only one to touch files, the journal and checksums.

Restores come first: a prefetch is started only while no read is queued or under way, a batch of
writes too, unless it has waited for a second. Both are small enough that a restore arriving
meanwhile does not wait long. Checksums, and with them what the fleet is shown, wait for no read.

Nothing here may wait for the disk: transfers are polled, and what may hang in the kernel (syncs,
the journal) is called beside this thread (`journal_rows`).
"""

from __future__ import annotations

import logging
import math
import threading
import time

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import Tier
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.peers.adopter import Adopter
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.reader import PeerReader
from hetero_connector.store.prefetch.prefetcher import Prefetcher
from hetero_connector.store.prefetch.weighing import PrefetchCosts
from hetero_connector.store.ssd.admission import Admission
from hetero_connector.store.ssd.journal_rows import JournalRows
from hetero_connector.store.ssd.reader import Reader, SizeOf
from hetero_connector.store.ssd.tier import Ssd
from hetero_connector.store.ssd.write_budget import WriteBudget
from hetero_connector.store.ssd.write_health import WriteHealth
from hetero_connector.store.ssd.writer import Spiller

logger = logging.getLogger("vllm.heterocache")

_MIN_POLL_S, _MAX_POLL_S = 20e-6, 2e-3
_IDLE_S = 1.0
_TOUCH_S = 30.0
_JOURNAL_CLOSE_S = 0.5
_PEER_CLOSE_S = 0.5
"""A peer that was stopped is not waited for."""


class IoThread:
    """Runs from `start` until `stop`. A daemon: an engine that dies without `stop` may exit."""

    def __init__(
        self,
        state: StoreState,
        memory: npt.NDArray[np.uint8],
        ssd: Ssd | None,
        prefetch_costs: PrefetchCosts,
        port: PeerPort | None = None,
        size_of: SizeOf | None = None,
    ) -> None:
        self._state = state
        self._ssd = ssd
        self._peer_reader = None if port is None else PeerReader(state, memory, port)
        self._adopter = None if port is None else Adopter(state, memory, port.peers)
        state.reads_peers = port is not None
        self._reader = Reader(state, memory, ssd, size_of)
        self._prefetcher = Prefetcher(state, self._reader, prefetch_costs)
        self._rows = JournalRows(state, None if ssd is None else ssd.directory)
        self._health = WriteHealth(state, None if ssd is None else ssd.directory.path)
        self._budget = self._open_budget()
        admission = Admission(self._budget, state.tiers.seconds_saved.in_prefills)
        self._spiller = Spiller(state, memory, ssd, self._rows, self._health, admission)
        self._thread = threading.Thread(target=self._run, name="heterocache-io", daemon=True)
        self._stop_by_s = float("inf")
        self._clean = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Fail pending restores, wait for transfers, close the files; within about `deadline_s`.

        False if a transfer or the thread would not end: the arena must then stay mapped.
        """
        state = self._state
        with state.lock:
            state.closing = True
            self._stop_by_s = state.clock() + deadline_s
            for load in list(state.loading.values()):
                state.disown(load, Failure.CLOSED)
                state.withdraw(load)
            state.lock.notify_all()
        self._thread.join(deadline_s + _IDLE_S)
        return not self._thread.is_alive() and self._clean

    def step(self) -> bool:
        """One round without waiting; True if anything moved. For this thread, or in its place."""
        state = self._state
        state.step_began_s = state.clock()
        expiring = self._expire()
        moved = self._reader.step() or expiring
        moved = self._reader.check_sample() or moved
        if self._peer_reader is not None:
            moved = self._peer_reader.step() or moved
        if self._adopter is not None:
            moved = self._adopter.step() or moved
        moved = self._spiller.step(self._reading) or moved
        may_start = not (self._reading or state.has_loads or state.closing) and state.ssd_readable
        moved = self._prefetcher.step(may_start) or moved
        state.step_began_s = math.inf
        return moved

    def _expire(self) -> bool:
        """What has a time to live: copies of what others own, and readers; whether more is due.

        A few at a time: the scheduler waits for the lock.
        """
        state = self._state
        is_left = False
        for mortal in (state.replicas, state.readers):
            if mortal.look_s <= state.clock():
                with state.lock:
                    is_left = mortal.expire() or is_left
        return is_left

    @property
    def _reading(self) -> bool:
        others = (self._peer_reader, self._adopter)
        return self._reader.active or any(x is not None and x.active for x in others)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # A bug: say so, and let the engine go on with what is in DRAM.
            logger.exception("The store's I/O thread ended; SSD is not used any more")
            self._give_up()
        finally:
            self._clean = self._close()

    def _serve(self) -> None:
        pause_s, touch_due_s = _MIN_POLL_S, self._state.clock() + _TOUCH_S
        while not self._finished():
            if self.step():
                pause_s = _MIN_POLL_S
            elif self._reading or self._spiller.active:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_POLL_S)
            else:
                self._wait()
            if self._state.clock() >= touch_due_s:
                touch_due_s = self._state.clock() + _TOUCH_S
                self._touch()

    def _finished(self) -> bool:
        state = self._state
        if not state.closing:
            return False
        busy = self._reading or self._spiller.active or state.has_loads
        return not busy or state.clock() >= self._stop_by_s

    def _wait(self) -> None:
        """Sleep until there is something to do, at most a second."""
        state = self._state
        with state.lock:
            state.refresh_gauges()
            if state.has_loads or state.closing or self._rows.due:
                return
            timeout_s = min(_IDLE_S, self._prefetcher.wake_s - state.clock())
            if self._spiller.waits_for_rows:
                timeout_s = min(timeout_s, self._rows.retry_s - state.clock())
            elif state.spills:
                due_s = 0.0 if state.flushing else state.spills.first.due_s
                timeout_s = min(timeout_s, due_s - state.clock())
            if timeout_s > 0:
                state.lock.wait(timeout_s)

    def _give_up(self) -> None:
        state = self._state
        with state.lock:
            state.io_alive = False
            state.ssd_writable = False
            state.ssd_readable = False
            state.stop_writing()
            state.spilling = 0
            state.fail(Failure.IO_ERROR, Tier.SSD)
            for load in list(state.loading.values()):
                state.disown(load, Failure.IO_ERROR)
                state.withdraw(load)
            state.publish_health()
            state.lock.notify_all()

    def _open_budget(self) -> WriteBudget | None:
        per_day = self._state.config.ssd_write_bytes_per_day
        if per_day is None:
            return None
        budget = WriteBudget(per_day, self._state.clock, time.time)
        self._rows.recall_budget(budget)
        return budget

    def _touch(self) -> None:
        self._spiller.ask_again()
        if self._peer_reader is not None:
            self._peer_reader.forget_ended()
        if self._budget is not None:
            self._state.recorder.set(
                "heterocache_ssd_written_24h_bytes", self._budget.spent_today_bytes
            )
        self._rows.touch(self._health.give_up)

    def _close(self) -> bool:
        closing = [x for x in (self._peer_reader, self._adopter) if x is not None]
        let_go = [x.close(_PEER_CLOSE_S) for x in closing]
        return self._close_ssd() and all(let_go)

    def _close_ssd(self) -> bool:
        if self._ssd is None:
            return True
        remaining_s = max(0.1, min(10.0, self._stop_by_s - self._state.clock()))
        if not self._ssd.transfer.close(remaining_s):
            return False  # the files stay open, and so must the arena
        remaining_s = max(_JOURNAL_CLOSE_S, min(10.0, self._stop_by_s - self._state.clock()))
        if not self._rows.close(remaining_s):
            logger.error("the disk does not answer; the SSD tier's files stay open until exit")
        return True
