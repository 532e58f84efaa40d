"""A request on its way through a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_connector.planner.checkpoints import Reuse
from ownership.simulator.state.chunks import ShortChunk
from ownership.simulator.state.restoring import Restore
from ownership.simulator.state.runs import Run
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(slots=True, eq=False)
class Hits:
    """Prompt tokens that were not computed, by the tier their state came from.

    Those of a remote prefill are counted at the worker that prefilled.
    """

    hbm: int = 0
    dram: int = 0
    ssd: int = 0
    peer: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with its progress. Lengths are tokens, `_chunks` are counted from the start."""

    session: int
    index: int
    """Its place in the session."""
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """Tokens to decode, at least 1."""
    chain: BlockRuns
    """The full chunks of its prompt."""
    answered_chain: BlockRuns | None = None
    """The full chunks of the prompt and its answer, if they are known and kept."""
    handoff_chunk: ShortChunk | None = None
    """The short chunk at whose end a handoff resumes; None: a full chunk ends there."""
    short_chunks: Sequence[ShortChunk] = ()
    """All short chunks on its prompt, `handoff_chunk` included."""
    decodes_elsewhere: bool = False
    """It is only prefilled here, and handed off."""
    is_handed_off: bool = False
    """It was prefilled elsewhere."""
    expected_tokens: int = 0
    """The tokens left to compute, as estimated when it was queued."""

    # Progress at its worker.
    reuse: Reuse | None = None
    computed: int = 0
    """Tokens whose state is in pages."""
    total: int = 0
    """Tokens to have in pages before the next one is sampled."""
    generated: int = 0
    step_tokens: int = 0
    """Tokens computed by the current step."""
    finish_step: int = 0
    preempted_s: float = 0.0
    """Time of its last token before it was preempted."""
    pinned: Run | None = None
    cached_tokens: int = 0
    """Tokens whose pages belong to the prefix cache."""
    local_chunks: int = 0
    """Chunks found in the engine's prefix cache."""
    junction_chunks: int = 0
    """Chunks whose pages were cached, if that is more than it could resume from; else 0."""
    stored_chunks: int = 0
    """Chunks that were in DRAM or on SSD."""
    restore: Restore | None = None
    load_s: float = 0.0
    """Seconds of loading from DRAM to pages that are left."""
    was_staged: bool = False
    staged_chunks: int = 0
    """Chunks read from SSD for it."""
    own_chunks: int = 0
    """Chunks that its worker had in DRAM before it read from a peer."""
    peer_chunks: int = 0
    """Chunks in its worker's DRAM after a peer was read for it, a short one included; 0: none."""

    # Results.
    matched_tokens: int = -1
    """Leading tokens that were in any tier of its worker when it was first admitted."""
    hits: Hits = field(default_factory=Hits)
    decoder_hits: Hits | None = None
    """Tokens that the decoder of a remote prefill did not compute: nearly all."""
    queued_s: float = 0.0
    """Time when it was last queued."""
    waited_s: float = 0.0
    """Seconds in queues."""
    network_s: float = 0.0
    staged_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = -1.0
    alone_s: float = 0.0
    """Its seconds on an idle engine that has what its session computed; see `StepTimes`."""

    @property
    def resumed_chunks(self) -> int:
        """Number of leading chunks that were not computed."""
        return self.restore.boundary_chunks if self.restore else self.local_chunks

    def hand_off(self) -> None:
        """Change from the worker that prefilled it to its decoder."""
        self.decodes_elsewhere, self.is_handed_off = False, True
        self.was_staged = False
        self.staged_chunks = self.own_chunks = self.peer_chunks = 0
