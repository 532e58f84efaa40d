"""Slots that workers fill: reserved when the order is made, sealed once every rank has copied.

What is to become of them may be undecided until then, or for longer: a checkpoint that counts
only if its request ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetero_connector.store.base import Save, Store


@dataclass
class _Reserved:
    save: Save
    ranks_left: int
    """Tensor-parallel ranks that have not copied their share yet."""
    wanted: bool | None
    """Whether to seal it; None while that is undecided."""
    whole: bool = True
    """No rank has failed to copy its share."""


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

    def reported(self, save_id: int, ranks: int, *, copied: bool = True) -> None:
        """`ranks` more ranks are done with it, whether or not they `copied` their share."""
        reserved = self._reserved.get(save_id)
        if reserved is None or reserved.ranks_left <= 0:  # told twice
            return
        reserved.whole &= copied
        reserved.ranks_left -= ranks
        if reserved.ranks_left <= 0:
            self._owed -= 1
            self._settle(save_id)

    def decide(self, save_id: int, *, wanted: bool) -> None:
        """What was undecided is to be sealed, or not."""
        reserved = self._reserved.get(save_id)
        if reserved is not None:
            reserved.wanted = wanted
            self._settle(save_id)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Abandon what is added inside if an error comes up there: nobody was told of it."""
        latest = self._latest_id
        try:
            yield
        except Exception:
            self.abandon(range(latest + 1, self._latest_id + 1))
            raise

    def abandon(self, save_ids: Iterable[int]) -> None:
        """Nobody will copy them."""
        for save_id in save_ids:
            reserved = self._reserved.pop(save_id, None)
            if reserved is not None:
                self._owed -= reserved.ranks_left > 0
                self._store.abandon_save(reserved.save)

    def _settle(self, save_id: int) -> None:
        """Seal or drop what is copied and decided."""
        reserved = self._reserved[save_id]
        if reserved.ranks_left > 0 or reserved.wanted is None:
            return
        del self._reserved[save_id]
        if reserved.wanted and reserved.whole:
            self._store.complete_save(reserved.save)
        else:
            self._store.abandon_save(reserved.save)
