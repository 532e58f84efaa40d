"""Write-back: sealed artifacts on their way to a checksum, to the fleet and to SSD.

A private part of `Catalog`, which holds the lock. The order is always parents first: a restart
finds nothing that continues what it lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.admission import (
    Admission,
    could_be_written,
    deepest_on_ssd,
    parent_is_there,
    waits_for_parent,
)
from hetero_connector.store.catalog.artifact_queue import ArtifactQueue
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.tiers import Tiers

logger = logging.getLogger("vllm.heterocache")

_BATCH_BYTES = 16 << 20
"""Written at once. A restore that comes in between waits for so much at most."""
_BATCH_BYTES_WHILE_READING = 4 << 20
"""Summed at once while reads go on: half a millisecond in which none is polled."""
_DRAM_SHARE = 4
"""A batch takes a quarter of the DRAM slots at most: a write that never ends keeps them."""
_RETRY_S = 1.0
_CLAIM_PATIENCE_S = 1.0
"""An unanswered claim delays a write so long at most."""
_MAX_WAIT_S = 1.0
"""A write that is due waits so long for reads."""
_MAX_SUSPECTS = 4
"""If more chunks fail one after another, each by itself, that is the disk and not their places."""


@dataclass(frozen=True)
class Pending:
    """A sealed artifact that waits for its write."""

    artifact: Artifact
    due_s: float
    """Clock time before which the write need not start."""


@dataclass(frozen=True, eq=False)
class Write:
    """An artifact to be written to SSD, and its slots: both are protected until it is finished."""

    artifact: Artifact
    source: SlotRef
    target: SlotRef


class Writes:
    """The artifacts that wait for a checksum, the fleet's answer or their write, or are written."""

    def __init__(
        self, tiers: Tiers, recorder: Recorder, clock: Callable[[], float], *, sums: bool
    ) -> None:
        """`sums`: artifacts get a checksum even where none is written."""
        self.claims = PendingClaims(clock, self.offer)
        """Artifacts whose write waits for the fleet's answer."""
        self.is_writable = tiers.ssd is not None
        """False while the SSD is not written to. Then nothing is queued for it."""
        self.admission = Admission(None, tiers.seconds_saved.in_prefills)
        self.num_writing = 0
        """Artifacts that were taken for a write and are not finished."""
        self.flushing = False
        """True while everything queued is due at once."""
        self.is_resuming = False
        """True from the end of a pause until what was sealed meanwhile is queued."""
        self._tiers = tiers
        self._recorder = recorder
        self._clock = clock
        self._sums = sums
        self._begun = set[Artifact]()
        """Artifacts whose write has begun and not ended, whether it was given up or not."""
        self._unsummed = ArtifactQueue[Pending]()
        """Sealed artifacts without a checksum; what is written gets one before."""
        self._queue = ArtifactQueue[Pending]()
        self._most_chunks = max(1, tiers.dram.geometry.num_chunks // _DRAM_SHARE)
        self._alone = 0
        """So many chunks are written each by itself: a slot of a batch may be bad."""
        self._failed_alone = 0
        """Chunks that failed by themselves since something was written."""
        self._suspects: list[SlotRef] = []
        """Their slots, kept from use until something is written elsewhere: then they are bad."""

    def __len__(self) -> int:
        """Return how many artifacts wait for their write."""
        return len(self._queue)

    def __contains__(self, artifact: object) -> bool:
        return artifact in self._queue

    @property
    def num_unsummed(self) -> int:
        """Artifacts that wait for a checksum."""
        return len(self._unsummed)

    @property
    def is_active(self) -> bool:
        """Return whether a newly sealed artifact is of any interest to the I/O thread."""
        return self.is_writable or self._sums

    @property
    def is_drained(self) -> bool:
        """Return whether everything sealed is written that will be."""
        is_busy = self._queue or self.num_writing or self.claims or self.is_resuming
        return self.is_writable and not is_busy

    @property
    def may_list_forgotten(self) -> bool:
        """Return whether a write that has begun may yet list an artifact that was forgotten."""
        return any(artifact.forgotten for artifact in self._begun)

    @property
    def next_due_s(self) -> float:
        """Return when the next checksum or write is due by the clock; infinite without one."""
        waiting = [queue.first.due_s for queue in (self._queue, self._unsummed) if queue]
        if not waiting:
            return float("inf")
        return 0.0 if self.flushing else min(waiting)

    @property
    def waits_too_long(self) -> bool:
        """Return whether the next write has waited for reads for long enough."""
        return bool(self._queue) and self._queue.first.due_s + _MAX_WAIT_S <= self._clock()

    # --- queueing -----------------------------------------------------------------------------

    def queue(self, artifact: Artifact, due_s: float) -> None:
        """Have a sealed artifact summed, and written if anything is, from `due_s` on."""
        pending = Pending(artifact, due_s)
        if self.is_writable:
            self._queue.append(artifact, pending)
        if artifact.checksum is None:
            self._unsummed.append(artifact, pending)

    def offer(self, artifact: Artifact) -> None:
        """Queue an artifact that is due now, if anything is summed or written at all."""
        if self.is_active:
            self.queue(artifact, self._clock())

    def offer_all(self, artifacts: Iterable[Artifact]) -> None:
        """Queue those of them that are in DRAM alone and ours to write."""
        for artifact in unwritten_of(artifacts):
            self.queue(artifact, self._clock())

    def unwritten(self) -> list[Artifact]:
        """Return our sealed artifacts that are in DRAM alone, parents first. O(chunks).

        Needs no lock, so it may miss a change that is being made.
        """
        nodes = list(self._tiers.index.nodes.values())  # one call that no thread can interrupt
        return unwritten_of(a for node in nodes for a in list(node.artifacts.values()))

    def discard(self, artifact: Artifact) -> None:
        """Drop an artifact that was forgotten from every queue."""
        self._queue.discard(artifact)
        self._unsummed.discard(artifact)
        self.claims.discard(artifact)

    def stop(self) -> None:
        """Write nothing of what is queued."""
        self.is_writable = False
        self.claims.clear()
        self._queue.clear()
        if not self.is_active:
            self._unsummed.clear()

    def end(self) -> None:
        """Write and sum nothing any more: there is no I/O thread."""
        self._sums, self.num_writing = False, 0
        self.stop()

    # --- checksums ----------------------------------------------------------------------------

    def take_unsummed(self, *, reading: bool) -> list[Artifact]:
        """Take the next artifacts that are due and have no checksum, pinned."""
        limit = _BATCH_BYTES_WHILE_READING if reading else _BATCH_BYTES
        taken, size_bytes, due_s = list[Artifact](), 0, self._due_s
        while self._unsummed and self._unsummed.first.due_s <= due_s:
            artifact = self._unsummed.first.artifact
            if size_bytes >= limit and artifact.node is not taken[-1].node:
                break
            self._unsummed.popleft()
            if artifact.checksum is None and artifact.dram is not None:
                artifact.pins += 1
                size_bytes += artifact.size_bytes
                taken.append(artifact)
        return taken

    def finish_sums(self, artifacts: Sequence[Artifact], checksums: Sequence[bytes]) -> None:
        """Note checksums. Peers may read the artifacts from now."""
        feed = self._tiers.feed
        for artifact, digest in zip(artifacts, checksums, strict=True):
            artifact.checksum = digest
            if feed is not None and not artifact.forgotten:
                feed.on_changed(artifact)
            self._tiers.unpin(artifact)

    # --- writes -------------------------------------------------------------------------------

    def admit(self) -> list[Write]:
        """Take the next artifacts that are worth their write, pinned, and give each an SSD slot.

        Those without one stay in DRAM alone. Nothing may be written before the journal has
        forgotten what was evicted (`Tiers.forgotten`); then comes `begin`.
        """
        self.claims.offer_overdue(at_once=self.flushing)
        return self._place(self._admit(self._take_due()))

    def begin(self, admitted: Sequence[Write]) -> list[Write]:
        """Return what is still to be written, and protect its slots."""
        ssd, writes, placed = self._tiers.ssd, list[Write](), set[Artifact]()
        assert ssd is not None
        for write in admitted:
            if write.artifact.forgotten or not parent_is_there(write.artifact, placed):
                ssd.release(write.target)
                self._refuse([write.artifact])
                continue
            ssd.begin_transfer(write.target)
            self._tiers.dram.begin_transfer(write.source)
            placed.add(write.artifact)
            self._begun.add(write.artifact)
            writes.append(write)
        return writes

    def put_off(self, admitted: Sequence[Write]) -> None:
        """Queue admitted artifacts again, for a moment later."""
        ssd, artifacts = self._tiers.ssd, [write.artifact for write in admitted]
        assert ssd is not None
        self._put_back(artifacts)
        for write in admitted:
            ssd.release(write.target)
            self.admission.refund(write.artifact)
        self._release(artifacts)

    def give_up(self, writes: Sequence[Write]) -> None:
        """Treat writes that do not end as if they had not begun. Their slots stay protected."""
        self._release([write.artifact for write in writes])

    def release_sources(self, writes: Sequence[Write]) -> None:
        """Note that the device has read the DRAM slots of these writes."""
        for write in writes:
            self._tiers.dram.end_transfer(write.source)

    def finish(
        self, writes: Sequence[Write], *, is_stored: bool, is_late: bool, may_be_bad: bool = False
    ) -> None:
        """End writes whose DRAM slots are released.

        `is_stored`: their bytes are synced and journaled; else they are written again. `is_late`:
        they were given up before. `may_be_bad`: the device did not take the bytes, maybe because
        of a slot. Then the chunks are written each by itself, and the slots of a chunk that fails
        so are not used again once another one is stored.
        """
        tiers, is_suspect = self._tiers, False
        assert tiers.ssd is not None
        if is_stored:
            self._alone = max(0, self._alone - 1)
            self._retire_suspects()
        else:
            self._put_back([write.artifact for write in writes])
        if may_be_bad:
            num_chunks = len({write.artifact.node for write in writes})
            if num_chunks > 1:
                self._alone = num_chunks
            else:
                is_suspect = self._suspect()
        for write in writes:
            artifact = write.artifact
            self._begun.discard(artifact)
            tiers.ssd.end_transfer(write.target)
            if is_suspect:
                self._suspects.append(write.target)
            elif not is_stored or artifact.forgotten:
                tiers.free_ssd(artifact.id, write.target)  # a commit that failed may have its row
            else:
                tiers.attach(artifact, write.target)
                self._queue.discard(artifact)
                self._recorder.add(
                    "heterocache_ssd_written_bytes",
                    artifact.size_bytes,
                    state_type=artifact.state_type.value,
                )
        if not is_late:
            self._release([write.artifact for write in writes])

    def _suspect(self) -> bool:
        """Count a chunk that failed by itself; return whether its slots are kept from use."""
        self._failed_alone += 1
        if self._failed_alone <= _MAX_SUSPECTS:
            return True
        self._free_suspects()
        return False

    def _retire_suspects(self) -> None:
        """Never use the suspects again: something was written, so it was not all of the disk."""
        assert self._tiers.ssd is not None
        if self._suspects:
            logger.warning(
                "SSD tier: writing to %d slots failed while others could be written; this engine "
                "does not use them again",
                len(self._suspects),
            )
        for suspect in self._suspects:
            self._tiers.ssd.retire(suspect)
        self._free_suspects()
        self._failed_alone = 0

    def _free_suspects(self) -> None:
        assert self._tiers.ssd is not None
        for suspect in self._suspects:
            self._tiers.ssd.release(suspect)
        self._suspects.clear()

    @property
    def _due_s(self) -> float:
        return float("inf") if self.flushing else self._clock()

    def _take_due(self) -> list[Artifact]:
        """Take the next batch from the queue, pinned, parents first. All have checksums."""
        taken: dict[Artifact, None] = {}
        size_bytes, num_chunks, chunk, due_s = 0, 0, None, self._due_s
        while self._queue and self._queue.first.due_s <= due_s:
            artifact = self._queue.first.artifact
            most_chunks = 1 if self._alone else self._most_chunks
            is_full = size_bytes >= _BATCH_BYTES or num_chunks >= most_chunks
            if (is_full and artifact.node is not chunk) or artifact in self._unsummed:
                break
            self._queue.popleft()
            if artifact.dram is None or artifact.ssd is not None:
                continue  # it was written, and has left DRAM since
            artifact.pins += 1
            size_bytes += artifact.size_bytes
            taken[artifact] = None
            num_chunks += artifact.node is not chunk
            chunk = artifact.node
        self.num_writing += len(taken)
        return sorted(taken, key=_parents_first)

    def _admit(self, due: list[Artifact]) -> list[Artifact]:
        """Return those that are ours and worth their write; the others stay in DRAM alone."""
        ours = self.claims.sift(due, at_once=self.flushing)
        admitted = self.admission.admit(ours)
        refused = set(ours).difference(admitted)
        for artifact in ours:
            if artifact in refused:
                if waits_for_parent(artifact, self._queue):
                    self.offer(artifact)
                else:
                    self._recorder.add(
                        "heterocache_ssd_writes_refused", state_type=artifact.state_type.value
                    )
        self._release(set(due).difference(admitted))
        return admitted

    def _place(self, admitted: Sequence[Artifact]) -> list[Write]:
        """Take SSD slots, evicting nothing that the batch continues or belongs to.

        A chunk of which something has no slot is not written on: the rest would be of no use.
        """
        tiers, targets, without = self._tiers, dict[Artifact, SlotRef](), set[Node]()
        kept = [x for x in map(deepest_on_ssd, admitted) if x is not None]
        nodes = dict.fromkeys(artifact.node for artifact in admitted)
        kept += [artifact for node in nodes for artifact in node.artifacts.values()]
        for artifact in kept:
            artifact.pins += 1
        for artifact in admitted:
            above, target = artifact.above, None
            if artifact.node not in without and parent_is_there(artifact, targets):
                after = None if above is None else above.ssd or targets.get(above)
                target = tiers.take_ssd(artifact, after)
            if target is None:
                without.add(artifact.node)
            else:
                targets[artifact] = target
        for artifact in kept:
            tiers.unpin(artifact)
        self._refuse([artifact for artifact in admitted if artifact not in targets])
        return [Write(a, a.dram, target) for a, target in targets.items() if a.dram is not None]

    def _refuse(self, admitted: Sequence[Artifact]) -> None:
        """Leave admitted artifacts in DRAM alone: there is no slot for them, or for a parent."""
        num_refused = 0
        for artifact in admitted:
            self.admission.refund(artifact)
            if waits_for_parent(artifact, self._queue):
                self.offer(artifact)
            else:
                num_refused += not artifact.forgotten
        if num_refused:
            self._recorder.add(
                "heterocache_failures",
                num_refused,
                cause=Failure.NO_SLOT.value,
                tier=Tier.SSD.value,
            )
        self._release(admitted)

    def _put_back(self, artifacts: Sequence[Artifact]) -> None:
        """Return artifacts to the head of the queue: chunks below depend on them."""
        if self.is_writable:
            due_s = self._clock() + _RETRY_S
            for artifact in reversed(artifacts):
                if not artifact.forgotten and could_be_written(artifact):
                    self._queue.append_first(artifact, Pending(artifact, due_s))

    def _release(self, artifacts: Collection[Artifact]) -> None:
        """Unpin artifacts that were taken for a write."""
        for artifact in artifacts:
            self._tiers.unpin(artifact)
        self.num_writing -= len(artifacts)


def unwritten_of(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Return those that are in DRAM alone and ours to write, parents first. Needs no lock."""
    return sorted((a for a in artifacts if a.sealed and could_be_written(a)), key=_parents_first)


def _parents_first(artifact: Artifact) -> tuple[int, bytes]:
    return artifact.node.chunk.end, artifact.node.key


class PendingClaims:
    """Sealed artifacts whose ownership claim has not been answered yet, parents first.

    They are not queued for their write meanwhile: what another worker owns is not written a second
    time. An answer that does not come in time is not waited for. Nothing waits while the worker is
    not registered, or while the store is flushed.
    """

    def __init__(self, clock: Callable[[], float], offer: Callable[[Artifact], None]) -> None:
        """`offer` queues an artifact's write."""
        self.joined = False
        """True while the worker is registered: an answer may come."""
        self._clock = clock
        self._offer = offer
        self._until_s: dict[Artifact, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def sift(self, due: Sequence[Artifact], *, at_once: bool) -> list[Artifact]:
        """Return those to write now; set aside those that wait, drop those of other workers."""
        now_s, kept = self._clock(), []
        for artifact in due:
            overdue = self._until_s.pop(artifact, now_s + _CLAIM_PATIENCE_S) <= now_s
            if artifact.replica:
                continue
            decided = artifact.token or overdue or at_once or not self.joined
            if decided and not self._continues_one(artifact):
                kept.append(artifact)
            else:
                self._until_s[artifact] = now_s + _CLAIM_PATIENCE_S
        return kept

    def _continues_one(self, artifact: Artifact) -> bool:
        """Return whether its parent still waits: written before it, it would be out of reach."""
        return artifact.above in self._until_s

    def resolve_owned(self, artifact: Artifact) -> None:
        """Queue its write, and before it those of its parents: a restart needs them to find it."""
        chain = []
        above: Artifact | None = artifact
        while above is not None and above in self._until_s:
            chain.append(above)
            above = above.above
        for waiting in reversed(chain):
            self._until_s[waiting] = 0.0
            self._offer(waiting)

    def discard(self, artifact: Artifact) -> None:
        """Stop waiting for an answer; it is not written."""
        self._until_s.pop(artifact, None)

    def clear(self) -> None:
        """Stop waiting for every answer; nothing is written."""
        self._until_s.clear()

    def offer_overdue(self, *, at_once: bool) -> None:
        """Queue the writes that have waited for long enough."""
        now_s = self._clock()
        for artifact, until_s in list(self._until_s.items()):
            if until_s > 0.0 and (until_s <= now_s or at_once or not self.joined):
                self._until_s[artifact] = 0.0
                self._offer(artifact)
