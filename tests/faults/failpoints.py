"""Named moments at which an artifact changes state, where a round can stop the machine.

The package knows nothing of them: they are its own methods, wrapped while a round runs. A method
that gets another name fails here at once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

_STORE = "hetero_connector.store"
POINTS: Mapping[str, str] = {
    "index.add": f"{_STORE}.catalog.index:PrefixIndex.add",
    "index.seal": f"{_STORE}.catalog.index:PrefixIndex.seal",
    "index.remove": f"{_STORE}.catalog.index:PrefixIndex.remove",
    "slot.take": f"{_STORE}.catalog.slots:SlotPool.take",
    "slot.release": f"{_STORE}.catalog.slots:SlotPool.release",
    "slot.adopt": f"{_STORE}.catalog.slots:SlotPool.adopt",
    "artifact.attach": f"{_STORE}.catalog.tiers:Tiers.attach",
    "artifact.drop": f"{_STORE}.catalog.tiers:Tiers.drop",
    "artifact.forget": f"{_STORE}.catalog.tiers:Tiers.forget",
    "artifact.lose": f"{_STORE}.catalog.tiers:Tiers.lose",
    "artifact.export": f"{_STORE}.catalog.writes:Writes.finish_sums",
    "generation.write": f"{_STORE}.ssd.generation_file:GenerationFile.write",
    "generation.kept": f"{_STORE}.ssd.generation_file:GenerationKeeper.wait_kept",
    "tiers.clear": f"{_STORE}.catalog.tiers:Tiers.clear",
    "load.begin": f"{_STORE}.catalog.loads:Loads.begin",
    "load.settle": f"{_STORE}.catalog.loads:Loads._settle",
    "slab.submit": "tests.faults.slabs:FaultyFiles.submit",
    "slab.sync": f"{_STORE}.ssd.directory:SsdDirectory.sync",
    "journal.record": f"{_STORE}.ssd.journal:Journal.record",
    "journal.forget": f"{_STORE}.ssd.journal:Journal.forget",
    "journal.clear": f"{_STORE}.ssd.journal:Journal.clear",
    "journal.touch": f"{_STORE}.ssd.journal:Journal.touch",
    "journal.load": f"{_STORE}.ssd.journal:Journal.load_values",
}
"""By name, the method: before and after each call is a moment."""
MOMENTS = tuple(f"{when} {name}" for name in POINTS for when in ("before", "after"))


class Failpoints:
    """Calls `act` when the chosen moment comes for the chosen time."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self._chosen: tuple[str, int, Callable[[], None]] | None = None

    def choose(self, moment: str, ahead: int, act: Callable[[], None]) -> None:
        """Have `act` called at the moment's next occurrence, or at that many after it."""
        self._chosen = (moment, self.reached[moment] + ahead, act)

    def clear(self) -> None:
        """Choose none."""
        self._chosen = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the methods. For one round at a time."""
        with ExitStack() as undo:
            for name, where in POINTS.items():
                module, _, path = where.partition(":")
                owner, _, method = path.partition(".")
                cls = getattr(importlib.import_module(module), owner)
                undo.enter_context(patch.object(cls, method, self._wrap(name, vars(cls)[method])))
            yield

    def _reach(self, moment: str) -> None:
        chosen = self._chosen
        if chosen is not None and chosen[:2] == (moment, self.reached[moment]):
            self._chosen = None
            chosen[2]()
        self.reached[moment] += 1

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        before, after = f"before {name}", f"after {name}"

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._reach(before)
            result = call(*args, **kwargs)
            self._reach(after)
            return result

        return wrapped
