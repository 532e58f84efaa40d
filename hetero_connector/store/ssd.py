"""Opening the SSD tier: its directory, its way to move bytes, and what its journal remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId, SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.journal_format import JournalRow
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


def adopt_journal(directory: SsdDirectory, tiers: Tiers) -> int:
    """Put every row of the journal into the index; returns how many.

    What a row continues may be missing: another engine's, which is not written here, or lost.
    Rows that contradict another are deleted from the journal, and so are checkpoints of which
    nothing else is left. Rows from before a reset are not even looked at: all of them go, once the
    I/O thread has begun.
    """
    journal = directory.journal
    if directory.is_outdated:
        logger.info("SSD tier %s: what was stored before a reset goes", directory.path)
        tiers.journal_stale = True
        return 0
    dropped: list[ArtifactId] = []
    adopted = []
    for row in journal.load():
        if _adopt(row, tiers):
            adopted.append(row)
        else:
            dropped.append(row.id)
    if dropped:
        logger.info("SSD tier %s: %d impossible artifacts dropped", directory.path, len(dropped))
        journal.forget(dropped)
    for row in sorted(adopted, key=lambda r: r.last_access):
        artifact = tiers.index.find(row.id)
        assert artifact is not None
        artifact.last_used, artifact.uses = tiers.tick(), row.reuse_count
    for node in list(tiers.index.nodes.values()):
        tiers.forget_remains(node)
    return len(adopted)


def _adopt(row: JournalRow, tiers: Tiers) -> bool:
    index = tiers.index
    if not index.could_hold(row.chunk) or index.find(row.id) is not None:
        return False
    ref = SlotRef(Tier.SSD, row.state_type, row.slot, row.generation)
    assert tiers.ssd is not None
    if not tiers.ssd.adopt(ref):
        return False
    index.presume_parent(row.chunk)
    artifact = index.add(row.chunk, row.state_type, row.size_bytes)
    artifact.checksum = row.checksum
    tiers.attach(artifact, ref)
    index.seal(artifact)
    return True
