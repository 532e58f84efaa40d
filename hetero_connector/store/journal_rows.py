"""Keeping the journal in step with the index. Runs on the I/O thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hetero_connector.errors import StoreError
from hetero_connector.store.journal import Journal
from hetero_connector.store.journal_format import JournalRow
from hetero_connector.store.state import StoreState
from hetero_connector.store.write_budget import WriteBudget

_RETRY_S = 1.0
_BUDGET = "write_budget"


class JournalRows:
    """Deletes, adds and touches rows. With no journal (`None`) there is never anything to do."""

    def __init__(self, state: StoreState, journal: Journal | None) -> None:
        self._state = state
        self._journal = journal
        self.retry_s = 0.0
        """Until then `forget` waits after a failure."""

    @property
    def pending(self) -> bool:
        """Whether the journal still lists what the index has forgotten."""
        tiers = self._state.tiers
        return self._journal is not None and (bool(tiers.forgotten) or tiers.journal_stale)

    @property
    def due(self) -> bool:
        """Whether `forget` has something to do now: not while it waits after a failure."""
        return self.pending and self._state.clock() >= self.retry_s

    def forget(self) -> None:
        """Delete the rows of what the index has forgotten; then their slots are free.

        StoreError if the journal cannot; it is tried again a second later.
        """
        state, journal = self._state, self._journal
        if journal is None or not self.due:
            return
        with state.lock:
            gone, state.tiers.forgotten = state.tiers.forgotten, []
            stale, state.tiers.journal_stale = state.tiers.journal_stale, False
            generation = state.generation.tag
        try:
            if stale:
                journal.clear(generation)
            else:
                journal.forget([x.id for x in gone])
        except StoreError:
            self.retry_s = state.clock() + _RETRY_S
            with state.lock:
                state.tiers.forgotten[:0] = gone
                state.tiers.journal_stale |= stale
            raise
        with state.lock:
            assert state.tiers.ssd is not None
            for item in gone:
                state.tiers.ssd.give_back(item.ref)
            state.lock.notify_all()

    def record(self, rows: Sequence[JournalRow]) -> None:
        """Add rows; their bytes must be down. StoreError if the journal cannot."""
        assert self._journal is not None
        self._journal.record(rows)

    def note_budget(self, budget: WriteBudget | None) -> None:
        """Keep what is left of the write budget for the next engine. StoreError if it cannot."""
        if budget is not None and self._journal is not None:
            self._journal.note(_BUDGET, budget.dump())

    def recall_budget(self, budget: WriteBudget | None) -> None:
        """Go on with what the last engine left of it. StoreError if the journal cannot say."""
        if budget is not None and self._journal is not None:
            noted = self._journal.noted(_BUDGET)
            if noted is not None:
                budget.load(noted)

    def touch(self) -> None:
        """Note what was used since the last time, for the order of eviction after a restart."""
        state = self._state
        with state.lock:
            used = {a: None for restored in state.used for a in restored}
            state.used.clear()
            rows = [(a.id, a.last_used, a.uses) for a in used if a.ssd and not a.forgotten]
        if not rows or self._journal is None or not state.ssd_writable:
            return
        rows.sort(key=lambda row: row[1])
        now = time.time()
        self._journal.touch([(x, now + i * 1e-6, uses) for i, (x, _, uses) in enumerate(rows)])
