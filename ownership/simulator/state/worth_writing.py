"""What of a prompt is worth writing to SSD: the store's admission, asked about runs of chunks.

The store asks about artifacts in its index; here they are made for the question: those that DRAM
has and the SSD lacks, and before them as much of the chain as admission and worth look at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, SlotRef, Tier
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.catalog.admission import Admission
from hetero_connector.store.catalog.nodes import Artifact, Node
from ownership.simulator.state.runs import Found, Run
from ownership.simulator.state.shape import StateShape

_ROOT = ChunkRange(ROOT, ROOT, 0, 0)


class Admitted(NamedTuple):
    """What is written if there is room."""

    chunks: int
    """Of the prompt, those on SSD already among them."""
    checkpoints: list[int]
    artifacts: Sequence[Artifact]
    """Each has been paid for."""


class WorthWriting:
    """Asks the store's admission, for one worker."""

    def __init__(self, shape: StateShape, admission: Admission) -> None:
        self._shape, self._admission = shape, admission

    def admit(self, in_dram: Found, on_ssd: Found, since: int, above: int, last: int) -> Admitted:
        """What to write of a prompt's chunks behind the first `above`, up to `last`, and of the
        checkpoints behind `since`; it is paid for. What of the first `above` is not on SSD is
        another's."""
        last = min(last, in_dram.chunks)
        written = set(on_ssd.checkpoints())
        lacking = {b for b in in_dram.checkpoints() if since < b <= last and b not in written}
        first = min([above + 1, *lacking])
        if first > last:
            return Admitted(above, [], [])
        batch: list[Artifact] = []
        node = self._above(first - 1, in_dram, on_ssd)
        for number, run in _chunks(in_dram.path, first, last):
            node = self._node(number, number - 1, node, run)
            on_disk = number <= above
            batch += _artifacts(node, self._shape.prefix_bytes, run, on_disk)
            if number in lacking or number in written:
                batch += _artifacts(node, self._shape.boundary_bytes, run, number in written)
        asked = [artifact for artifact in batch if artifact.ssd is None]
        admitted = self._admission.admit(asked)
        refused = set(asked).difference(admitted)
        lost = (self._number(a) for a in refused if a.state_type.family is Family.PREFIX)
        reached = max(above, min(lost, default=last + 1) - 1)
        turned_down = {self._number(a) for a in refused if a.state_type.family is Family.BOUNDARY}
        return Admitted(reached, sorted(lacking - turned_down), admitted)

    def refund(self, admitted: Admitted, reached: int, checkpoints: Collection[int]) -> None:
        """There was room for that much only: chunks of the prompt, and those checkpoints."""
        for artifact in admitted.artifacts:
            number = self._number(artifact)
            is_prefix = artifact.state_type.family is Family.PREFIX
            if number > reached if is_prefix else number not in checkpoints:
                self._admission.refund(artifact)

    def _above(self, number: int, in_dram: Found, on_ssd: Found) -> Node:
        """What is on SSD before the first chunk that is asked about: the chunk above it, which
        begins where the checkpoint before it is."""
        node = Node(_ROOT, None)
        if not number:
            return node
        boundary = max(in_dram.deepest_checkpoint(number), on_ssd.deepest_checkpoint(number))
        run = next(run for run in (*in_dram.path, *on_ssd.path) if run.end >= number)
        for end, start in ((boundary, 0), (number, boundary)):
            if end > start:
                node = self._node(end, start, node, run)
                _artifacts(node, self._shape.prefix_bytes, run, on_ssd=True)
                if end == boundary:
                    _artifacts(node, self._shape.boundary_bytes, run, on_ssd=True)
        return node

    def _node(self, number: int, before: int, parent: Node, run: Run) -> Node:
        size = self._shape.chunk_tokens
        key = ChunkKey(number.to_bytes(16, "little"))
        node = Node(ChunkRange(key, parent.key, before * size, number * size), parent)
        # How many there are is all that is asked of them.
        node.num_children = len(run.children) if run.end == number else 1
        return node

    def _number(self, artifact: Artifact) -> int:
        return artifact.node.chunk.end // self._shape.chunk_tokens


def _chunks(path: Sequence[Run], first: int, last: int) -> Iterator[tuple[int, Run]]:
    """The chunks `first` to `last` of a chain, by number, and the runs they are of."""
    for run in path:
        for number in range(max(first, run.start + 1), min(last, run.end) + 1):
            yield number, run


def _artifacts(
    node: Node, sizes: Mapping[StateType, int], run: Run, on_ssd: bool
) -> list[Artifact]:
    """One of each type. A run's first use was to make it."""
    made = []
    for state_type, size_bytes in sizes.items():
        artifact = node.artifacts[state_type] = Artifact(node, state_type, size_bytes)
        artifact.uses = run.uses - 1
        if on_ssd:
            artifact.ssd = SlotRef(Tier.SSD, state_type, 0, 0)
        made.append(artifact)
    return made
