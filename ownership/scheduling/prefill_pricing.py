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
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step import Step
from ownership.scheduling.weights import PlacementWeights

_DEPTHS = 3
"""Tiers from which a worker can resume: HBM, DRAM, SSD. The last ones are left out if they have
nothing more."""


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
        self.queue_s = self._queue_s(prompt_bytes, prompt_bytes + page_bytes * step.output_tokens)
        self._depths = _depths(step)
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
        queue_s, delay_s = self.queue_s.item(worker), self._delay_s.item(row, worker)
        source, ssd_s, network_s = row - self._depths, 0.0, 0.0
        if 0 <= source < len(self.sources):
            network_s = self._network_s.item(source, worker)
        elif row == _DEPTHS - 1:
            ssd_s = self._ssd_s.item(worker)
        leaning = 0.0 if self._leaning is None else self._leaning.delay.item(worker) - 1.0
        return PrefillTerms(
            queue_s,
            max(network_s - queue_s, 0.0),
            max(ssd_s - queue_s, 0.0) + self._exposed_s.item(row, worker),
            self._compute_s.item(row, worker),
            delay_s,
            self._copy_s.item(0 if row >= 0 else 1, worker),
            self._stall * delay_s * leaning,
        )

    def _price(self) -> None:
        """Compute time, load time and the price for others, each `[rows, workers]`."""
        table, machine, fixed = self._table, self._table.machine, self._table.machine_terms
        resume, rest = self.resume, self._tokens - self.resume
        half_s = fixed.half_attention_s
        both_s = resume * half_s  # `attention_work` of the rest is rest (tokens + resume) / 2
        both_s += fixed.prefill_token_s + half_s * self._tokens
        both_s *= rest
        both_s += np.ceil(rest / machine.step_tokens) * fixed.prefill_step_s
        self._compute_s, self._delay_s = both_s
        self._delay_s *= table.running
        loaded = resume - self._in_hbm
        dram_s = loaded * machine.dram_token_s
        dram_s += fixed.dram_start_s
        dram_s *= loaded > 0.0
        first_s = resume * fixed.context_step_s
        first_s += fixed.full_step_s
        np.minimum(first_s, self._compute_s, out=first_s)
        np.minimum(dram_s, first_s, out=first_s)
        self._exposed_s = dram_s * self._per_layer
        self._exposed_s -= first_s
        self.active_s: Floats = self._exposed_s + self._compute_s
        """Seconds from the first page filled to the last token computed."""
        self.price_s: Floats = self._stall * self._delay_s
        """The price for other requests."""
        if self._leaning is not None:
            self.price_s *= self._leaning.delay
        self.price_s[:-1] += self._copy_s[0]
        self.price_s[-1] += self._copy_s[1]
        self.ready_s: Floats = self.active_s + self.queue_s
        """Until the prompt is computed; infinite if a source has nothing that is missing."""
        if self._depths == _DEPTHS:
            self._ssd_s = self._from_ssd()
            staged_s = np.maximum(self._ssd_s, self.queue_s)
            self.ready_s[_DEPTHS - 1] = staged_s + self.active_s[_DEPTHS - 1]
        if self.sources:
            at = self.source_rows
            lacking = resume[at] - self.resident
            self._network_s = self._network(lacking, self.sources)
            fetched_s = np.maximum(self._network_s, self.queue_s)
            fetched_s += self.active_s[at]
            np.putmask(fetched_s, lacking <= 0.0, np.inf)
            self.ready_s[at] = fetched_s

    def _resume(self) -> Floats:
        rows = np.empty((self._depths + len(self.sources) + 1, len(self.resident)))
        rows[0] = self._in_hbm
        if self._depths > 1:
            rows[1] = self.resident
        if self._depths == _DEPTHS:
            np.maximum(self.resident, self._on_ssd, out=rows[2])
        if self.sources:
            readable = self.readable.take(self.sources)
            np.maximum(readable[:, None], self._in_hbm, out=rows[self.source_rows])
        rows[-1] = self._tokens - 1.0
        return rows

    def _from_ssd(self) -> Floats:
        """Return `[workers]`: seconds of staging what is only on SSD."""
        machine, lacking = self._table.machine, self.resume[_DEPTHS - 1] - self.resident
        moved_s: Floats = lacking * machine.ssd_token_s
        moved_s += machine.ssd_checkpoint_s + self._table.load_terms.ssd_wait_s
        moved_s *= lacking > 0.0
        return moved_s

    def _network(self, tokens: Floats, sources: list[int] | None) -> Floats:
        """Return `[sources, workers]`: seconds of reading so many tokens and a checkpoint.

        `sources` None: from every worker; the result is `[1, workers]` if all are equal.
        """
        machine, outgoing = self._table.machine, self._table.outgoing_bytes
        if sources is not None:
            outgoing = outgoing.take(sources)
        moved_s = tokens * machine.peer_token_s
        moved_s += machine.peer_checkpoint_s
        pace: Floats = machine.peer_ahead_s
        if self._links is not None:
            latency_s, link = self._links if sources is None else self._links[:, sources]
            token_bytes, checkpoint_bytes = self._state_bytes
            moved_s = np.maximum(moved_s, (tokens * token_bytes + checkpoint_bytes) * link)
            moved_s += latency_s
            pace = np.maximum(pace, link)
        moved_s += self._table.load_terms.peer_wait_s
        if outgoing.any():
            moved_s = moved_s + outgoing[:, None] * pace
        return np.atleast_2d(moved_s)

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
        token_s = end + own
        token_s *= self._table.machine_terms.half_attention_s[0]
        token_s += self._table.machine.token_s
        copied: Floats = end - own
        copied *= token_s
        if not (weights.fullness and self._has_session):
            copied *= weights.copy
            return copied
        prices = weights.copy * self._table.load_terms.copy_factor
        copied[0] *= prices
        copied[1] *= np.maximum(prices, weights.copy)
        return copied

    def _queue_s(self, prompt_bytes: float, needed_bytes: float) -> Floats:
        """Return `[workers]`: seconds until the queued tokens are computed and there are enough
        pages; infinite if there never are.

        The answer's length is only expected: a prompt that fits alone is not given up for it.

        Pages that are cached and not in use are free, this prompt's prefix included. By Little's
        law, running requests free used bytes / residence per second.
        """
        table, hbm_bytes = self._table, self._table.machine.hbm_bytes
        queue_s, free = table.load_terms.queue_s, table.load_terms.free_bytes
        if free.min() >= needed_bytes:
            return queue_s
        released_s = table.residence_s / np.maximum(table.hbm_used, 1.0)
        wanted = np.minimum(needed_bytes, hbm_bytes)
        waited_s: Floats = np.maximum(wanted - free, 0.0) * released_s
        waited_s = np.where(prompt_bytes > hbm_bytes, np.inf, waited_s)
        return queue_s + waited_s


def _depths(step: Step) -> int:
    """Return from how many tiers, in their order, workers could have some more of the prompt."""
    if not step.prefixes:
        return 1
    held = step.prefixes.values()
    return _DEPTHS if any(x.ssd_tokens > max(x.hbm_tokens, x.dram_tokens) for x in held) else 2
