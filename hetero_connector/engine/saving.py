"""What to save of a request as its tokens are computed, and once more when it ends.

A chunk is saved in the step that completes it: its prefix-proportional state and, if
the engine still holds it, the boundary state at its end. A request's last, unfinished
chunk is saved when the request ends, so that the next turn resumes right there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkRange
from hetero_connector.engine.messages import ArtifactCopy, Blocks, PageCopy, Save
from hetero_connector.engine.requests import RequestTracker
from hetero_connector.engine.restoring import BlockTable, table_of
from hetero_connector.spec import StateType
from hetero_connector.store.base import Save as Reservation
from hetero_connector.store.base import Store

Offer = tuple[int, int, int]
"""vLLM's hand-off of a recurrent state: (KV cache group, block id, boundary in tokens)."""


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
    """Reserves slots for what a step completes and tracks them until all ranks report."""

    def __init__(self, layout: ArtifactLayout, store: Store, tp_size: int) -> None:
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._tp_size = tp_size
        self._plain_types = tuple(
            t for t in self._model.state_types if t is not StateType.RECURRENT
        )
        self._has_recurrent = StateType.RECURRENT in self._model.state_types
        self._next_id = 0
        self._reserved: dict[int, Reservation] = {}
        self._reports: dict[int, int] = {}

    @property
    def outstanding(self) -> bool:
        """Whether workers still owe a report."""
        return bool(self._reserved)

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
        """Saves of an ending request: chunks not yet saved, and the tail after them."""
        known = self._storable(tracker, computed)
        table = table_of(block_ids)
        collected = self._full_chunks(tracker, known, table)
        end = known - known % self._model.alignment
        if end % self._layout.chunk_tokens and not self._has_recurrent:
            self._collect(collected, tracker.chain.ending_at(end), table)
        return [collected.message(table, {})] if collected.artifacts else []

    def reported(self, save_id: int, ranks: int) -> None:
        """`ranks` more ranks have copied their share; seals once all have."""
        self._reports[save_id] = self._reports.get(save_id, 0) + ranks
        if self._reports[save_id] >= self._tp_size:
            del self._reports[save_id]
            self._store.complete_save(self._reserved.pop(save_id))

    def abandon(self, save: Save) -> None:
        """The pages were overwritten before they could be copied."""
        for save_id in save.save_ids:
            self._store.abandon_save(self._reserved.pop(save_id))

    def _storable(self, tracker: RequestTracker, computed: int) -> int:
        """Tokens whose state may be stored: known, computed, and faithful if decoded."""
        known = min(tracker.grow(), computed)
        if self._model.prompt_only:
            return min(known, int(tracker.request.num_prompt_tokens))
        return known

    def _full_chunks(self, tracker: RequestTracker, known: int, table: BlockTable) -> _Collected:
        """Reserve every full chunk up to `known` that the store lacks, parents first."""
        collected = _Collected()
        size = self._layout.chunk_tokens
        index = self._reachable(tracker, known // size)
        while (index + 1) * size <= known:
            if not self._collect(collected, tracker.chain.ending_at((index + 1) * size), table):
                break
            index += 1
        tracker.next_chunk = index
        return collected

    def _reachable(self, tracker: RequestTracker, stop: int) -> int:
        """`next_chunk`, or an earlier one if its parent has been evicted meanwhile."""
        index = tracker.next_chunk
        if index >= stop:
            return index
        size = self._layout.chunk_tokens
        while index and self._store.missing(
            tracker.chain.ending_at(index * size), self._model.prefix_types
        ):
            index -= 1
        return index

    def _collect(self, collected: _Collected, chunk: ChunkRange, table: BlockTable) -> bool:
        """Reserve what the store lacks of this chunk; False if there was no room for it."""
        types = [
            t for t in self._store.missing(chunk, self._plain_types) if self._held(t, chunk, table)
        ]
        return self._reserve(collected, chunk, types)

    def _reserve(
        self, collected: _Collected, chunk: ChunkRange, types: Sequence[StateType]
    ) -> bool:
        if not types:
            return True
        sizes = {t: self._layout.artifact_bytes(t, chunk.start, chunk.end) for t in types}
        reservation = self._store.begin_save(chunk, sizes)
        if reservation is None:
            return False
        self._next_id += 1
        self._reserved[self._next_id] = reservation
        collected.save_ids.append(self._next_id)
        for state_type, offset in reservation.offsets.items():
            copy = ArtifactCopy(state_type, chunk.start, chunk.end, offset)
            collected.artifacts.append(copy)
            self._extend_pages(collected, copy)
        return True

    def _extend_pages(self, collected: _Collected, copy: ArtifactCopy) -> None:
        for layer in self._model.page_groups[copy.state_type]:
            pages = layer.pages_needed(copy.start, copy.end)
            key = (copy.state_type, layer.group)
            known = collected.pages.get(key, pages)
            collected.pages[key] = range(min(known.start, pages.start), max(known.stop, pages.stop))

    def _held(self, state_type: StateType, chunk: ChunkRange, table: BlockTable) -> bool:
        """Whether the engine still holds every page the artifact needs."""
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
        if boundary % self._layout.chunk_tokens == 0:
            chunk = tracker.chain.ending_at(boundary)
            types = self._store.missing(chunk, [StateType.RECURRENT])
            self._reserve(collected, chunk, types)
        return collected
