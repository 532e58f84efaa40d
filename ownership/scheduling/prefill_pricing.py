"""The price of a step's prefill on every worker, as arrays over the fleet.

It follows the models and rules of the planner's `pricing`: the queue hides staging (from SSD or a
peer to DRAM), and the first step's compute hides, layer by layer, the copies from DRAM to pages.
The planner prices many boundaries of one worker; here few boundaries of many workers are priced,
all in one pass, because a numpy call costs more than the numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ownership.scheduling.fleet import FleetView, Floats, WorkerTable
from ownership.scheduling.fullness import copy_factors
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step import Step
from ownership.scheduling.weights import PlacementWeights

_DEPTHS = 3
"""Tiers from which a worker can resume: HBM, DRAM, SSD."""


class PrefillTerms(NamedTuple):
    """Seconds of one worker's part in serving a step, without the hidden ones."""

    queue_s: float
    network_s: float
    restore_s: float
    compute_s: float
    delay_s: float
    """Delay of its running decodes, summed over them."""
    copy_s: float
    """Price of state that two workers have from then on."""
    role_s: float
    """Price of delaying decodes at a worker that leans to them."""


class PrefillPricing:
    """One step's prefill over the fleet, by the present figures.

    Rows are ways to get the prompt's state onto a worker: resuming from its own HBM, DRAM or
    SSD (`local_rows`), from a source's DRAM (`source_rows`, in the order of `sources`), and, last,
    from what another worker has just computed. Columns are workers.
    """

    def __init__(
        self,
        step: Step,
        fleet: FleetView,
        table: WorkerTable,
        weights: PlacementWeights,
        sources: Sequence[int] = (),
        leaning: Leaning | None = None,
    ) -> None:
        footprint = fleet.footprint
        self.sources = list(sources)
        self._table, self._links, self._stall = table, fleet.links, weights.stall
        self._leaning = leaning
        self._tokens = float(step.prompt_tokens)
        self._has_session = bool(step.session_id)
        self._state_bytes = footprint.all_token_bytes, footprint.all_checkpoint_bytes
        self._per_layer = 1.0 + 1.0 / footprint.num_layers
        page_bytes = footprint.page_bytes_per_token
        self._in_hbm, self.readable, self._on_ssd = self._prefixes(step, fleet)
        self.resident: Floats = np.maximum(self._in_hbm, self.readable)
        """`[workers]`: tokens that each has in HBM or DRAM."""
        prompt_bytes = page_bytes * self._tokens
        self.queue_s = self._queued() + self._page_wait(
            prompt_bytes, prompt_bytes + page_bytes * step.output_tokens
        )
        self._depths = _DEPTHS if step.prefixes else 1
        self.resume = self._resume()
        """`[rows, workers]`: the token from which the engine computes."""
        self._copy_s = self._copies(weights)
        self._price()

    @property
    def local_rows(self) -> slice:
        """The rows that read nothing from other workers."""
        return slice(0, self._depths)

    @property
    def source_rows(self) -> slice:
        """One row for each source."""
        return slice(self._depths, self._depths + len(self.sources))

    def row_of(self, source: int) -> int:
        """Return the row that reads from a source. Raises ValueError if it is not one."""
        return self._depths + self.sources.index(source)

    @cached_property
    def handoff_s(self) -> Floats:
        """`[prefill, decode]` or `[1, decode]`: seconds of reading what another computed."""
        return self._network(self._tokens - 1.0 - self.resident, None)

    def terms(self, row: int, worker: int) -> PrefillTerms:
        """Return the terms of one row of one worker."""
        queue_s, network_s, ssd_s, exposed_s, compute_s, delay_s = (
            x.item(worker)
            for x in (
                self.queue_s, self._network_s[row], self._ssd_s[row], self._exposed_s[row],
                self._compute_s[row], self._delay_s[row],
            )
        )  # fmt: skip
        leaning = 0.0 if self._leaning is None else self._leaning.delay.item(worker) - 1.0
        return PrefillTerms(
            queue_s,
            max(network_s - queue_s, 0.0),
            max(ssd_s - max(queue_s, network_s), 0.0) + exposed_s,
            compute_s,
            delay_s,
            self._copy_s[0 if row >= 0 else 1].item(worker),
            self._stall * delay_s * leaning,
        )

    def _price(self) -> None:
        """Compute time, load time and the price for others, each `[rows, workers]`."""
        table, tokens, size = self._table, self._tokens, self._table.step_tokens
        resume, rest = self.resume, tokens - self.resume
        steps = np.ceil(rest / size)
        self._compute_s = self._polynomial(rest, table.token_s, table.attention_s)
        self._compute_s += steps * table.step_s
        loaded = resume - self._in_hbm
        dram_s = loaded * table.dram_token_s + (table.dram_checkpoint_s + table.dram_latency_s)
        dram_s *= loaded > 0.0
        full_s = table.step_s + size * (table.token_s + 0.5 * size * table.attention_s)
        first_s = np.minimum(resume * (size * table.attention_s) + full_s, self._compute_s)
        self._exposed_s = dram_s * self._per_layer - np.minimum(dram_s, first_s)
        self._delay_s = self._polynomial(rest, table.delay_token_s, table.delay_attention_s)
        self._delay_s += steps * table.mixed_s
        self._delay_s *= table.running
        self.active_s: Floats = self._exposed_s + self._compute_s
        """Seconds from the first page filled to the last token computed."""
        self.price_s: Floats = self._stall * self._delay_s
        """The price for other requests."""
        if self._leaning is not None:
            self.price_s *= self._leaning.delay
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
        """Until the prompt is computed; infinite if a source has nothing that is missing."""
        if self.sources:
            self.ready_s[self.source_rows][lacking <= 0.0] = np.inf

    def _polynomial(self, rest: Floats, token_s: Floats, attention_s: Floats) -> Floats:
        """Return `[rows, workers]`: token_s x rest + attention_s x `attention_work` of the rest."""
        half_s = 0.5 * attention_s
        # attention_work of the rest is rest (tokens + resume) / 2
        seconds: Floats = self.resume * half_s
        seconds += token_s + half_s * self._tokens
        seconds *= rest
        return seconds

    def _resume(self) -> Floats:
        rows = np.empty((self._depths + len(self.sources) + 1, len(self.resident)))
        rows[0] = self._in_hbm
        if self._depths == _DEPTHS:
            rows[1] = self.resident
            np.maximum(self.resident, self._on_ssd, out=rows[2])
        if self.sources:
            rows[self.source_rows] = self.readable[self.sources][:, None]
            np.maximum(rows, self._in_hbm, out=rows)
        rows[-1] = self._tokens - 1.0
        return rows

    def _from_ssd(self) -> Floats:
        """Return `[workers]`: seconds of staging what is only on SSD."""
        table, lacking = self._table, self.resume[_DEPTHS - 1] - self.resident
        overhead_s = table.ssd_latency_s + table.ssd_bytes * table.ssd_ahead_s
        moved_s: Floats = lacking * table.ssd_token_s
        moved_s += table.ssd_checkpoint_s + overhead_s
        moved_s *= lacking > 0.0
        return moved_s

    def _network(self, tokens: Floats, sources: list[int] | None) -> Floats:
        """Return `[sources, workers]`: seconds of reading so many tokens and a checkpoint.

        `sources` None: from every worker; the result is `[1, workers]` if all are equal.
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

    def _prefixes(self, step: Step, fleet: FleetView) -> Floats:
        """Return `[3, workers]`: tokens in HBM, in DRAM, in DRAM or SSD.

        The last token of a prompt is always computed.
        """
        tokens = np.zeros((3, len(fleet)))
        for name, prefix in step.prefixes.items():
            worker = fleet.index.get(name)
            if worker is not None:
                tokens[:, worker] = prefix
        return np.minimum(tokens, self._tokens - 1.0, out=tokens)

    def _copies(self, weights: PlacementWeights) -> Floats:
        """Return `[2, workers]`: price of the second copies that a step there makes.

        First of what other workers have, then of all that another worker has just computed. The
        price is that of computing it, times kappa: what is handed off never costs less than
        `weights.copy`.
        """
        own = np.maximum(self.resident, self._on_ssd)
        end = np.array(((own.max(),), (self._tokens - 1.0,)))
        token_s = self._table.token_s + (0.5 * self._table.attention_s) * (end + own)
        copied: Floats = (end - own) * token_s
        if not (weights.fullness and self._has_session):
            copied *= weights.copy
            return copied
        prices = weights.copy * copy_factors(self._table, self._state_bytes[0])
        copied[0] *= prices
        copied[1] *= np.maximum(prices, weights.copy)
        return copied

    def _queued(self) -> Floats:
        """Return `[workers]`: `CostModel.queue_s`."""
        table = self._table
        steps = np.ceil(table.queued_tokens / table.step_tokens)
        queued_s: Floats = steps * table.step_s + table.queued_tokens * table.token_s
        return queued_s

    def _page_wait(self, prompt_bytes: float, needed_bytes: float) -> Floats | float:
        """Return `[workers]`: seconds until there are enough pages; infinite if there never are.

        The answer's length is only expected: a prompt that fits alone is not given up for it.

        Pages that are cached and not in use are free, this prompt's prefix included. By Little's
        law, running requests free used bytes / residence per second.
        """
        table = self._table
        free = table.hbm_bytes - table.hbm_used
        if free.min() >= needed_bytes:
            return 0.0
        released_s = table.residence_s / np.maximum(table.hbm_used, 1.0)
        wanted = np.minimum(needed_bytes, table.hbm_bytes)
        waited_s = np.maximum(wanted - free, 0.0) * released_s
        return np.where(prompt_bytes > table.hbm_bytes, np.inf, waited_s)
