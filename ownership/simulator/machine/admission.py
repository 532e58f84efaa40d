"""From waiting to running: pages for a prompt, what of it is cached, and what is restored."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.pricing import EngineLoad
from ownership.simulator.machine.channel import Channel, Flow
from ownership.simulator.machine.decode_pages import DecodePages
from ownership.simulator.machine.request import Hits, LiveRequest
from ownership.simulator.state.memory import WorkerMemory
from ownership.simulator.state.restoring import Restore, Restorer
from ownership.simulator.state.retention import Retention
from ownership.simulator.state.runs import NOTHING, Run
from ownership.simulator.state.short_chunks import longest
from ownership.simulator.traces.block_runs import BlockRuns


class Verdict(Enum):
    """What came of asking for admission."""

    ADMITTED = "admitted"
    STAGING = "staging"
    """State is read from SSD first; it asks again when that is done."""
    NO_PAGES = "no_pages"


class Admission:
    """Gives out a worker's pages, and takes them back."""

    def __init__(
        self, memory: WorkerMemory, restorer: Restorer, costs: CostModel, ssd: Channel,
        staged: Flow, retention: Retention,
    ) -> None:  # fmt: skip
        self._memory, self._restorer = memory, restorer
        self._ssd, self._staged, self._retention = ssd, staged, retention
        footprint = memory.shape.footprint
        self._dram_pace = footprint.pace(costs.load.rates(Tier.DRAM))
        self._ssd_pace = footprint.pace(costs.load.rates(Tier.SSD))

    def admit(
        self, request: LiveRequest, now_s: float, decodes: int,
        staged: Callable[[LiveRequest, float, Run | None], None],
    ) -> Verdict:  # fmt: skip
        """Take pages for the whole prompt. `staged(request, end_s, pinned)`: it is being staged."""
        memory, shape = self._memory, self._memory.shape
        size, total = shape.chunk_tokens, request.prompt_tokens + request.generated
        found = memory.hbm.find(request.chain)
        limit = (request.prompt_tokens - 1) // size
        local = memory.resumable(found, limit)
        cached = memory.hbm.find(request.chain.head(local)) if local < found.chunks else found
        run = memory.hbm.use(cached, memory.tick())
        memory.hbm.pin(run)
        if not memory.hbm.reserve(shape.request_bytes(total - local * size)):
            memory.hbm.unpin(run)
            return Verdict.NO_PAGES
        request.junction_chunks = min(found.chunks, limit) if found.chunks > local else 0
        dram, ssd = memory.stored(request.chain)
        request.stored_chunks = min(max(dram.chunks, ssd.chunks), limit)
        if request.matched_tokens < 0:
            matched = max(found.chunks, dram.chunks, ssd.chunks) * size
            request.matched_tokens = min(matched, request.prompt_tokens)
        if request.was_staged:
            ssd = NOTHING
        restore = None
        short = longest(request.shorts, request.chain, request.stored_chunks, memory.dram)
        if short is not None or max(dram.chunks, ssd.chunks) > local:
            load = EngineLoad(0, decodes, self._in_flight(now_s))
            restore = self._restorer.plan(
                dram, ssd, request.prompt_tokens, local, load, short=short
            )
        if restore is not None and restore.staged:
            memory.hbm.release(shape.request_bytes(total - local * size))
            memory.hbm.unpin(run)
            self._stage(request, restore, now_s, staged)
            return Verdict.STAGING
        self._start(request, run, local, restore, total)
        request.waited_s += now_s - request.queued_s
        request.admitted_s = now_s
        return Verdict.ADMITTED

    def prefilled(self, request: LiveRequest) -> None:
        """The prompt is computed: its full pages go to the prefix cache."""
        memory, shape = self._memory, self._memory.shape
        full = min(request.prompt_tokens // shape.chunk_tokens, request.num_chunks)
        cached_tokens = full * shape.chunk_tokens
        memory.hbm.release(shape.request_bytes(request.computed - request.cached_tokens))
        # What stays the request's own first: a checkpoint must not take its place.
        kept = memory.hbm.reserve(shape.request_bytes(request.computed - cached_tokens))
        if request.pinned is not None:
            memory.hbm.unpin(request.pinned)
        run, chunks = self._cache_pages(request, request.chain, full)
        assert kept, "less than was just released fits"
        assert chunks == full, "chunks take no more than was just released"
        memory.hbm.pin(run)
        request.pinned, request.cached_tokens = run, cached_tokens

    def let_go(self, request: LiveRequest, tokens: int) -> None:
        """The pages of the request's `tokens` are not needed any more."""
        memory = self._memory
        memory.hbm.release(memory.shape.request_bytes(tokens - request.cached_tokens))
        if request.pinned is not None:
            memory.hbm.unpin(request.pinned)
            request.pinned = None

    def ended(self, request: LiveRequest, tokens: int) -> None:
        """The request is done with its `tokens`; those of its answer go to the prefix cache too."""
        self.let_go(request, tokens)
        chain = request.answered_chain
        if chain is not None and not request.decodes_elsewhere:
            self._cache_pages(request, chain, chain.num_blocks)

    def _cache_pages(self, request: LiveRequest, chain: BlockRuns, chunks: int) -> tuple[Run, int]:
        checkpoints = []
        if self._memory.shape.has_checkpoints:
            checkpoints = self._retention.boundaries(
                request.prompt_tokens, request.junction_chunks, request.local_chunks,
                request.resumed_chunks, chunks,
            )  # fmt: skip
        return self._memory.cache_pages(chain, chunks, checkpoints)

    def grow(self, decodes: DecodePages, step: int, steps: int) -> int:
        """Pages for all decodes over `steps` steps, or as many steps as there is room for."""
        hbm, page_bytes = self._memory.hbm, self._memory.shape.page_bytes
        wanted_bytes = decodes.needed(step, steps) * page_bytes
        if not wanted_bytes:
            return steps
        free_bytes = hbm.make_room(wanted_bytes)
        if free_bytes < wanted_bytes:
            steps = decodes.fitting(step, steps, free_bytes // page_bytes)
            wanted_bytes = decodes.needed(step, steps) * page_bytes
        hbm.reserved_bytes += wanted_bytes
        return steps

    def hold_step(self, prefilled_tokens: int) -> int:
        """Pages that windows need while a step computes; how many bytes, for `release_step`."""
        hbm, shape = self._memory.hbm, self._memory.shape
        wanted_bytes = prefilled_tokens * shape.step_bytes_per_token
        held_bytes = min(wanted_bytes, hbm.make_room(wanted_bytes)) if wanted_bytes else 0
        hbm.reserved_bytes += held_bytes
        return held_bytes

    def release_step(self, held_bytes: int) -> None:
        """Undo `hold_step`."""
        self._memory.hbm.release(held_bytes)

    def shrink(self, decodes: DecodePages, step: int, steps: int) -> None:
        """Undo `grow`."""
        self._memory.hbm.release(decodes.needed(step, steps) * self._memory.shape.page_bytes)

    def _start(
        self, request: LiveRequest, run: Run, local: int, restore: Restore | None, total: int
    ) -> None:
        size, tokens = self._memory.shape.chunk_tokens, local * self._memory.shape.chunk_tokens
        request.pinned, request.cached_tokens = run, tokens
        request.local_chunks, request.restore = local, restore
        request.computed, request.total, request.load_s = tokens, total, 0.0
        hits = Hits(hbm=tokens)
        if restore is not None:
            request.computed = restore.resume_tokens
            pace = self._dram_pace
            boundary_tokens = restore.boundary_tokens(size)
            request.load_s = pace.latency_s + (boundary_tokens - tokens) * pace.token_s
            request.load_s += restore.dram_checkpoints * pace.checkpoint_s
            # A checkpoint alone makes its chunk the peer's, as an engine counts.
            own = min(request.own_chunks, request.peer_chunks - self._memory.shape.has_checkpoints)
            fetched = min(request.peer_chunks * size, boundary_tokens) - max(local, own) * size
            gained = restore.resume_tokens - tokens
            staged = request.staged_chunks * size
            if request.staged_stretches:  # what continues what was fetched
                last = min(boundary_tokens, restore.resume_tokens)
                parts = ((max(s * size, tokens), e * size) for s, e in request.staged_stretches)
                staged = sum(max(0, min(end, last) - start) for start, end in parts)
                fetched = min(request.peer_chunks * size, last) - max(local, own) * size - staged
            hits.peer = min(max(0, fetched), gained)
            hits.ssd = min(staged, gained - hits.peer)
            hits.dram = gained - hits.peer - hits.ssd
        if request.handed_off and not request.generated:
            request.decoder_hits = hits
        elif not request.generated:
            request.hits = hits

    def _stage(
        self, request: LiveRequest, restore: Restore, now_s: float,
        staged: Callable[[LiveRequest, float, Run | None], None],
    ) -> None:  # fmt: skip
        """Read from SSD into DRAM what the plan wants of it."""
        end_s = self.read_ssd(request, restore, now_s)
        self._memory.dram.pin(run := self.hold_staged(request, restore))
        request.waited_s += now_s - request.queued_s
        request.staged_s += end_s - now_s
        staged(request, end_s, run)

    def read_ssd(self, request: LiveRequest, restore: Restore, now_s: float) -> float:
        """Begin to read what a plan takes from SSD; when that has ended."""
        memory, pace = self._memory, self._ssd_pace
        size = memory.shape.chunk_tokens
        seconds = pace.latency_s + restore.ssd_chunks * size * pace.token_s
        seconds += restore.ssd_checkpoints * pace.checkpoint_s
        moved = memory.shape.moved_bytes(restore.ssd_chunks, restore.ssd_checkpoints)
        checkpoints = [restore.boundary_chunks] if restore.ssd_checkpoints else []
        self._staged.add(restore.ssd_chunks, checkpoints)
        request.was_staged, request.staged_chunks = True, restore.ssd_chunks
        request.staged_stretches = restore.ssd_stretches
        return self._ssd.start(now_s, seconds, moved)

    def hold_staged(self, request: LiveRequest, restore: Restore) -> Run:
        """Give what is read from SSD its slots in DRAM, right behind what is there."""
        memory, chunks = self._memory, restore.own_chunks
        checkpoints = [restore.boundary_chunks] if restore.ssd_checkpoints else []
        chain = request.chain.head(chunks)
        run, _, _ = memory.dram.add(chain, chunks, checkpoints, memory.tick())
        return run

    def _in_flight(self, now_s: float) -> dict[Tier, int]:
        pending_s, pace = self._ssd.pending_s(now_s), self._ssd_pace.ahead_s_per_byte
        return {Tier.SSD: int(pending_s / pace)} if pending_s and pace else {}
