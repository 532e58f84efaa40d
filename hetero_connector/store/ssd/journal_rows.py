"""Keeping the journal in step with the index. Runs on the I/O thread.

SQLite may wait for the disk without end. So each call is made beside the I/O thread, one at a time,
and its outcome is taken when it has ended: until then restores are served, and DRAM is as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StoreError
from hetero_connector.store.catalog.jobs import Forgotten
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.ssd.background import in_background
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.write_budget import WriteBudget

logger = logging.getLogger("vllm.heterocache")

_RETRY_S = 1.0
_BUDGET = "write_budget"
_PATIENCE_S = 0.005
"""How long the I/O thread waits for a call when there is nothing to read meanwhile."""

Ended = Callable[[Exception | None], None]


@dataclass(frozen=True)
class _Call:
    future: Future[None]
    began_s: float
    ended: Ended


class JournalRows:
    """Deletes, adds and touches rows. With no directory (`None`) there is never anything to do."""

    def __init__(self, state: StoreState, directory: SsdDirectory | None) -> None:
        self._state = state
        self._directory = directory
        self._journal = None if directory is None else directory.journal
        self._call: _Call | None = None
        self._forgetting = False
        self.retry_s = 0.0
        """Until then `forget` waits after a failure."""

    @property
    def pending(self) -> bool:
        """Whether the journal still lists what the index has forgotten."""
        tiers = self._state.tiers
        if self._journal is None:
            return False
        return bool(tiers.forgotten) or tiers.journal_stale or self._forgetting

    @property
    def due(self) -> bool:
        """Whether `forget` has something to do now: not while it waits after a failure."""
        return self.pending and not self.busy and self._state.clock() >= self.retry_s

    @property
    def busy(self) -> bool:
        """Return whether a call has not ended: no other may begin."""
        return self._call is not None

    @property
    def seconds(self) -> float:
        """How long the present call has lasted."""
        return 0.0 if self._call is None else self._state.clock() - self._call.began_s

    def poll(self, *, patiently: bool) -> bool:
        """Take the outcome of a call that has ended; True if one has."""
        call = self._call
        timeout_s = _PATIENCE_S if patiently else 0.0
        if call is None or not wait([call.future], timeout_s).done:
            return False
        self._call = None
        error = call.future.exception()
        if error is not None and not isinstance(error, StoreError | OSError):
            raise error
        call.ended(error)
        return True

    def forget(self, failed: Callable[[Exception], None]) -> None:
        """Delete the rows of what the index has forgotten; then their slots are free.

        `failed`: told if the journal cannot; it is tried again a second later.
        """
        self._forget(failed, lambda directory: None)

    def prepare(self, failed: Callable[[Exception], None], budget: WriteBudget | None) -> None:
        """`forget`, then make sure that the directory is ours alone, and note the budget's rest.

        Before a write, so that one cut short by a kill counts, too.
        """
        note = None if budget is None else budget.dump()

        def make_sure(directory: SsdDirectory) -> None:
            directory.check_owner()
            if note is not None:
                directory.journal.note(_BUDGET, note)

        self._forget(failed, make_sure)

    def _forget(
        self, failed: Callable[[Exception], None], then: Callable[[SsdDirectory], None]
    ) -> None:
        state, directory = self._state, self._directory
        assert directory is not None
        gone, cleared_for = self._take_forgotten()

        def call() -> None:
            _forget(directory.journal, gone, cleared_for)
            then(directory)

        def ended(error: Exception | None) -> None:
            self._forgetting = False
            with state.lock:
                if error is None:
                    assert state.tiers.ssd is not None
                    for item in gone:
                        state.tiers.ssd.give_back(item.ref)
                    state.lock.notify_all()
                else:
                    self.retry_s = state.clock() + _RETRY_S
                    state.tiers.forgotten[:0] = gone
                    state.tiers.journal_stale |= cleared_for is not None
            if error is not None:
                failed(error)

        self._forgetting = True
        self._begin(call, ended)

    def record(self, rows: Sequence[JournalRow], ended: Ended) -> None:
        """Sync the slabs, then add rows. Their bytes must have been written."""
        directory, journal = self._directory, self._journal
        assert directory is not None
        assert journal is not None

        def call() -> None:
            directory.sync()
            journal.record(rows)

        self._begin(call, ended)

    def touch(self, lost: Callable[[str], None]) -> None:
        """Note what was used since the last time, for the order of eviction after a restart.

        `lost`: told why the next engine would not find the files. Without effect while another
        call is under way.
        """
        directory, journal = self._directory, self._journal
        if directory is None or journal is None or self.busy:
            return
        rows, reasons = self._take_used(), list[str]()

        def call() -> None:
            reason = directory.why_lost()
            if reason is not None:
                reasons.append(reason)
            _touch(journal, rows)

        def ended(error: Exception | None) -> None:
            for reason in reasons:
                lost(reason)
            if error is not None:
                logger.warning("the order of use was not noted: %s", error)

        self._begin(call, ended)

    def recall_budget(self, budget: WriteBudget | None) -> None:
        """Go on with what the last engine left of it. StoreError if the journal cannot say."""
        if budget is not None and self._journal is not None:
            noted = self._journal.noted(_BUDGET)
            if noted is not None:
                budget.load(noted)

    def close(self, timeout_s: float) -> bool:
        """Note the latest changes and close the directory.

        False if the disk does not answer in time: then it stays open, and locked.
        """
        directory, journal = self._directory, self._journal
        if directory is None or journal is None:
            return True
        if self._call is not None:
            wait([self._call.future], timeout_s)
            if not self.poll(patiently=False):
                return False
        used = self._take_used()
        gone, cleared_for = self._take_forgotten()

        def call() -> None:
            try:
                _touch(journal, used)
                _forget(journal, gone, cleared_for)
            except StoreError as e:
                # Worth a line, not a failure: a row too many is found out by its checksum.
                logger.warning("the journal lacks the latest changes: %s", e)
            directory.close()

        ended = in_background(call)
        if not wait([ended], timeout_s).done:
            return False
        error = ended.exception()
        if error is not None:
            logger.error("SSD tier %s was not closed cleanly: %s", directory.path, error)
        return True

    def _begin(self, call: Callable[[], None], ended: Ended) -> None:
        assert self._call is None, "one call at a time"
        self._call = _Call(in_background(call), self._state.clock(), ended)

    def _take_forgotten(self) -> tuple[list[Forgotten], bytes | None]:
        """What the index has forgotten; the generation to clear the whole journal for, if so."""
        tiers = self._state.tiers
        with self._state.lock:
            gone, tiers.forgotten = tiers.forgotten, []
            stale, tiers.journal_stale = tiers.journal_stale, False
            return gone, self._state.generation.tag if stale else None

    def _take_used(self) -> list[tuple[ArtifactId, float, int]]:
        state = self._state
        with state.lock:
            used = [(a.last_used, a.id, a.uses) for a in state.used if a.ssd]
            state.used.clear()
            if not state.ssd_writable:
                return []
        used.sort(key=lambda row: row[0])
        now = time.time()
        return [(x, now + i * 1e-6, uses) for i, (_, x, uses) in enumerate(used)]


def _forget(journal: Journal, gone: Sequence[Forgotten], cleared_for: bytes | None) -> None:
    if cleared_for is not None:
        journal.clear(cleared_for)
    elif gone:
        journal.forget([x.id for x in gone])


def _touch(journal: Journal, used: Sequence[tuple[ArtifactId, float, int]]) -> None:
    if used:
        journal.touch(used)
