"""Plan the copies of artifacts to or from pages: as few as possible for each layer.

Neighbouring chunks are usually in neighbouring slots, and their pages follow each other in the
block table. So one strided assignment copies a layer's pages of many chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero_connector.artifacts.layout import ArtifactLayout, Segment
from hetero_connector.engine.messages import ArtifactCopy, Blocks, Load, PageCopy
from hetero_connector.engine.worker.pages import ArenaRows, IndexArray
from hetero_connector.spec import StateType

LayerCopies = dict[str, list[tuple[ArenaRows, IndexArray]]]


@dataclass(frozen=True)
class _Run:
    """Artifacts of one shape in evenly spaced slots."""

    artifacts: Sequence[ArtifactCopy]
    stride: int


def plan_loads(layout: ArtifactLayout, rank: int, copy: PageCopy) -> LayerCopies:
    """Return every copy of a load on this rank, by layer name.

    Null pages (block id 0) and pages outside the given blocks are left out.
    """
    return _plan(layout, rank, copy)


def plan_layerwise(
    layout: ArtifactLayout, rank: int, copy: PageCopy, resume: int
) -> tuple[LayerCopies, LayerCopies]:
    """Plan a load in two parts: copies before the forward, and copies that may overlap with it.

    A layer writes the state of the tokens from `resume` on before it calls its load hook. A page
    that holds such tokens and loaded ones must be complete by then.
    """
    block_tokens = {(x.state_type, x.group): x.block_tokens for x in layout.model.stored_layers}
    whole, shared = {}, {}
    for key, blocks in copy.blocks.items():
        pages = max(0, resume // block_tokens[key] - blocks.first_page)
        whole[key] = Blocks(blocks.first_page, blocks.ids[:pages])
        shared[key] = Blocks(blocks.first_page + pages, blocks.ids[pages:])
    if not any(blocks.ids for blocks in shared.values()):
        return {}, _plan(layout, rank, copy)
    # Chunks end where pages do: only the last artifacts reach into a shared page.
    last = [x for x in copy.artifacts if x.end >= resume]
    overlapped = _plan(
        layout, rank, replace(copy, artifacts=[x for x in copy.artifacts if x.end < resume])
    )
    for layer, copies in _plan(layout, rank, PageCopy(last, whole)).items():
        overlapped.setdefault(layer, []).extend(copies)
    return _plan(layout, rank, PageCopy(last, shared)), overlapped


def plan_saves(layout: ArtifactLayout, rank: int, copy: PageCopy) -> LayerCopies:
    """Return every copy of a save on this rank. The first rank saves what several ranks share."""
    plan = _plan(layout, rank, copy)
    if layout.model.tp_size == 1:
        return plan
    own = {x.layer for x in layout.model.stored_layers if layout.is_writer(x, rank)}
    return {layer: copies for layer, copies in plan.items() if layer in own}


def size_bytes(layout: ArtifactLayout, loads: Iterable[Load]) -> int:
    """Return the bytes of all artifacts on one rank."""
    return sum(
        layout.rank_bytes(artifact.state_type, artifact.start, artifact.end)
        for load in loads
        for artifact in load.copy.artifacts
    )


def _plan(layout: ArtifactLayout, rank: int, copy: PageCopy) -> LayerCopies:
    plan: LayerCopies = defaultdict(list)
    by_type: dict[StateType, list[ArtifactCopy]] = defaultdict(list)
    for artifact in copy.artifacts:
        by_type[artifact.state_type].append(artifact)
    for state_type, artifacts in by_type.items():
        tables = {
            group: (blocks.first_page, np.asarray(blocks.ids, dtype=np.int64))
            for (t, group), blocks in copy.blocks.items()
            if t is state_type
        }
        for run in _runs(layout, artifacts):
            _plan_run(layout, rank, run, tables, plan)
    return dict(plan)


def _runs(layout: ArtifactLayout, artifacts: list[ArtifactCopy]) -> Iterator[_Run]:
    """Split the artifacts into runs of equal page counts and equal distances in the arena."""
    start = 0
    while start < len(artifacts):
        shape = _shape(layout, artifacts[start])
        end, stride = start + 1, 0
        while end < len(artifacts) and _shape(layout, artifacts[end]) == shape:
            step = artifacts[end].offset - artifacts[end - 1].offset
            if step <= 0 or (stride and step != stride):
                break
            stride, end = step, end + 1
        yield _Run(artifacts[start:end], stride)
        start = end


def _shape(layout: ArtifactLayout, artifact: ArtifactCopy) -> tuple[int, ...]:
    return tuple(segment.num_pages for segment in _segments(layout, artifact))


def _segments(layout: ArtifactLayout, artifact: ArtifactCopy) -> tuple[Segment, ...]:
    return layout.segments(artifact.state_type, artifact.start, artifact.end)


def _plan_run(
    layout: ArtifactLayout,
    rank: int,
    run: _Run,
    tables: dict[int, tuple[int, IndexArray]],
    plan: LayerCopies,
) -> None:
    first = run.artifacts[0]
    segments = _segments(layout, first)
    ids_of_group: dict[tuple[int, int, int], IndexArray] = {}
    for index, segment in enumerate(segments):
        if not segment.num_pages:
            continue
        key = (segment.layer.group, segment.first_page, segment.num_pages)
        if key not in ids_of_group:
            firsts = [_segments(layout, a)[index].first_page for a in run.artifacts]
            ids_of_group[key] = _block_ids(firsts, segment.num_pages, tables[key[0]])
        ids = ids_of_group[key]
        copies = plan[segment.layer.layer]
        for number, part in enumerate(layout.page_runs(segment.layer, rank)):
            offset = first.offset + segment.offset + part.whole_start
            count, pages = ids.shape
            pitch = segment.layer.whole_page_bytes
            rows = ArenaRows(offset, run.stride, count, pages, pitch, number)
            copies.extend(_valid_copies(rows, ids))


def _block_ids(firsts: list[int], pages: int, table: tuple[int, IndexArray]) -> IndexArray:
    """Return block ids `[artifacts, pages]`; 0 if the page is outside the table."""
    table_start, ids = table
    positions = np.asarray(firsts)[:, None] - table_start + np.arange(pages)[None, :]
    inside = (positions >= 0) & (positions < len(ids))
    clipped = np.clip(positions, 0, max(0, len(ids) - 1))
    return np.where(inside, ids[clipped] if len(ids) else 0, 0)


def _valid_copies(rows: ArenaRows, ids: IndexArray) -> Iterator[tuple[ArenaRows, IndexArray]]:
    """Yield one copy if no page is null, else one for each stretch of pages that are not null."""
    if ids.all():
        yield rows, ids.reshape(-1)
        return
    for row in range(rows.count):
        valid = np.flatnonzero(ids[row])
        for stretch in np.split(valid, np.flatnonzero(np.diff(valid) > 1) + 1):
            if len(stretch):
                start = rows.offset + row * rows.stride + int(stretch[0]) * rows.pitch
                part = replace(rows, offset=start, stride=0, count=1, pages=len(stretch))
                yield part, ids[row, stretch]
