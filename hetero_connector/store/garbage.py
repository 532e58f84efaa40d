"""Keeping a big index out of Python's garbage collections.

A full collection looks at every object that may refer to others, and no thread runs meanwhile: a
second and more for the millions of objects of a big tier's index, none of which it can ever free,
for whatever the index forgets is not part of a cycle. vLLM freezes its heap once, at its start,
for the same reason; what is loaded later or grows while serving has to be frozen as well.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_connector.store.catalog.index import PrefixIndex

BIG = 16_384
"""Chunks. What is smaller is looked at in a few milliseconds."""
_GROWTH = 4_096
"""Chunks that are added between two freezes."""


@contextmanager
def frozen_load(num_chunks: int) -> Iterator[None]:
    """Freeze what is made inside, if that is a big index; nothing is collected meanwhile."""
    was_enabled = gc.isenabled()
    if num_chunks < BIG or not was_enabled:
        yield
        return
    gc.collect()  # what is garbage by now would be kept for good
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


class Freezer:
    """Freezes the heap after full collections, whenever a big index has grown.

    What survives a full collection was in use a moment ago, so hardly any garbage is kept: what
    was in flight, is part of a cycle and has ended since. Objects without cycles are freed as
    ever.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._frozen_at = index.num_added

    def start(self) -> None:
        """Hear of collections until `stop`."""
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Hear of no more. Call it once after `start`."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        index = self._index
        grown = len(index.nodes) >= BIG and index.num_added - self._frozen_at >= _GROWTH
        if phase == "stop" and info["generation"] == 2 and grown:
            self._frozen_at = index.num_added
            gc.freeze()
