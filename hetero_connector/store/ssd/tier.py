"""Opening the SSD tier: its directory, its way to move bytes, and what its journal remembers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId, ChunkKey, SlotRef, Tier
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.garbage import frozen_load
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal_format import CorruptJournalError, RowValues
from hetero_connector.transfer.base import FileTransfer
from hetero_connector.transfer.choose import choose_file_transfer
from hetero_connector.units import size_text

logger = logging.getLogger("vllm.heterocache")

OpenTransfer = Callable[[npt.NDArray[np.uint8], SsdDirectory], FileTransfer]
"""Makes the transfer between the arena's bytes and the directory's slab file."""
SLAB = 0
"""The transfer's only file."""


@dataclass(frozen=True)
class Ssd:
    """The files and the transfer of the SSD tier. Only the I/O thread uses it."""

    directory: SsdDirectory
    transfer: FileTransfer


def best_transfer(memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> FileTransfer:
    """Open NIXL where it works on this directory, else preadv, and log which."""
    chosen = choose_file_transfer(memory, directory.files, directory.path)
    logger.info("SSD tier %s uses %s: %s", directory.path, chosen.transfer.name, chosen.reason)
    return chosen.transfer


def load(directory: SsdDirectory, tiers: Tiers, transfer: FileTransfer) -> Ssd:
    """Add what the directory's journal lists to the tiers; `transfer` moves the bytes.

    Rows from before a reset are not read: the I/O thread deletes all of them when it starts.
    """
    if directory.is_outdated:
        logger.info("SSD tier %s: what was stored before a reset is deleted", directory.path)
        tiers.journal_stale = True
    else:
        adopt_journal(directory, tiers)
    return Ssd(directory, transfer)


def adopt_journal(directory: SsdDirectory, tiers: Tiers) -> None:
    """Put every row of the journal into the index.

    What a row continues may be missing: another engine's, which is not written here, or lost.
    Rows that contradict another are deleted from the journal, and so are, but in a fleet,
    checkpoints whose chunk has nothing else left.
    """
    journal = directory.journal
    with frozen_load(journal.count()):
        dropped = adopt_rows(journal.load_values(), tiers)
    try:
        if dropped:
            journal.forget(dropped)
    except CorruptJournalError:  # a damaged index shows when a row is deleted
        directory.replace_journal()
        tiers.clear()
    logger.info("SSD tier %s: %s", directory.path, _found(tiers, len(dropped)))


def _found(tiers: Tiers, num_dropped: int) -> str:
    """Say what was recovered, and what of the journal could not be."""
    (occupancy,) = (x for x in tiers.occupancy() if x.tier is Tier.SSD)
    artifacts = sum(occupancy.artifacts.values())
    chunks = (node.chunk for node in tiers.index.nodes.values() if node.artifacts)
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    size = size_text(sum(occupancy.bytes.values()))
    dropped = f"; {num_dropped:,} that contradict others were dropped" if num_dropped else ""
    if not artifacts:
        return f"nothing is stored yet{dropped}"
    return f"recovered {artifacts:,} artifacts, {tokens:,} tokens, {size}{dropped}"


def adopt_rows(rows: Iterable[RowValues], tiers: Tiers) -> list[ArtifactId]:
    """Put rows, parents first, into an empty SSD tier; return those that contradict another one.

    Two rows contradict each other if they name one chunk differently, or the same bytes. The fleet
    is not told here: an engine that joins one lists all it has.
    """
    pool, index = tiers.ssd, tiers.index
    assert pool is not None
    refused: list[ArtifactId] = []
    adopted: list[Artifact] = []
    used_at: list[float] = []
    for key, parent, start, end, kind, slot, generation, size, digest, when, uses in rows:
        ref = SlotRef(Tier.SSD, kind, slot, generation)
        artifact = None
        if pool.adopt(ref):
            artifact = index.adopt(ChunkKey(key), ChunkKey(parent), start, end, size, ref)
            if artifact is None:
                pool.release(ref)
        if artifact is None:
            refused.append(ArtifactId(ChunkKey(key), kind))
            continue
        artifact.checksum, artifact.uses = digest, uses
        adopted.append(artifact)
        used_at.append(when)
    tiers.newest_use_s = max(used_at, default=0.0)
    for at in np.argsort(used_at, kind="stable").tolist():
        adopted[at].last_used = tiers.tick()
    tiers.show_adopted(adopted)
    return refused
