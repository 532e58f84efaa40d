"""Admission of requests to an engine: pages, the prefix cache, and the restore of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.pricing import EngineLoad
from ownership.simulator.machine.channel import Channel, Flow
from ownership.simulator.machine.request import Hits, LiveRequest
from ownership.simulator.machine.staging import SsdRead, SsdReads
from ownership.simulator.state.checkpoints import Retention
from ownership.simulator.state.chunks import longest_short_chunk
from ownership.simulator.state.memory import WorkerMemory
from ownership.simulator.state.restoring import Restore, Restorer
from ownership.simulator.state.runs import NO_MATCH, Run
from ownership.simulator.traces.block_runs import BlockRuns


class Admitted(Enum):
    """The outcome of a request for admission."""

    YES = "yes"
    STAGING = "staging"
    """State is read from SSD first; the request asks again when that has ended."""
    NO_PAGES = "no_pages"


class DecodePages:
    """The steps in which running decodes need their next pages.

    Decodes are grouped by the step in which they begin a new page, modulo `page_tokens`. Steps are
    counted from the engine's start. Every call is O(`page_tokens`).
    """

    def __init__(self, page_tokens: int) -> None:
        self._beginning = [0] * page_tokens
        """Number of decodes by the step, modulo a page's tokens, whose token begins a page."""
        self._decodes = 0

    def add(self, tokens: int, step: int) -> None:
        """Add a decode that holds `tokens` before `step`."""
        self._beginning[self._place(tokens, step)] += 1
        self._decodes += 1

    def remove(self, tokens: int, step: int) -> None:
        """Remove a decode that holds `tokens` before `step`."""
        self._beginning[self._place(tokens, step)] -= 1
        self._decodes -= 1

    def needed(self, step: int, steps: int) -> int:
        """Return the number of new pages in `steps` steps from `step` on."""
        ring = self._beginning
        if steps == 1:
            return ring[step % len(ring)]
        rounds, rest = divmod(steps, len(ring))
        first = step % len(ring)
        pages = rounds * self._decodes + sum(ring[first : first + rest])
        return pages + sum(ring[: max(0, first + rest - len(ring))])

    def fitting(self, step: int, steps: int, pages: int) -> int:
        """Return how many of `steps` steps from `step` on need no more than `pages` new pages."""
        if self.needed(step, steps) <= pages:
            return steps
        ring, done = self._beginning, 0
        rounds = pages // self._decodes
        done, pages = rounds * len(ring), pages - rounds * self._decodes
        while (pages := pages - ring[(step + done) % len(ring)]) >= 0:
            done += 1
        return done

    def _place(self, tokens: int, step: int) -> int:
        return (step - tokens) % len(self._beginning)


class RequestAdmission:
    """Takes and frees a worker's pages, and starts what a restore needs."""

    def __init__(
        self, memory: WorkerMemory, restorer: Restorer, costs: CostModel, ssd_channel: Channel,
        staged: Flow, retention: Retention,
    ) -> None:  # fmt: skip
        self._memory, self._restorer, self._retention = memory, restorer, retention
        footprint = memory.shape.footprint
        self._dram_pace = footprint.pace(costs.load.rates(Tier.DRAM))
        self._ssd_pace = footprint.pace(costs.load.rates(Tier.SSD))
        self._ssd_reads = SsdReads(memory, ssd_channel, staged, self._ssd_pace)

    def admit(
        self, request: LiveRequest, now_s: float, load: EngineLoad,
        begin_read: Callable[[SsdRead], None],
    ) -> Admitted:  # fmt: skip
        """Take pages for the whole prompt. `load`: the engine's decodes.

        `begin_read` is called if state has to be read from SSD first, and no other request has it
        read already; `end_read` has to be called when that has ended.
        """
        memory, shape = self._memory, self._memory.shape
        size, total = shape.chunk_tokens, request.prompt_tokens + request.generated
        match = memory.hbm.match(request.chain)
        limit = (request.prompt_tokens - 1) // size
        local = memory.resumable(match, limit)
        cached = memory.hbm.match(request.chain.head(local)) if local < match.chunks else match
        run = memory.hbm.cut(cached)
        memory.hbm.pin(run)
        if not memory.hbm.reserve(shape.request_bytes(total - local * size)):
            memory.hbm.unpin(run)
            return Admitted.NO_PAGES
        memory.hbm.mark(run, memory.next_tick())
        request.junction_chunks = min(match.chunks, limit) if match.chunks > local else 0
        dram, ssd = memory.stored(request.chain)
        request.stored_chunks = min(max(dram.chunks, ssd.chunks), limit)
        if request.matched_tokens < 0:
            request.matched_tokens = max(match.chunks, dram.chunks, ssd.chunks) * size
        if request.was_staged:
            ssd = NO_MATCH
        restore = None
        short = longest_short_chunk(
            request.short_chunks, request.chain, request.stored_chunks, memory.dram
        )
        if short is not None or max(dram.chunks, ssd.chunks) > local:
            load = replace(load, in_flight_bytes=self._bytes_ahead(request, now_s))
            restore = self._restorer.plan(
                dram, ssd, request.prompt_tokens, local, load, short=short
            )
        if restore is not None and restore.is_staged:
            memory.hbm.release(shape.request_bytes(total - local * size))
            memory.hbm.unpin(run)
            self._ssd_reads.wait(request, restore, dram, ssd, local, now_s, begin_read)
            return Admitted.STAGING
        self._start(request, run, local, restore, total)
        request.waited_s += now_s - request.queued_s
        request.admitted_s = now_s
        return Admitted.YES

    def end_read(self, read: SsdRead) -> list[LiveRequest]:
        """End a read from SSD; return the requests that have waited for it."""
        return self._ssd_reads.end(read)

    def cache_prompt(self, request: LiveRequest) -> None:
        """Add the full chunks of a computed prompt to the prefix cache."""
        memory, shape = self._memory, self._memory.shape
        full = request.chain.num_blocks
        cached_tokens = full * shape.chunk_tokens
        memory.hbm.release(shape.request_bytes(request.computed - request.cached_tokens))
        # The request's own pages first: a checkpoint must not take their place.
        kept = memory.hbm.reserve(shape.request_bytes(request.computed - cached_tokens))
        if request.pinned is not None:
            memory.hbm.unpin(request.pinned)
        run, chunks = self._cache_pages(request, request.chain, full)
        assert kept, "less than was just released fits"
        assert chunks == full, "chunks take no more than was just released"
        memory.hbm.pin(run)
        request.pinned, request.cached_tokens = run, cached_tokens

    def free_pages(self, request: LiveRequest, tokens: int) -> None:
        """Free the pages of a request that holds `tokens` tokens."""
        memory = self._memory
        memory.hbm.release(memory.shape.request_bytes(tokens - request.cached_tokens))
        if request.pinned is not None:
            memory.hbm.unpin(request.pinned)
            request.pinned = None

    def end(self, request: LiveRequest, tokens: int) -> None:
        """Free the pages of a finished request, and add those of its answer to the prefix cache."""
        self.free_pages(request, tokens)
        chain = request.answered_chain
        if chain is not None and not request.decodes_elsewhere:
            self._cache_pages(request, chain, chain.num_blocks)

    def grow(self, decodes: DecodePages, step: int, steps: int) -> int:
        """Take pages for all decodes over `steps` steps; return for how many there is room."""
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

    def shrink(self, decodes: DecodePages, step: int, steps: int) -> None:
        """Undo `grow` for steps that are not made."""
        self._memory.hbm.release(decodes.needed(step, steps) * self._memory.shape.page_bytes)

    def take_step_pages(self, prefilled_tokens: int) -> int:
        """Take the window pages that a step with a prefill needs; return the bytes taken."""
        hbm, shape = self._memory.hbm, self._memory.shape
        wanted_bytes = prefilled_tokens * shape.step_bytes_per_token
        return hbm.reserve_up_to(wanted_bytes) if wanted_bytes else 0

    def free_step_pages(self, taken_bytes: int) -> None:
        """Free the pages that `take_step_pages` took."""
        self._memory.hbm.release(taken_bytes)

    def _cache_pages(self, request: LiveRequest, chain: BlockRuns, chunks: int) -> tuple[Run, int]:
        checkpoints = []
        if self._memory.shape.has_checkpoints:
            checkpoints = self._retention.boundaries(
                request.prompt_tokens, request.junction_chunks, request.local_chunks,
                request.resumed_chunks, chunks,
            )  # fmt: skip
        return self._memory.cache_pages(chain, chunks, checkpoints)

    def _start(
        self, request: LiveRequest, run: Run, local: int, restore: Restore | None, total: int
    ) -> None:
        """Begin to compute, and count what the request did not have to compute."""
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
            # If the peer sent only a checkpoint, its chunk counts as the peer's, as in an engine.
            own = min(request.own_chunks, request.peer_chunks - self._memory.shape.has_checkpoints)
            fetched = min(request.peer_chunks * size, boundary_tokens) - max(local, own) * size
            gained = restore.resume_tokens - tokens
            hits.peer = min(max(0, fetched), gained)
            hits.ssd = min(request.staged_chunks * size, gained - hits.peer)
            hits.dram = gained - hits.peer - hits.ssd
        if request.is_handed_off and not request.generated:
            request.decoder_hits = hits
        elif not request.generated:
            request.hits = hits

    def _bytes_ahead(self, request: LiveRequest, now_s: float) -> dict[Tier, int]:
        """Return the bytes that are read before a restore of the request could be."""
        ahead_s, pace = self._ssd_reads.ahead_s(request.chain, now_s), self._ssd_pace
        return {Tier.SSD: int(ahead_s / pace.ahead_s_per_byte)} if pace.ahead_s_per_byte else {}
