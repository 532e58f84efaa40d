"""Decide what to save of a request: in each step, and when it ends.

A chunk is saved in the step that completes it: its prefix-proportional state and, if the checkpoint
policy wants it and the engine still has its pages, the boundary state at its end. A request's last,
unfinished chunk is saved when the request ends, so that the next turn resumes right there.

If every boundary ends a chunk there is no unfinished chunk, and a request ends at the last boundary
it has passed. The engine recycles a window before it is known to be the last one. So the newest
boundary of decoded tokens is always copied, and its checkpoint stays undecided: it is sealed if the
request ends, and dropped at the next boundary. That costs a copy and a DRAM slot, but no write to
SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkRange, Tier
from hetero_connector.artifacts.tails import AnsweredPrompts
from hetero_connector.engine.messages import ArtifactCopy, Blocks, PageCopy, Save
from hetero_connector.engine.scheduler.block_tables import BlockTable, RecurrentState, table_of
from hetero_connector.engine.scheduler.handoff import is_prefill
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.reservations import Reservations, Verdict
from hetero_connector.planner.checkpoints import (
    Boundary,
    CheckpointPolicy,
    KeptBoundaries,
    Reuse,
)
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore

_MOST_MISSED = 64
"""Chunks that are looked at for a checkpoint before the end of a match."""


@dataclass
class _Collected:
    """Artifacts of one request that one order saves, and their pages."""

    tracker: RequestTracker
    save_ids: list[int] = field(default_factory=list)
    artifacts: list[ArtifactCopy] = field(default_factory=list)
    pages: dict[tuple[StateType, int], range] = field(default_factory=dict)

    def order(self, table: BlockTable, recurrent_blocks: dict[int, int]) -> Save:
        """Return the worker's order. `recurrent_blocks`: block id by KV cache group."""
        blocks: dict[tuple[StateType, int], Blocks] = {}
        for (state_type, group), pages in self.pages.items():
            if state_type is StateType.RECURRENT:
                blocks[state_type, group] = Blocks(pages.start, [recurrent_blocks[group]])
            else:
                blocks[state_type, group] = Blocks(pages.start, table(group, pages))
        return Save(self.save_ids, PageCopy(self.artifacts, blocks))


class Saver:
    """Reserves slots for the state that a step completes, and orders the copies."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: ArtifactStore,
        num_ranks: int,
        checkpoints: CheckpointPolicy,
        answered: AnsweredPrompts,
    ) -> None:
        self._layout = layout
        self._model = layout.model
        self._answered = answered
        self._store = store
        self._reservations = Reservations(store, num_ranks)
        self._policy = checkpoints
        self._kept = KeptBoundaries()
        self.on_reserved: Callable[[RequestTracker, ChunkRange], None] = lambda tracker, chunk: None
        """Called with each chunk of which state is going to be saved."""
        self._plain_types = tuple(
            t for t in self._model.state_types if t is not StateType.RECURRENT
        )
        self._plain_boundary_types = tuple(
            t for t in self._model.boundary_types if t is not StateType.RECURRENT
        )
        self._has_recurrent = StateType.RECURRENT in self._model.state_types
        recurrent = self._model.page_groups.get(StateType.RECURRENT, ())
        self._recurrent_groups = {x.group for x in recurrent}
        self._has_tails = self._model.alignment < layout.chunk_tokens and not self._has_recurrent

    @property
    def awaits_reports(self) -> bool:
        """True while workers have saves that they have not reported."""
        return self._reservations.awaits_reports

    def on_admitted(self, tracker: RequestTracker, computed: int) -> None:
        """Begin, or begin again, with a request that has `computed` tokens in its pages."""
        size, matched = self._layout.chunk_tokens, tracker.matched_chunks
        tracker.next_chunk, tracker.lacks_parent = min(matched, computed // size), False
        if tracker.reuse is not None:  # preempted: it has found its own state
            return
        local = tracker.local_tokens // size
        if computed > matched * size:
            tracker.reuse = Reuse(matched, matched, local)
        else:
            keys = tracker.chain.keys_back_from(matched)
            tracker.reuse = self._kept.reuse(matched, local, keys)
        if tracker.params.max_load_tokens is not None:
            return  # the client may have cut the match, so that no one has left the chain there
        tracker.missed_chunks = matched - tracker.next_chunk
        is_passed = 0 < matched <= local and tracker.stored_tokens == matched * size
        if is_passed and not self._has_recurrent:
            # The engine's own cache may be empty when the next request leaves the chain here.
            tracker.missed_chunks = self._since_checkpoint(tracker, matched)
            tracker.passes_match = tracker.missed_chunks > 0

    def _since_checkpoint(self, tracker: RequestTracker, chunks: int) -> int:
        """Count the last of the first `chunks` stored chunks, back to one with a checkpoint."""
        most = min(chunks, _MOST_MISSED)
        for missed in range(most):
            chunk = tracker.chain.ending_at((chunks - missed) * self._layout.chunk_tokens)
            if not self._store.missing(chunk, self._model.boundary_types_at(chunk.end)):
                return missed
        return most

    def on_restored(self, plan: RestorePlan) -> None:
        """Remember the restored checkpoint as kept, unless the policy's present period makes it.

        One from a peer counts whatever the period. Others were made at a turn's end, perhaps
        before a restart. Requests that resume there need no other checkpoint.
        """
        end, types = plan.chunks[-1], plan.boundary_types
        boundary = Boundary(end.chunk.end // self._layout.chunk_tokens)
        is_from_peer = any(end.tiers[t] is Tier.PEER for t in types)
        if is_from_peer or (types and not self._policy.should_keep(boundary)):
            self._kept.add(end.chunk.key)

    def all_or_none(self) -> AbstractContextManager[None]:
        """Abandon reservations made inside if an error is raised."""
        return self._reservations.all_or_none()

    def completes_chunk(self, tracker: RequestTracker, computed: int) -> bool:
        """True if the first `computed` tokens complete a chunk that was not handled yet."""
        chunks = self._storable(tracker, computed) // self._layout.chunk_tokens
        return tracker.passes_match or chunks > tracker.next_chunk

    def save_step(
        self,
        tracker: RequestTracker,
        computed: int,
        table: BlockTable,
        recurrent_states: Iterable[RecurrentState],
    ) -> list[Save]:
        """Return the saves of a step after which `computed` tokens of the request are computed."""
        known = self._storable(tracker, computed)
        orders = []
        collected = self._collect_full_chunks(tracker, known, table)
        if collected.artifacts:
            orders.append(collected.order(table, {}))
        for boundary, blocks in self._complete_states(recurrent_states).items():
            if boundary <= min(known, tracker.request.num_prompt_tokens):
                recurrent = self._collect_recurrent(tracker, boundary)
                if recurrent.artifacts:
                    orders.append(recurrent.order(table, blocks))
        return orders

    def save_end(
        self, tracker: RequestTracker, computed: int, block_ids: Sequence[list[int]]
    ) -> list[Save]:
        """Return the saves of a finished request: chunks not yet saved, and its last boundary."""
        known = self._storable(tracker, computed)
        table = table_of(block_ids)
        collected = self._collect_full_chunks(tracker, known, table)
        self._decide(tracker, Verdict.SEAL)
        end = known - known % self._model.alignment
        # State in the middle of a chunk is in pages only at the very end.
        if known == tracker.last_to_store:
            end = 0
        if end >= max(1, tracker.windows_from) and not self._has_recurrent:
            chunk = tracker.chain.ending_at(end)
            self._collect(collected, chunk, self._plain_types, table)
            self._note_kept(chunk, Boundary(end // self._layout.chunk_tokens, turn_end=True))
        self._collect_handoff(collected, tracker, known, table)
        if tracker.reuse is not None:
            added = max(0, known // self._layout.chunk_tokens - tracker.reuse.matched)
            self._policy.observe(replace(tracker.reuse, new=added))
        return [collected.order(table, {})] if collected.artifacts else []

    def _collect_handoff(
        self, collected: _Collected, tracker: RequestTracker, known: int, table: BlockTable
    ) -> None:
        """Collect the state at which another engine resumes this prompt, near its last token."""
        if not is_prefill(tracker.request):
            return
        last = min(int(tracker.request.num_prompt_tokens) - 1, known)
        end = self._model.handoff_end(last + 1)
        if end >= max(1, tracker.windows_from) and known < tracker.last_to_store:
            chunk = tracker.chain.ending_at(end)
            missing = self._store.missing(chunk, self._model.types_at(end))
            # Windows may have been recycled if the request decoded some tokens.
            if all(self._has_pages(state_type, chunk, table) for state_type in missing):
                self._reserve(collected, chunk, missing)
        tracker.handoff_tokens = self._stored_up_to(tracker, last)

    def _stored_up_to(self, tracker: RequestTracker, last: int) -> int:
        """Return the latest token up to `last` at which the request can be resumed.

        Its state is stored or has just been reserved.
        """
        size = self._layout.chunk_tokens
        for step in (self._model.handoff_step, self._model.alignment):
            end = last - last % step
            types = self._model.types_at(end)
            if end and not self._store.missing(tracker.chain.ending_at(end), types):
                return end
        return self._still_stored(tracker, min(tracker.next_chunk, last // size)) * size

    def forget(self, tracker: RequestTracker) -> None:
        """Drop the undecided checkpoint: the request does not end there."""
        self._decide(tracker, Verdict.DROP)

    def on_report(self, save_id: int, ranks: int, *, copied: bool = True) -> None:
        """Count `ranks` more ranks that are done; seal the save when all have copied."""
        self._reservations.on_report(save_id, ranks, copied=copied)

    def distrust(self) -> None:
        """Seal nothing that was ordered so far: its pages may not hold what they should."""
        self._reservations.distrust()

    def abandon(self, save: Save) -> None:
        """Give up a save whose pages are overwritten before they can be copied."""
        self._reservations.abandon(save.save_ids)

    def _decide(self, tracker: RequestTracker, verdict: Verdict) -> None:
        save_id, tracker.undecided = tracker.undecided, 0
        if save_id:
            self._reservations.decide(save_id, verdict)

    def _storable(self, tracker: RequestTracker, computed: int) -> int:
        """Return the leading tokens whose state may be stored.

        They are known and computed, and within the request's own limit. Decoded tokens count only
        if their state is the same as that of a prompt's tokens.
        """
        known = min(tracker.grow(), computed, tracker.last_to_store)
        if tracker.lacks_parent:
            known = min(known, tracker.next_chunk * self._layout.chunk_tokens)
        if self._model.prompt_only:
            return min(known, int(tracker.request.num_prompt_tokens))
        return known

    def _collect_full_chunks(
        self, tracker: RequestTracker, known: int, table: BlockTable
    ) -> _Collected:
        """Reserve the missing state of every full chunk up to `known`, parents first."""
        collected = _Collected(tracker)
        size = self._layout.chunk_tokens
        if tracker.passes_match:
            self._collect_passed(collected, known, table)
        index = self._first_chunk_to_save(tracker, known // size)
        while (index + 1) * size <= known:
            if not self._collect_full_chunk(collected, tracker, index + 1, table):
                parent = tracker.chain.ending_at((index + 1) * size).parent
                # State that is no prefix's has left the pages by the time of another attempt.
                is_lost = not self._model.prefix_types and not self._store.known([parent])
                tracker.lacks_parent = is_lost
                break
            index += 1
        tracker.next_chunk = index
        return collected

    def _collect_passed(self, collected: _Collected, known: int, table: BlockTable) -> None:
        """Reserve a checkpoint at the end of the match, if the engine's own pages have it."""
        tracker = collected.tracker
        tracker.passes_match = False
        assert tracker.reuse is not None  # both are set at its admission
        chunks = tracker.reuse.matched
        chunk = tracker.chain.ending_at(chunks * self._layout.chunk_tokens)
        missing = self._store.missing(chunk, self._model.boundary_types_at(chunk.end))
        if (
            tracker.windows_from <= chunk.end <= known
            and all(self._has_pages(t, chunk, table) for t in missing)
            and (boundary := self._checkpoint_after(tracker, chunks))
        ):
            self._reserve(collected, chunk, missing)
            self._note_kept(chunk, boundary)

    def _collect_full_chunk(
        self, collected: _Collected, tracker: RequestTracker, chunks: int, table: BlockTable
    ) -> bool:
        """Reserve the last of the request's first `chunks` chunks; False if there is no space."""
        chunk = tracker.chain.ending_at(chunks * self._layout.chunk_tokens)
        exact = chunk.end >= tracker.windows_from
        if exact and (boundary := self._checkpoint_after(tracker, chunks)):
            kept = self._collect(collected, chunk, self._plain_types, table)
            self._note_kept(chunk, boundary)
            if kept:
                self._decide(tracker, Verdict.DROP)
            return kept
        if not self._collect(collected, chunk, self._model.prefix_types, table):
            return False
        if exact and not self._has_tails and chunk.end > tracker.request.num_prompt_tokens:
            self._decide(tracker, Verdict.DROP)
            before = len(collected.save_ids)
            types = self._plain_boundary_types
            self._collect(collected, chunk, types, table, Verdict.UNDECIDED)
            reserved = collected.save_ids[before:]
            tracker.undecided = reserved[0] if reserved else 0
        return True

    def _checkpoint_after(self, tracker: RequestTracker, chunks: int) -> Boundary | None:
        """Return the boundary after the first `chunks` chunks if it gets a checkpoint."""
        size, prompt = self._layout.chunk_tokens, int(tracker.request.num_prompt_tokens)
        match_ended_here = tracker.reuse is not None and chunks == tracker.reuse.matched
        missed = tracker.missed_chunks if match_ended_here else 0
        boundary = Boundary.of_prompt(chunks, prompt, size, missed)
        return boundary if self._policy.should_keep(boundary) else None

    def _note_kept(self, chunk: ChunkRange, boundary: Boundary) -> None:
        """Remember the boundary if any period keeps it, and its state is stored or has a place."""
        is_kept = boundary.turn_end or boundary.missed_chunks > 0
        if is_kept and not self._store.missing(chunk, self._model.types_at(chunk.end)):
            self._kept.add(chunk.key)

    def _first_chunk_to_save(self, tracker: RequestTracker, stop: int) -> int:
        """Return `next_chunk`, or an earlier chunk if its parent has been evicted."""
        index = tracker.next_chunk
        return index if index >= stop else self._still_stored(tracker, index)

    def _still_stored(self, tracker: RequestTracker, index: int) -> int:
        """Return the number of leading chunks, up to `index`, that have not been evicted."""
        size = self._layout.chunk_tokens
        while index and self._store.missing(
            tracker.chain.ending_at(index * size), self._model.prefix_types
        ):
            index -= 1
        return index

    def _collect(
        self,
        collected: _Collected,
        chunk: ChunkRange,
        types: Sequence[StateType],
        table: BlockTable,
        verdict: Verdict = Verdict.SEAL,
    ) -> bool:
        """Reserve the chunk's missing state that is in pages; False if there is no space."""
        missing = self._store.missing(chunk, types)
        in_pages = [t for t in missing if self._has_pages(t, chunk, table)]
        has_space = self._reserve(collected, chunk, in_pages, verdict)
        if has_space and len(in_pages) == len(missing):
            self._note_answered(collected.tracker, chunk)
        return has_space

    def _note_answered(self, tracker: RequestTracker, chunk: ChunkRange) -> None:
        """Let the chunk be found by the end of the prompt, if the answer goes on in it."""
        prompt = int(tracker.request.num_prompt_tokens)
        cut = self._model.last_cut(prompt - 1)
        if chunk.start < cut and chunk.end > prompt:
            self._answered.add(tracker.chain, cut, chunk)

    def _reserve(
        self,
        collected: _Collected,
        chunk: ChunkRange,
        types: Sequence[StateType],
        verdict: Verdict = Verdict.SEAL,
    ) -> bool:
        if not types:
            return True
        all_types, limits_life = self._model.state_types, collected.tracker.params.limits_life
        is_new = limits_life and len(self._store.missing(chunk, all_types)) == len(all_types)
        sizes = {t: self._layout.artifact_bytes(t, chunk.start, chunk.end) for t in types}
        tracker = collected.tracker
        is_again = tracker.unplaced == chunk.key
        reservation = self._store.begin_save(chunk, sizes, is_again=is_again)
        if reservation is None:
            tracker.unplaced = chunk.key
            return False
        if is_new:
            collected.tracker.new_chunks.append(chunk.key)
        self.on_reserved(collected.tracker, chunk)
        collected.save_ids.append(self._reservations.add(reservation, verdict))
        for state_type, offset in reservation.offsets.items():
            copy = ArtifactCopy(state_type, chunk.start, chunk.end, offset)
            collected.artifacts.append(copy)
            self._extend_pages(collected, copy)
        return True

    def _extend_pages(self, collected: _Collected, copy: ArtifactCopy) -> None:
        for layer in self._model.page_groups[copy.state_type]:
            pages = layer.pages_needed(copy.start, copy.end)
            if not pages:
                continue
            key = (copy.state_type, layer.group)
            known = collected.pages.get(key, pages)
            collected.pages[key] = range(min(known.start, pages.start), max(known.stop, pages.stop))

    def _has_pages(self, state_type: StateType, chunk: ChunkRange, table: BlockTable) -> bool:
        """True if the artifact has bytes and the engine still has all their pages."""
        if not self._layout.artifact_bytes(state_type, chunk.start, chunk.end):
            return False  # chunked-local state has no bytes where a local chunk begins
        for layer in self._model.page_groups[state_type]:
            pages = layer.pages_needed(chunk.start, chunk.end)
            ids = table(layer.group, pages)
            if len(ids) < len(pages) or not all(ids):
                return False
        return True

    def _complete_states(self, states: Iterable[RecurrentState]) -> dict[int, dict[int, int]]:
        """Return block ids by group, by boundary, where every recurrent group has a state."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block_id, boundary in states:
            by_boundary.setdefault(boundary, {})[group] = block_id
        groups = self._recurrent_groups
        return {b: ids for b, ids in by_boundary.items() if groups <= ids.keys() and groups}

    def _collect_recurrent(self, tracker: RequestTracker, boundary: int) -> _Collected:
        collected = _Collected(tracker)
        chunks, rest = divmod(boundary, self._layout.chunk_tokens)
        if not rest and (checkpoint := self._checkpoint_after(tracker, chunks)):
            chunk = tracker.chain.ending_at(boundary)
            types = self._store.missing(chunk, [StateType.RECURRENT])
            self._reserve(collected, chunk, types)
            self._note_kept(chunk, checkpoint)
        return collected
