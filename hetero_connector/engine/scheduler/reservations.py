"""Reservations in the store that workers fill: sealed when every rank has copied its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Save


class Verdict(Enum):
    """The decision about a reservation, carried out when every rank has copied."""

    SEAL = "seal"
    DROP = "drop"
    UNDECIDED = "undecided"


@dataclass
class _Reserved:
    """A reservation in the store that workers fill."""

    save: Save
    ranks_left: int
    """Ranks of all pipeline stages that have not copied their share yet."""
    verdict: Verdict
    whole: bool = True
    """False once a rank could not copy its share."""


class Reservations:
    """Reservations of one engine by save id. Sealed when every rank has copied its share."""

    def __init__(self, store: ArtifactStore, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._reserved: dict[int, _Reserved] = {}
        self._latest_id = 0
        self._unreported = 0

    @property
    def awaits_reports(self) -> bool:
        """True while workers have saves that they have not reported."""
        return self._unreported > 0

    def add(self, save: Save, verdict: Verdict) -> int:
        """Add a reservation and return its id, from 1."""
        self._latest_id += 1
        self._reserved[self._latest_id] = _Reserved(save, self._num_ranks, verdict)
        self._unreported += 1
        return self._latest_id

    def on_report(self, save_id: int, ranks: int, *, copied: bool = True) -> None:
        """Count `ranks` more ranks that are done; `copied`: their share is in the arena."""
        reserved = self._reserved.get(save_id)
        if reserved is None or reserved.ranks_left <= 0:  # reported twice
            return
        reserved.whole &= copied
        reserved.ranks_left -= ranks
        if reserved.ranks_left <= 0:
            self._unreported -= 1
            self._settle(save_id)

    def distrust(self) -> None:
        """Seal none of the present reservations: their pages may not hold what they should."""
        for reserved in self._reserved.values():
            reserved.whole = False

    def decide(self, save_id: int, verdict: Verdict) -> None:
        """Decide about an undecided reservation."""
        reserved = self._reserved.get(save_id)
        if reserved is not None:
            reserved.verdict = verdict
            self._settle(save_id)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Abandon reservations added inside if an error is raised: no worker knows of them."""
        latest = self._latest_id
        try:
            yield
        except Exception:
            self.abandon(range(latest + 1, self._latest_id + 1))
            raise

    def abandon(self, save_ids: Iterable[int]) -> None:
        """Give reservations up that no worker will copy."""
        for save_id in save_ids:
            reserved = self._reserved.pop(save_id, None)
            if reserved is not None:
                self._unreported -= reserved.ranks_left > 0
                self._store.abandon_save(reserved.save)

    def _settle(self, save_id: int) -> None:
        """Seal or abandon the reservation if it is copied and decided."""
        reserved = self._reserved[save_id]
        if reserved.ranks_left > 0 or reserved.verdict is Verdict.UNDECIDED:
            return
        del self._reserved[save_id]
        if reserved.verdict is Verdict.SEAL and reserved.whole:
            self._store.complete_save(reserved.save)
        else:
            self._store.abandon_save(reserved.save)
