"""Keeping the journal in step with the catalog.

SQLite may wait for the disk without end. So each call runs on a thread of its own, one at a time,
and the I/O thread takes its outcome when it has ended: until then restores are served.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StoreError
from hetero_connector.store.catalog.catalog import Catalog, RowsToForget
from hetero_connector.store.catalog.write_budget import WriteBudget
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow

logger = logging.getLogger("vllm.heterocache")

_RETRY_S = 1.0
_BUDGET = "write_budget"
_PATIENCE_S = 0.005
"""The I/O thread waits so long for a call if there is nothing to read meanwhile."""

Ended = Callable[[Exception | None], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Call:
    future: Future[None]
    began_s: float
    ended: Ended


class JournalRows:
    """Deletes, adds and touches rows. Used by the I/O thread."""

    def __init__(self, catalog: Catalog, directory: SsdDirectory) -> None:
        self._catalog = catalog
        self.directory = directory
        self._call: _Call | None = None
        self._newest_use_s = catalog.tiers.newest_use_s
        self._retry_s = 0.0
        """After a failure `forget` waits until then."""
        self._touch_later: Callable[[], None] | None = None
        """Begins the `touch` that another call kept from beginning."""

    @property
    def is_pending(self) -> bool:
        """Return whether the journal still lists what was forgotten.

        Nothing is written meanwhile: a row that should be gone may name an artifact that was saved
        again since, whose new row must not be there yet when the old one is deleted.
        """
        return self._catalog.has_rows_to_forget

    @property
    def due_s(self) -> float:
        """Clock time at which `forget` has something to do; infinite if it has nothing."""
        return self._retry_s if self.is_pending and not self.is_busy else math.inf

    @property
    def is_busy(self) -> bool:
        """Return whether a call has not ended: no other may begin."""
        return self._call is not None

    @property
    def began_s(self) -> float:
        """Return the clock when the present call began; infinite without one."""
        return math.inf if self._call is None else self._call.began_s

    def poll(self, *, patiently: bool) -> bool:
        """Take the outcome of a call that has ended; return whether one has.

        `patiently`: wait some milliseconds for it.
        """
        call = self._call
        timeout_s = _PATIENCE_S if patiently else 0.0
        if call is None or not wait([call.future], timeout_s).done:
            return False
        self._call = None
        error = call.future.exception()
        if error is not None and not isinstance(error, StoreError | OSError):
            raise error
        call.ended(error)
        touch, self._touch_later = self._touch_later, None
        if touch is not None:
            touch()
        return True

    def forget(self, ended: Ended) -> None:
        """Delete the rows of what was forgotten; then their slots may be written.

        After an error it is tried again a second later.
        """
        self._forget(ended, lambda directory: None)

    def prepare(self, ended: Ended, budget: WriteBudget | None) -> None:
        """`forget`, then check that the directory is ours alone, and note the budget's rest.

        Before a write, so that one that is cut short by a kill counts too.
        """
        note = None if budget is None else budget.dump()

        def make_sure(directory: SsdDirectory) -> None:
            directory.check_owner()
            if note is not None:
                directory.journal.note(_BUDGET, note)

        self._forget(ended, make_sure)

    def stamp_use(self) -> float:
        """Return the Unix time of a use now, later than every other in the journal.

        So the order of eviction after a restart is that of use, though the clock was set back.
        """
        after = math.nextafter(self._newest_use_s, math.inf)
        self._newest_use_s = max(time.time(), after)
        return self._newest_use_s

    def record(self, rows: Sequence[JournalRow], ended: Ended) -> None:
        """Sync the slab, then add rows. Their bytes must have been written."""
        directory = self.directory

        def call() -> None:
            directory.sync()
            directory.journal.record(rows)

        self._begin(call, ended)

    def touch(self, on_lost: Callable[[str], None]) -> None:
        """Note what was used since the last time, for the order of eviction after a restart.

        `on_lost` is called with the reason why the next engine would not find the files. While
        another call is under way it begins when that one has ended.
        """
        if self.is_busy:
            self._touch_later = partial(self.touch, on_lost)
            return
        directory, rows, reasons = self.directory, self._take_used(), list[str]()

        def call() -> None:
            reason = directory.why_lost()
            if reason is not None:
                reasons.append(reason)
            directory.mark_used()
            _touch(directory.journal, rows)

        def ended(error: Exception | None) -> None:
            for reason in reasons:
                on_lost(reason)
            if error is not None:
                logger.warning("the order of use was not noted: %s", error)

        self._begin(call, ended)

    def recall_budget(self, budget: WriteBudget) -> None:
        """Go on with what the last engine left of it. StoreError if the journal cannot say."""
        noted = self.directory.journal.noted(_BUDGET)
        if noted is not None:
            budget.load(noted)

    def close(self, timeout_s: float) -> bool:
        """Note the latest changes and close the directory.

        False if the disk does not answer in time: then it stays open, and locked.
        """
        self._touch_later = None
        if self._call is not None:
            wait([self._call.future], timeout_s)
            if not self.poll(patiently=False):
                return False
        directory = self.directory
        used, rows = self._take_used(), self._catalog.take_rows_to_forget()

        def call() -> None:
            try:
                _touch(directory.journal, used)
                _forget(directory.journal, rows)
            except StoreError as e:
                # Worth a line, not a failure: nothing was written over what a row too many lists,
                # and a clearing has said that it was not kept.
                logger.warning("the journal lacks the latest changes: %s", e)
            directory.close()

        ended = in_background(call)
        if not wait([ended], timeout_s).done:
            return False
        error = ended.exception()
        if error is not None:
            logger.error("SSD tier %s was not closed cleanly: %s", directory.path, error)
        return True

    def _forget(self, ended: Ended, then: Callable[[SsdDirectory], None]) -> None:
        directory, rows = self.directory, self._catalog.take_rows_to_forget()

        def call() -> None:
            _forget(directory.journal, rows)
            then(directory)

        def on_end(error: Exception | None) -> None:
            self._catalog.finish_rows(rows, are_gone=error is None)
            if error is not None:
                self._retry_s = self._catalog.clock() + _RETRY_S
            ended(error)

        self._begin(call, on_end)

    def _begin(self, call: Callable[[], None], ended: Ended) -> None:
        assert self._call is None, "one call at a time"
        self._call = _Call(in_background(call), self._catalog.clock(), ended)

    def _take_used(self) -> list[tuple[ArtifactId, float, int]]:
        return [(x, self.stamp_use(), uses) for x, uses in self._catalog.take_used()]


def _forget(journal: Journal, rows: RowsToForget) -> None:
    if rows.cleared_for is not None:
        journal.clear(rows.cleared_for)
    elif rows.ids:
        journal.forget(rows.ids)


def _touch(journal: Journal, used: Sequence[tuple[ArtifactId, float, int]]) -> None:
    if used:
        journal.touch(used)


def in_background(call: Callable[[], Result]) -> Future[Result]:
    """Make the call on a daemon: one that never ends does not keep the process from exiting."""
    ended = Future[Result]()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(result)

    threading.Thread(target=run, name="heterocache-sync", daemon=True).start()
    return ended
