"""Derives from the directory's records how much of a chain each worker has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType
from ownership.directory import ChainView, ChunkRecords, EpochStatus
from ownership.directory.identifiers import Epoch
from ownership.scheduling.step import WorkerPrefix


def worker_prefixes(
    view: ChainView, model: ModelSpec, ends: Sequence[int]
) -> dict[str, WorkerPrefix]:
    """Return how far each live worker could resume, by name. Workers with nothing are left out.

    `ends`: the ends of the view's chunks, in tokens. The directory does not know an engine's pages,
    so `hbm_tokens` is 0. Decodes chunks only as far as the longest prefix reaches.
    """
    if len(ends) != len(view.chunks):
        raise ValueError(f"{len(view.chunks)} chunks need as many ends, got {len(ends)}")

    @cache
    def is_live(epoch: Epoch) -> bool:
        return view.status(epoch) is EpochStatus.LIVE

    bits = {t: 1 << t.position for t in model.state_types}
    reaches: dict[Epoch, _Reach] = {}
    for index, end in enumerate(ends):
        types = _stored_types(view.chunks[index], bits, is_live, view.now_s)
        at_boundary = _bits(model.boundary_types_at(end)) if model.boundary_types else 0
        if index == 0:
            reaches = {epoch: _Reach(_bits(model.prefix_types)) for epoch in types}
        is_unbroken = False
        for epoch, reach in reaches.items():
            reach.extend(end, at_boundary, *types.get(epoch, (0, 0)))
            is_unbroken |= reach.is_unbroken
        if not is_unbroken:
            break
    return {
        view.workers[epoch].name: WorkerPrefix(0, reach.dram_tokens, reach.local_tokens)
        for epoch, reach in reaches.items()
        if reach.local_tokens
    }


class _Reach:
    """The end of one worker's prefix. State types are bits, by their position."""

    def __init__(self, prefix: int) -> None:
        """`prefix`: the types that every chunk must have."""
        self._prefix = prefix
        self.dram_tokens = self.local_tokens = 0
        self.is_unbroken = self._in_dram = True

    def extend(self, end: int, at_boundary: int, in_dram: int, anywhere: int) -> None:
        """Add the chunk that ends at `end`, at which the types of `at_boundary` are needed, too.

        `in_dram`, `anywhere`: the types that the worker has of the chunk.
        """
        self.is_unbroken &= anywhere & self._prefix == self._prefix
        self._in_dram &= in_dram & self._prefix == self._prefix
        if self.is_unbroken and anywhere & at_boundary == at_boundary:
            self.local_tokens = end
        if self._in_dram and in_dram & at_boundary == at_boundary:
            self.dram_tokens = end


def _bits(types: Iterable[StateType]) -> int:
    return sum(1 << t.position for t in types)


def _stored_types(
    records: ChunkRecords,
    bits: Mapping[StateType, int],
    is_live: Callable[[Epoch], bool],
    now_s: float,
) -> dict[Epoch, tuple[int, int]]:
    """Return for each live worker the state types of a chunk that it has in DRAM, and in any tier.

    As `ChainView.copies_in` says which copies may be read; a prompt has hundreds of chunks.
    """
    found: dict[Epoch, tuple[int, int]] = {}
    for state_type, record in records.items():
        bit = bits.get(state_type, 0)
        copies = [(record.owner, record.copy)]
        if record.replicas:
            copies += [(x.holder, x.copy) for x in record.replicas if x.expires_s > now_s]
        for holder, copy in copies:
            if is_live(holder):
                in_dram, anywhere = found.get(holder, (0, 0))
                in_dram |= bit if copy.dram_offset >= 0 else 0
                found[holder] = in_dram, anywhere | in_dram | (bit if copy.on_ssd else 0)
    return found
