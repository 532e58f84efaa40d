"""Which boundaries of a prompt keep a checkpoint: the package's policy, asked as an engine asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.planner.checkpoints import (
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

    def prompt(
        self, chain: BlockRuns, prompt_tokens: int, chunk_tokens: int, *,
        stored: int, local: int, resumed: int, fetched: int = 0,
    ) -> tuple[list[int], Reuse]:  # fmt: skip
        """Boundaries to keep of a prompt computed from chunk `resumed` on, in chunks; its reuse.

        `stored`: chunks that were; `local`: that the engine's own cache held; `fetched`: up to
        where a peer sent what was lacking, with its checkpoint there.
        """
        boundaries = []
        if fetched and fetched == resumed:
            self._kept.add(_key(chain, fetched))
        reuse = self._kept.reuse(stored, local, _keys_backwards(chain, stored))
        for chunks in range(resumed + 1, prompt_tokens // chunk_tokens + 1):
            missed = stored - resumed if chunks == stored else 0
            boundary = Boundary.of_prompt(chunks, prompt_tokens, chunk_tokens, missed)
            if self._policy.should_keep(boundary):
                boundaries.append(chunks)
                if boundary.turn_end or missed:
                    self._kept.add(_key(chain, chunks))
        return boundaries, reuse

    def ended(
        self, chain: BlockRuns | None, prompt_chunks: int, chunks: int, reuse: Reuse
    ) -> list[int]:
        """Boundaries to keep of what an answer filled behind its prompt's full chunks.

        `chain`: of the request's `chunks` chunks, answer included; None: nobody knows them.
        """
        self._policy.observe(replace(reuse, new=max(0, chunks - reuse.matched)))
        if chain is None or not chunks:
            return []
        self._kept.add(_key(chain, chunks))
        decoded = range(prompt_chunks + 1, chunks)
        return [n for n in decoded if self._policy.should_keep(Boundary(n, False, 0))] + [chunks]


def _keys_backwards(chain: BlockRuns, chunks: int) -> Iterator[ChunkKey]:
    """Names of the first `chunks` chunks, the last one first."""
    for first, count in reversed(chain.head(chunks).runs):
        for number in range(first + count - 1, first - 1, -1):
            yield _named(number)


def _key(chain: BlockRuns, chunks: int) -> ChunkKey:
    return next(_keys_backwards(chain, chunks))


def _named(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))
