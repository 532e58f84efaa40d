"""What to save of a request as its tokens are computed, and once more when it ends.

A chunk is saved in the step that completes it: its prefix-proportional state and, where
the checkpoint policy says so and the engine still holds it, the boundary state at its
end. A request's last, unfinished chunk is saved when the request ends, so that the next
turn resumes right there.

Where chunks are as short as boundaries can be, no such tail exists, and a request's end is
the last boundary it passed. The engine recycles a window before anyone knows that it was
the last, so the newest boundary of decoded tokens is copied in any case and its
checkpoint stays undecided: sealed if the request ends, dropped at the next boundary. It
costs a copy and a DRAM slot, never a write to SSD.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkRange, Tier
from hetero_connector.engine.messages import ArtifactCopy, Blocks, PageCopy, Save
from hetero_connector.engine.scheduler.block_tables import BlockTable, table_of
from hetero_connector.engine.scheduler.handoff import is_prefill
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.reservations import Reservations
from hetero_connector.planner.checkpoints import (
    Boundary,
    CheckpointPolicy,
    KeptBoundaries,
    Reuse,
)
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.spec import StateType
from hetero_connector.store.base import Store

Offer = tuple[int, int, int]
"""A recurrent state that vLLM passes on: (KV cache group, block id, boundary in tokens)."""


@dataclass
class _Collected:
    """Artifacts of one request to be saved together, and the pages they come from."""

    save_ids: list[int] = field(default_factory=list)
    artifacts: list[ArtifactCopy] = field(default_factory=list)
    pages: dict[tuple[StateType, int], range] = field(default_factory=dict)

    def message(self, table: BlockTable, offered: dict[int, int]) -> Save:
        """The worker's order; recurrent pages come from `offered` (group -> block id)."""
        blocks: dict[tuple[StateType, int], Blocks] = {}
        for (state_type, group), pages in self.pages.items():
            if state_type is StateType.RECURRENT:
                blocks[state_type, group] = Blocks(pages.start, [offered[group]])
            else:
                blocks[state_type, group] = Blocks(pages.start, table(group, pages))
        return Save(self.save_ids, PageCopy(self.artifacts, blocks))


class Saver:
    """Reserves slots for what a step completes and orders the copies into them."""

    def __init__(
        self, layout: ArtifactLayout, store: Store, tp_size: int, checkpoints: CheckpointPolicy
    ) -> None:
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._reservations = Reservations(store, tp_size)
        self._policy = checkpoints
        self._kept = KeptBoundaries()
        self._plain_types = tuple(
            t for t in self._model.state_types if t is not StateType.RECURRENT
        )
        self._plain_boundary_types = tuple(
            t for t in self._model.boundary_types if t is not StateType.RECURRENT
        )
        self._has_recurrent = StateType.RECURRENT in self._model.state_types
        self._has_tails = self._model.alignment < layout.chunk_tokens and not self._has_recurrent

    @property
    def outstanding(self) -> bool:
        """Whether workers still owe a report."""
        return self._reservations.outstanding

    def admitted(self, tracker: RequestTracker, computed: int) -> None:
        """The request starts, or starts again, with `computed` tokens in its pages."""
        size, matched = self._layout.chunk_tokens, tracker.matched_chunks
        tracker.next_chunk = min(matched, computed // size)
        if tracker.reuse is not None:  # preempted: what it found now is its own
            return
        local = tracker.local_tokens // size
        if computed > matched * size:
            kept = matched
        else:
            ends = range(matched * size, 0, -size)
            steps = self._kept.steps_to(tracker.chain.ending_at(end).key for end in ends)
            kept = max(min(local, matched), 0 if steps is None else matched - steps)
        tracker.reuse = Reuse(matched, kept, local)
        tracker.missed_chunks = matched - tracker.next_chunk

    def restored(self, plan: RestorePlan) -> None:
        """A checkpoint that another engine sent is kept whatever our policy's period: requests
        that resume there ask for none of ours."""
        end = plan.chunks[-1]
        if any(end.tiers[t] is Tier.PEER for t in plan.boundary_types):
            self._kept.add(end.chunk.key)

    def all_or_none(self) -> AbstractContextManager[None]:
        return self._reservations.all_or_none()

    def step(
        self, tracker: RequestTracker, computed: int, table: BlockTable, offers: Iterable[Offer]
    ) -> list[Save]:
        """Saves for a request whose first `computed` tokens are computed after this step."""
        known = self._storable(tracker, computed)
        messages = []
        collected = self._full_chunks(tracker, known, table)
        if collected.artifacts:
            messages.append(collected.message(table, {}))
        for boundary, offered in self._offered(offers).items():
            if boundary <= min(known, tracker.request.num_prompt_tokens):
                recurrent = self._recurrent(tracker, boundary, offered)
                if recurrent.artifacts:
                    messages.append(recurrent.message(table, offered))
        return messages

    def finish(
        self, tracker: RequestTracker, computed: int, block_ids: Sequence[list[int]]
    ) -> list[Save]:
        """Saves of an ending request: chunks not yet saved, and the state at its end."""
        known = self._storable(tracker, computed)
        table = table_of(block_ids)
        collected = self._full_chunks(tracker, known, table)
        self._decide(tracker, wanted=True)
        end = known - known % self._model.alignment
        if end >= max(1, tracker.windows_from) and not self._has_recurrent:
            chunk = tracker.chain.ending_at(end)
            self._collect(collected, chunk, self._plain_types, table)
            self._kept.add(chunk.key)
        self._save_handoff(collected, tracker, known, table)
        if tracker.reuse is not None:
            added = max(0, known // self._layout.chunk_tokens - tracker.reuse.matched)
            self._policy.observe(replace(tracker.reuse, new=added))
        return [collected.message(table, {})] if collected.artifacts else []

    def _save_handoff(
        self, collected: _Collected, tracker: RequestTracker, known: int, table: BlockTable
    ) -> None:
        """Keep where another engine resumes this prompt: before its last token, or just before."""
        if not is_prefill(tracker.request):
            return
        last = min(int(tracker.request.num_prompt_tokens) - 1, known)
        end = self._model.handoff_end(last + 1)
        if end >= max(1, tracker.windows_from):
            chunk = tracker.chain.ending_at(end)
            missing = self._store.missing(chunk, self._model.types_at(end))
            # Where windows were recycled it has decoded on.
            if all(self._held(state_type, chunk, table) for state_type in missing):
                self._reserve(collected, chunk, missing)
        tracker.handoff_tokens = self._stored_up_to(tracker, last)

    def _stored_up_to(self, tracker: RequestTracker, last: int) -> int:
        """Tokens of the first `last` that are stored or about to be, as far as can be resumed."""
        size = self._layout.chunk_tokens
        for step in (self._model.handoff_step, self._model.alignment):
            end = last - last % step
            types = self._model.types_at(end)
            if end and not self._store.missing(tracker.chain.ending_at(end), types):
                return end
        return self._still_stored(tracker, min(tracker.next_chunk, last // size)) * size

    def forget(self, tracker: RequestTracker) -> None:
        """Let go of what is undecided: the request's end is not to be saved."""
        self._decide(tracker, wanted=False)

    def reported(self, save_id: int, ranks: int, *, copied: bool = True) -> None:
        """`ranks` more ranks are done with it; seals once all have copied their share."""
        self._reservations.reported(save_id, ranks, copied=copied)

    def abandon(self, save: Save) -> None:
        """The pages were overwritten before they could be copied."""
        self._reservations.abandon(save.save_ids)

    def _decide(self, tracker: RequestTracker, *, wanted: bool) -> None:
        save_id, tracker.undecided = tracker.undecided, 0
        if save_id:
            self._reservations.decide(save_id, wanted=wanted)

    def _storable(self, tracker: RequestTracker, computed: int) -> int:
        """Tokens whose state may be stored: known, computed, and faithful if decoded."""
        known = min(tracker.grow(), computed)
        if self._model.prompt_only:
            return min(known, int(tracker.request.num_prompt_tokens))
        return known

    def _full_chunks(self, tracker: RequestTracker, known: int, table: BlockTable) -> _Collected:
        """Reserve of every full chunk up to `known` what the store lacks, parents first."""
        collected = _Collected()
        size = self._layout.chunk_tokens
        index = self._reachable(tracker, known // size)
        while (index + 1) * size <= known:
            if not self._full_chunk(collected, tracker, index + 1, table):
                break
            index += 1
        tracker.next_chunk = index
        return collected

    def _full_chunk(
        self, collected: _Collected, tracker: RequestTracker, chunks: int, table: BlockTable
    ) -> bool:
        """The last of the request's first `chunks` chunks; False if there was no room for it."""
        chunk = tracker.chain.ending_at(chunks * self._layout.chunk_tokens)
        exact = chunk.end >= tracker.windows_from
        if exact and self._keeps(tracker, chunks):
            kept = self._collect(collected, chunk, self._plain_types, table)
            if kept:
                self._decide(tracker, wanted=False)
            return kept
        if not self._collect(collected, chunk, self._model.prefix_types, table):
            return False
        if exact and not self._has_tails and chunk.end > tracker.request.num_prompt_tokens:
            self._decide(tracker, wanted=False)
            before = len(collected.save_ids)
            self._collect(collected, chunk, self._plain_boundary_types, table, wanted=None)
            reserved = collected.save_ids[before:]
            tracker.undecided = reserved[0] if reserved else 0
        return True

    def _keeps(self, tracker: RequestTracker, chunks: int) -> bool:
        """Whether the boundary after the first `chunks` chunks gets a checkpoint."""
        size, prompt = self._layout.chunk_tokens, int(tracker.request.num_prompt_tokens)
        # The same prompt sent again resumes before its last token: of a prompt that ends on a
        # boundary, one boundary earlier.
        turn_end = chunks in (prompt // size, (prompt - 1) // size)
        left_here = tracker.reuse is not None and chunks == tracker.reuse.matched
        missed = tracker.missed_chunks if left_here else 0
        if not self._policy.should_keep(Boundary(chunks, turn_end, missed)):
            return False
        if turn_end or missed:
            self._kept.add(tracker.chain.ending_at(chunks * size).key)
        return True

    def _reachable(self, tracker: RequestTracker, stop: int) -> int:
        """`next_chunk`, or an earlier one if its parent has been evicted meanwhile."""
        index = tracker.next_chunk
        return index if index >= stop else self._still_stored(tracker, index)

    def _still_stored(self, tracker: RequestTracker, index: int) -> int:
        """How many of the request's first `index` chunks have not been evicted meanwhile."""
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
        wanted: bool | None = True,
    ) -> bool:
        """Reserve what the store lacks of this chunk; False if there was no room for it."""
        held = [t for t in self._store.missing(chunk, types) if self._held(t, chunk, table)]
        return self._reserve(collected, chunk, held, wanted)

    def _reserve(
        self,
        collected: _Collected,
        chunk: ChunkRange,
        types: Sequence[StateType],
        wanted: bool | None = True,
    ) -> bool:
        if not types:
            return True
        sizes = {t: self._layout.artifact_bytes(t, chunk.start, chunk.end) for t in types}
        reservation = self._store.begin_save(chunk, sizes)
        if reservation is None:
            return False
        collected.save_ids.append(self._reservations.add(reservation, wanted))
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

    def _held(self, state_type: StateType, chunk: ChunkRange, table: BlockTable) -> bool:
        """Whether the artifact has any bytes, and the engine still holds every page of them."""
        if not self._layout.artifact_bytes(state_type, chunk.start, chunk.end):
            return False  # chunked-local state, where a local chunk has just begun
        for layer in self._model.page_groups[state_type]:
            pages = layer.pages_needed(chunk.start, chunk.end)
            ids = table(layer.group, pages)
            if len(ids) < len(pages) or not all(ids):
                return False
        return True

    def _offered(self, offers: Iterable[Offer]) -> dict[int, dict[int, int]]:
        """Boundary -> {group: block id}, where every recurrent group made an offer."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group, block_id, boundary in offers:
            by_boundary.setdefault(boundary, {})[group] = block_id
        groups = {x.group for x in self._model.page_groups.get(StateType.RECURRENT, ())}
        return {b: ids for b, ids in by_boundary.items() if groups <= ids.keys() and groups}

    def _recurrent(
        self, tracker: RequestTracker, boundary: int, offered: dict[int, int]
    ) -> _Collected:
        collected = _Collected()
        chunks, rest = divmod(boundary, self._layout.chunk_tokens)
        if not rest and self._keeps(tracker, chunks):
            chunk = tracker.chain.ending_at(boundary)
            types = self._store.missing(chunk, [StateType.RECURRENT])
            self._reserve(collected, chunk, types)
        return collected
