"""The price of a step's prefill on every worker, as arrays over the fleet.

By the same models and the same rules as the planner's `pricing`: what is staged (from SSD or a
peer to DRAM) is hidden by the queue; what goes from DRAM to pages is hidden, layer by layer, by
the first step's compute. There one worker's many boundaries are priced, here many workers' few:
all of them in one pass, for a numpy call costs more than the numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ownership.scheduling.fleet import FleetView, Floats, WorkerTable
from ownership.scheduling.step import Step
from ownership.scheduling.weights import PlacementWeights

_GIB = 1 << 30
_DEPTHS = 3
"""Where a worker can resume from what it has itself: HBM, DRAM, SSD."""


class PrefillTerms(NamedTuple):
    """Seconds of one worker's part in serving a step. None hides another."""

    queue_s: float
    network_s: float
    restore_s: float
    compute_s: float
    delay_s: float
    """By which its running decodes are late, all together."""
    pages_s: float
    """For which the prompt's pages are held."""
    copy_s: float
    """Price of what is then held twice."""


class PrefillPricing:
    """One step's prefill over the fleet, by the figures of this moment.

    Rows are routes to get the prompt's state onto a worker: resuming from its own HBM, DRAM or
    SSD (`local_rows`), from a source's DRAM (`source_rows`, in the order of `sources`), and,
    last, joining with what another worker has just computed. Columns are workers.
    """

    def __init__(
        self,
        step: Step,
        fleet: FleetView,
        table: WorkerTable,
        weights: PlacementWeights,
        sources: Sequence[int] = (),
    ) -> None:
        footprint = fleet.footprint
        self.sources = list(sources)
        self._table, self._links, self._stall = table, fleet.links, weights.stall
        self._tokens = float(step.prompt_tokens)
        self._state_bytes = footprint.all_token_bytes, footprint.all_checkpoint_bytes
        self._per_layer = 1.0 + 1.0 / footprint.num_layers
        page_bytes = footprint.page_bytes_per_token
        self.hbm = weights.hbm_s_per_gib_s * page_bytes * self._tokens / _GIB
        """Seconds of cost for each second that the prompt's pages are held."""
        self._hbm_held, self.readable, self._on_ssd = self._held(step, fleet)
        self.resident: Floats = np.maximum(self._hbm_held, self.readable)
        """[workers] how many tokens each has in HBM or DRAM."""
        needed = page_bytes * (self._tokens + step.output_tokens)
        self.queue_s = self._queued() + self._page_wait(needed)
        self._depths = _DEPTHS if step.prefixes else 1
        self.resume = self._resume()
        """[rows, workers] where the engine computes from, in tokens."""
        self._copy_s = self._copies(weights.copy)
        self._price()

    @property
    def local_rows(self) -> slice:
        """Rows that read nothing from others."""
        return slice(0, self._depths)

    @property
    def source_rows(self) -> slice:
        """One row for each source."""
        return slice(self._depths, self._depths + len(self.sources))

    def row_of(self, source: int) -> int:
        """The row that reads from a source. ValueError if it was not among the sources."""
        return self._depths + self.sources.index(source)

    def handoff_s(self) -> Floats:
        """[prefill, decode] or [1, decode] seconds of reading what another has just computed."""
        return self._network(self._tokens - 1.0 - self.resident, None)

    def saved_by_reading_s(self) -> Floats:
        """[workers] seconds by which reading from the first source beats computing it here."""
        row = self._depths
        saved_s: Floats = self._compute_s[0] - (self._compute_s[row] + self._network_s[row])
        return saved_s

    def parts(self, row: int, worker: int) -> PrefillTerms:
        """One row's of one worker."""
        queue_s, network_s, ssd_s, exposed_s, compute_s = (
            x.item(worker)
            for x in (
                self.queue_s, self._network_s[row], self._ssd_s[row], self._exposed_s[row],
                self._compute_s[row],
            )
        )  # fmt: skip
        return PrefillTerms(
            queue_s,
            max(network_s - queue_s, 0.0),
            max(ssd_s - max(queue_s, network_s), 0.0) + exposed_s,
            compute_s,
            self._delay_s[row].item(worker),
            exposed_s + compute_s,
            self._copy_s[0 if row >= 0 else 1].item(worker),
        )

    def _price(self) -> None:
        """Compute, loads, and what they cost others; [rows, workers] each."""
        table, tokens, size = self._table, self._tokens, self._table.step_tokens
        resume, rest = self.resume, tokens - self.resume
        steps = np.ceil(rest / size)
        self._compute_s = self._polynomial(rest, table.token_s, table.attention_s)
        self._compute_s += steps * table.step_s
        loaded = resume - self._hbm_held
        dram_s = loaded * table.dram_token_s + (table.dram_checkpoint_s + table.dram_latency_s)
        dram_s *= loaded > 0.0
        full_s = table.step_s + size * (table.token_s + 0.5 * size * table.attention_s)
        first_s = np.minimum(resume * (size * table.attention_s) + full_s, self._compute_s)
        self._exposed_s = dram_s * self._per_layer - np.minimum(dram_s, first_s)
        self._delay_s = self._polynomial(rest, table.delay_token_s, table.delay_attention_s)
        self._delay_s += steps * table.mixed_s
        self._delay_s *= table.running
        self.active_s: Floats = self._exposed_s + self._compute_s
        """From the first page filled to the last token computed."""
        self.price_s: Floats = self.hbm * self.active_s + self._stall * self._delay_s
        """What others pay."""
        self.price_s[:-1] += self._copy_s[0]
        self.price_s[-1] += self._copy_s[1]
        self._network_s, self._ssd_s = np.zeros((2, *resume.shape))
        if self._depths == _DEPTHS:
            self._ssd_s[_DEPTHS - 1] = self._from_ssd()
        staged_s = self._ssd_s
        if self.sources:
            lacking = resume[self.source_rows] - self.resident
            self._network_s[self.source_rows] = self._network(lacking, self.sources)
            staged_s = staged_s + self._network_s
        self.ready_s: Floats = np.maximum(staged_s, self.queue_s) + self.active_s
        """Until the prompt is computed; infinite where a source has nothing that is lacking."""
        if self.sources:
            self.ready_s[self.source_rows][lacking <= 0.0] = np.inf

    def _polynomial(self, rest: Floats, token_s: Floats, attention_s: Floats) -> Floats:
        """[rows, workers] token_s rest + attention_s `attention_work` of the rest."""
        half_s = 0.5 * attention_s
        # attention_work of the rest is rest (tokens + resume) / 2
        seconds: Floats = self.resume * half_s
        seconds += token_s + half_s * self._tokens
        seconds *= rest
        return seconds

    def _resume(self) -> Floats:
        rows = np.empty((self._depths + len(self.sources) + 1, len(self.resident)))
        rows[0] = self._hbm_held
        if self._depths == _DEPTHS:
            rows[1] = self.resident
            np.maximum(self.resident, self._on_ssd, out=rows[2])
        if self.sources:
            rows[self.source_rows] = self.readable[self.sources][:, None]
            np.maximum(rows, self._hbm_held, out=rows)
        rows[-1] = self._tokens - 1.0
        return rows

    def _from_ssd(self) -> Floats:
        """[workers] seconds of staging what is on SSD only."""
        table, lacking = self._table, self.resume[_DEPTHS - 1] - self.resident
        overhead_s = table.ssd_latency_s + table.ssd_bytes * table.ssd_ahead_s
        moved_s: Floats = lacking * table.ssd_token_s
        moved_s += table.ssd_checkpoint_s + overhead_s
        moved_s *= lacking > 0.0
        return moved_s

    def _network(self, tokens: Floats, sources: list[int] | None) -> Floats:
        """[sources, workers] seconds of reading so many tokens and a checkpoint.

        None: from every worker; [1, workers] where it makes no difference which.
        """
        table = self._table
        outgoing = table.outgoing_bytes if sources is None else table.outgoing_bytes[sources]
        overhead_s = table.peer_latency_s + table.peer_bytes * table.peer_ahead_s
        moved_s = tokens * table.peer_token_s + table.peer_checkpoint_s
        pace: Floats = table.peer_ahead_s
        if self._links is not None:
            latency_s, link = self._links if sources is None else self._links[:, sources]
            token_bytes, checkpoint_bytes = self._state_bytes
            moved_s = np.maximum(moved_s, (tokens * token_bytes + checkpoint_bytes) * link)
            moved_s += latency_s
            pace = np.maximum(pace, link)
        seconds: Floats = moved_s + overhead_s
        if outgoing.any():
            seconds = seconds + outgoing[:, None] * pace
        return np.atleast_2d(seconds)

    def _held(self, step: Step, fleet: FleetView) -> Floats:
        """[3, workers] tokens in HBM, DRAM, DRAM and SSD; the last token is always computed."""
        held = np.zeros((3, len(fleet)))
        for name, prefix in step.prefixes.items():
            worker = fleet.index.get(name)
            if worker is not None:
                held[:, worker] = prefix
        return np.minimum(held, self._tokens - 1.0, out=held)

    def _copies(self, weight: float) -> Floats:
        """[2, workers] price of what a step there makes a second copy of: of what others hold,
        and of all that another worker has just computed. By the linear part of computing it."""
        own = np.maximum(self.resident, self._on_ssd)
        copied: Floats = np.array((own.max() - own, self._tokens - 1.0 - own))
        copied *= weight * self._table.token_s
        return copied

    def _queued(self) -> Floats:
        """[workers] `CostModel.queue_s`."""
        table = self._table
        steps = np.ceil(table.queued_tokens / table.step_tokens)
        queued_s: Floats = steps * table.step_s + table.queued_tokens * table.token_s
        return queued_s

    def _page_wait(self, needed_bytes: float) -> Floats | float:
        """[workers] seconds until there are pages; infinite where there never are.

        What is cached and not running is free, this prompt's prefix too. By Little's law running
        requests let go of used bytes / residence a second.
        """
        table = self._table
        free = table.hbm_bytes - table.hbm_used
        if free.min() >= needed_bytes:
            return 0.0
        released_s = table.residence_s / np.maximum(table.hbm_used, 1.0)
        waited_s = np.maximum(needed_bytes - free, 0.0) * released_s
        return np.where(needed_bytes > table.hbm_bytes, np.inf, waited_s)
