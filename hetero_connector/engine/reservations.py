"""Slots that workers fill: reserved when the order is made, sealed once every rank has copied.

What is to become of them may be undecided until then, or for longer: a checkpoint that counts
only if its request ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_connector.store.base import Save, Store


@dataclass
class _Reserved:
    save: Save
    ranks_left: int
    """Tensor-parallel ranks that have not copied their share yet."""
    wanted: bool | None
    """Whether to seal it; None while that is undecided."""


class Reservations:
    """One engine's, by the id under which workers report them."""

    def __init__(self, store: Store, tp_size: int) -> None:
        self._store = store
        self._tp_size = tp_size
        self._reserved: dict[int, _Reserved] = {}
        self._latest_id = 0
        self._owed = 0

    @property
    def outstanding(self) -> bool:
        """Whether workers still owe a report."""
        return self._owed > 0

    def add(self, save: Save, wanted: bool | None) -> int:
        """Its id, from 1. `wanted`: None if that is for `decide` to say."""
        self._latest_id += 1
        self._reserved[self._latest_id] = _Reserved(save, self._tp_size, wanted)
        self._owed += 1
        return self._latest_id

    def reported(self, save_id: int, ranks: int) -> None:
        """`ranks` more ranks have copied their share."""
        reserved = self._reserved[save_id]
        reserved.ranks_left -= ranks
        if reserved.ranks_left <= 0:
            self._owed -= 1
            self._settle(save_id)

    def decide(self, save_id: int, *, wanted: bool) -> None:
        """What was undecided is to be sealed, or not."""
        self._reserved[save_id].wanted = wanted
        self._settle(save_id)

    def abandon(self, save_ids: Iterable[int]) -> None:
        """Nobody will copy them."""
        for save_id in save_ids:
            self._owed -= 1
            self._store.abandon_save(self._reserved.pop(save_id).save)

    def _settle(self, save_id: int) -> None:
        """Seal or drop what is copied and decided."""
        reserved = self._reserved[save_id]
        if reserved.ranks_left > 0 or reserved.wanted is None:
            return
        del self._reserved[save_id]
        if reserved.wanted:
            self._store.complete_save(reserved.save)
        else:
            self._store.abandon_save(reserved.save)
