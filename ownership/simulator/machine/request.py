"""A request on its way through a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_connector.planner.checkpoints import Reuse
from ownership.simulator.state.restoring import Restore
from ownership.simulator.state.runs import Run
from ownership.simulator.state.short_chunks import ShortChunk
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(slots=True, eq=False)
class Hits:
    """Prompt tokens that were not computed, by where their state came from. Of a remote prefill
    where it was prefilled: what is handed off then was computed for it."""

    hbm: int = 0
    dram: int = 0
    ssd: int = 0
    peer: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.hbm + self.dram + self.ssd + self.peer


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What a request asks for, where it stands, and what it has waited for so far."""

    session: int
    index: int
    """Its place in the session."""
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """To be decoded; at least 1."""
    chain: BlockRuns
    """Its prompt's chunks."""
    num_chunks: int
    """The last may be partial: it takes a slot, but nothing can resume behind it."""
    answered_chain: BlockRuns | None = None
    """The full chunks of the prompt with its answer behind it, where they are known and kept."""
    short: ShortChunk | None = None
    """The token at which it is resumed after a handoff, unless a full chunk ends there."""
    shorts: Sequence[ShortChunk] = ()
    """All that its prompt begins with, this one among them."""
    was_decided: bool = False
    """Where it runs; once more if a worker dies."""
    decodes_elsewhere: bool = False
    """It is only prefilled here, and handed off."""
    handed_off: bool = False
    """It was prefilled elsewhere."""
    expected_tokens: int = 0
    """What was thought to be left to compute when it was queued."""

    # Where it stands at its worker.
    reuse: Reuse | None = None
    """What it found stored there."""
    computed: int = 0
    """Tokens whose state is in pages."""
    total: int = 0
    """Tokens to have in pages before the next one is sampled."""
    generated: int = 0
    step_tokens: int = 0
    """Computed by the step under way."""
    finish_step: int = 0
    pinned: Run | None = None
    cached_tokens: int = 0
    """Of its pages, those that belong to the prefix cache."""
    local_chunks: int = 0
    """Of the engine's own prefix cache."""
    junction_chunks: int = 0
    """Up to which its pages were cached, where that is further than it could resume."""
    stored_chunks: int = 0
    """Leading chunks that were in DRAM or on SSD."""
    restore: Restore | None = None
    load_s: float = 0.0
    """From DRAM to pages, still to be done."""
    was_staged: bool = False
    staged_chunks: int = 0
    """Read from SSD for it."""
    staged_stretches: Sequence[tuple[int, int]] = ()
    """Where, if a peer was read for what they continue."""
    own_chunks: int = 0
    """Chunks that its worker had in DRAM before a peer was read."""
    peer_chunks: int = 0
    """Chunks up to which its worker's DRAM was filled by a peer, for it; a short one counts."""
    peer_checkpoint: bool = False
    """Whether the peer sent a checkpoint with them."""

    @property
    def resumed_chunks(self) -> int:
        """Before which nothing was computed."""
        return self.restore.boundary_chunks if self.restore else self.local_chunks

    # What came of it.
    matched_tokens: int = -1
    """Leading tokens that were anywhere at its worker when it was admitted first."""
    hits: Hits = field(default_factory=Hits)
    decoder_hits: Hits | None = None
    """Of a remote prefill: what its decoder did not compute, nearly all of it."""
    queued_s: float = 0.0
    """When it was last queued."""
    waited_s: float = 0.0
    """Queueing, all together."""
    network_s: float = 0.0
    staged_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = -1.0
    preemptions: int = 0

    def hand_off(self) -> None:
        """It was prefilled: from now on it is its decoder's, where nothing was read for it yet."""
        self.decodes_elsewhere, self.handed_off = False, True
        self.was_staged, self.staged_stretches = False, ()
        self.peer_checkpoint = False
        self.staged_chunks = self.own_chunks = self.peer_chunks = 0

    def start_over(self) -> None:
        """Its worker died: nothing of it is left but what was told."""
        self.computed = self.total = self.generated = self.step_tokens = 0
        self.pinned = self.restore = self.reuse = None
        self.was_staged = self.decodes_elsewhere = self.handed_off = False
        self.peer_checkpoint = False
        self.staged_stretches = ()
        self.staged_chunks = self.own_chunks = self.peer_chunks = 0
