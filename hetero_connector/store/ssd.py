"""Opening the SSD tier: its directory, its way to move bytes, and what its journal remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.garbage import frozen_load
from hetero_connector.store.ssd_directory import SsdDirectory
from hetero_connector.store.tiers import Tiers
from hetero_connector.transfer.base import FileTransfer
from hetero_connector.transfer.choose import choose_file_transfer

logger = logging.getLogger("vllm.heterocache")

OpenTransfer = Callable[[npt.NDArray[np.uint8], SsdDirectory], FileTransfer]
"""Makes the transfer between the arena's bytes and the directory's slab files."""


@dataclass(frozen=True)
class Ssd:
    """What the I/O thread needs to read and write slots. Only that thread uses it."""

    directory: SsdDirectory
    transfer: FileTransfer

    def file_of(self, state_type: StateType) -> int:
        """Which of the transfer's files is the slab of `state_type`."""
        return self.directory.file_of(state_type)


def best_transfer(memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> FileTransfer:
    """NIXL where it works on this directory, else preadv; says which in the log."""
    chosen = choose_file_transfer(memory, directory.files, directory.path)
    logger.info("SSD tier %s uses %s: %s", directory.path, chosen.transfer.name, chosen.reason)
    return chosen.transfer


def adopt_journal(directory: SsdDirectory, tiers: Tiers) -> None:
    """Put every row of the journal into the index.

    What a row continues may be missing: another engine's, which is not written here, or lost.
    Rows that contradict another are deleted from the journal, and so are checkpoints of which
    nothing else is left. Rows from before a reset are not even looked at: all of them go, once the
    I/O thread has begun.
    """
    journal = directory.journal
    if directory.is_outdated:
        logger.info("SSD tier %s: what was stored before a reset goes", directory.path)
        tiers.journal_stale = True
        return
    with frozen_load(journal.count()):
        dropped = tiers.adopt(journal.load_values())
    if dropped:
        logger.info("SSD tier %s: %d impossible artifacts dropped", directory.path, len(dropped))
        journal.forget(dropped)
