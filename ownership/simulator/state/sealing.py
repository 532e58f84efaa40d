"""Which boundaries of a prompt keep a checkpoint: the package's policy, asked as an engine asks."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.planner.checkpoint_policy import (
    Boundary,
    CheckpointPolicy,
    KeptBoundaries,
    Reuse,
)
from ownership.simulator.traces.block_runs import BlockRuns


class Sealer:
    """One worker's checkpoint policy and what it has learned of reuse."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self._policy = policy
        self._kept = KeptBoundaries()

    def checkpoints(
        self, chain: BlockRuns, prompt_tokens: int, chunk_tokens: int, *,
        matched: int, local: int, resumed: int,
    ) -> list[int]:  # fmt: skip
        """Boundaries to keep of a prompt computed from chunk `resumed` on, in chunks.

        `matched`: chunks that were stored; `local`: that the engine's own cache held.
        """
        full = prompt_tokens // chunk_tokens
        turn_ends = {full, (prompt_tokens - 1) // chunk_tokens} - {0}
        keeps, boundaries = self._policy.keeps, []
        reuse = self._reuse(chain, matched, local, full)
        for chunks in range(resumed + 1, full + 1):
            missed = matched - resumed if chunks == matched else 0
            turn_end = chunks in turn_ends
            if keeps(Boundary(chunks, turn_end, missed)):
                boundaries.append(chunks)
                if turn_end or missed:
                    self._kept.add(_key(chain, chunks))
        self._policy.observe(reuse)
        return boundaries

    def _reuse(self, chain: BlockRuns, matched: int, local: int, full: int) -> Reuse:
        steps = self._kept.steps_to(_keys_backwards(chain, matched))
        kept = max(min(local, matched), 0 if steps is None else matched - steps)
        return Reuse(matched, kept, local, max(0, full - matched))


def _keys_backwards(chain: BlockRuns, chunks: int) -> Iterator[ChunkKey]:
    """Names of the first `chunks` chunks, the last one first."""
    for first, count in reversed(chain.head(chunks).runs):
        for number in range(first + count - 1, first - 1, -1):
            yield _named(number)


def _key(chain: BlockRuns, chunks: int) -> ChunkKey:
    return next(_keys_backwards(chain, chunks))


def _named(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))
