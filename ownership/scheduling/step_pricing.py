"""Every route to serve one step, priced and compared.

A route has a worker that prefills, perhaps another that it reads state from first, and one that
decodes. Prefilling where it decodes there is one route per worker, or one per source and worker;
elsewhere one per pair. Prices are made when asked for, from figures copied at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownership.scheduling.fleet import FleetView, Floats
from ownership.scheduling.prefill_pricing import PrefillPricing, PrefillTerms
from ownership.scheduling.step import Step
from ownership.scheduling.terms import PlacementTerms
from ownership.scheduling.weights import PlacementWeights


class Route(NamedTuple):
    """Workers by index."""

    decode: int
    prefill: int
    source: int | None = None
    """Read from before the prefill; None: nobody."""


class StepPricing:
    """One step's routes over the fleet, by the figures of the moment it was made."""

    def __init__(
        self, step: Step, fleet: FleetView, weights: PlacementWeights, sources: Sequence[int] = ()
    ) -> None:
        """`sources`: the workers that a prefill may read from, by index."""
        self._step, self._fleet, self._weights = step, fleet, weights
        self.table = fleet.table()
        self.sources = tuple(sources)

    @cached_property
    def prefills(self) -> PrefillPricing:
        """What the parts before the first token cost."""
        return PrefillPricing(self._step, self._fleet, self.table, self._weights, self.sources)

    @cached_property
    def local_row(self) -> NDArray[np.intp]:
        """[workers] the cheapest depth to resume from of what each has itself."""
        prefills = self.prefills
        rows = prefills.local_rows
        total_s: Floats = prefills.ready_s[rows] + prefills.price_s[rows]
        row: NDArray[np.intp] = total_s.argmin(axis=0)
        return row

    @cached_property
    def local_ready_s(self) -> Floats:
        """[workers] until the prompt is computed from what each has itself."""
        return self._of_local_row(self.prefills.ready_s)

    @property
    def fetched_ready_s(self) -> Floats:
        """[sources, workers] the same with what each source has."""
        return self.prefills.ready_s[self.prefills.source_rows]

    @cached_property
    def local_total_s(self) -> Floats:
        """[workers] of prefilling and decoding there, nothing over the network."""
        total_s: Floats = self.local_ready_s + self._local_price_s + self._decoding_s
        return total_s

    @cached_property
    def fetched_total_s(self) -> Floats:
        """[sources, workers] of reading from a source, then prefilling and decoding there."""
        price_s = self.prefills.price_s[self.prefills.source_rows]
        total_s: Floats = self.fetched_ready_s + price_s + self._decoding_s
        return total_s

    @cached_property
    def remote_total_s(self) -> Floats:
        """[prefill, decode] of prefilling at one and decoding at another; one at both: infinite."""
        prefills = self.prefills
        there_s = prefills.handoff_s() + (self.local_ready_s + self._closed_s)[:, None]
        total_s: Floats = np.maximum(there_s, prefills.queue_s, out=there_s)
        total_s += prefills.active_s[-1] + prefills.price_s[-1] + self._decoding_s
        total_s += self._local_price_s[:, None]
        total_s.flat[:: len(total_s) + 1] = np.inf
        return total_s

    def terms(self, route: Route) -> PlacementTerms:
        """Of one route, which may be any: fetch at the prefill worker, then hand off."""
        prefills, at = self.prefills, route.prefill
        row = int(self.local_row[at]) if route.source is None else prefills.row_of(route.source)
        first = prefills.parts(row, at)
        if route.decode == at:
            return self._terms(route, [first])
        joined = prefills.parts(-1, route.decode)
        read_s = prefills.handoff_s()
        network_s = read_s.item(at if len(read_s) > 1 else 0, route.decode)
        ready_s = first.queue_s + first.network_s + first.restore_s + first.compute_s
        # What is queued where it decodes is worked off meanwhile.
        there_s = ready_s + network_s
        still_s = max(joined.queue_s - there_s, 0.0) if there_s < np.inf else 0.0
        return self._terms(route, [first, joined._replace(queue_s=still_s, network_s=network_s)])

    def resume_tokens(self, route: Route) -> int:
        """Where the prefill worker computes from."""
        at, prefills = route.prefill, self.prefills
        row = int(self.local_row[at]) if route.source is None else prefills.row_of(route.source)
        return int(prefills.resume[row, at])

    def routes(self, remote: bool) -> Iterator[Route]:
        """All that are possible, the cheap to explain first."""
        accepting = np.flatnonzero(self.table.accepting).tolist()
        for worker in accepting:
            yield Route(worker, worker)
        for source in self.sources:
            lacking = self.prefills.readable[source] > self.prefills.resident
            yield from (Route(i, i, source) for i in accepting if lacking[i])
        if remote:
            for prefill in accepting:
                yield from (Route(i, prefill) for i in accepting if i != prefill)

    def _terms(self, route: Route, parts: Sequence[PrefillTerms]) -> PlacementTerms:
        """The parts' sum, and the decoding."""
        queue_s, network_s, restore_s, compute_s, delay_s, pages_s, copy_s = map(
            sum, zip(*parts, strict=True)
        )
        decode_s, others_s = (x.item(route.decode) for x in self._decode_terms)
        return PlacementTerms(
            queue_s,
            compute_s,
            network_s,
            restore_s,
            decode_s,
            self.prefills.hbm * (pages_s + decode_s),
            self._weights.stall * (delay_s + others_s),
            copy_s,
        )

    def _of_local_row(self, values: Floats) -> Floats:
        """[workers] from [rows, workers]."""
        picked: Floats = values[self.local_row, np.arange(values.shape[1])]
        return picked

    @cached_property
    def _local_price_s(self) -> Floats:
        return self._of_local_row(self.prefills.price_s)

    @cached_property
    def _decode_terms(self) -> tuple[Floats, Floats]:
        """[workers] seconds of decoding, and by which the batch that it joins is later."""
        step, table = self._step, self.table
        tokens, output = float(step.prompt_tokens), step.output_tokens
        own_s = output * (table.decode_s + tokens * table.context_s)
        batch_s = table.running * table.decode_s + table.context_tokens * table.context_s
        decode_s: Floats = own_s + output * (table.decode_step_s + batch_s)
        if self._step.owner is None:
            # It stays: who thinks now decodes beside one of its later turns.
            decode_s += own_s * np.maximum(table.sessions - table.running, 0.0)
        return decode_s, own_s * table.running

    @cached_property
    def _decoding_s(self) -> Floats:
        """[workers] price of decoding there; infinite for those that take no requests."""
        decode_s, delay_s = self._decode_terms
        total_s: Floats = (1.0 + self.prefills.hbm) * decode_s + self._weights.stall * delay_s
        return total_s + self._closed_s

    @cached_property
    def _closed_s(self) -> Floats:
        return np.where(self.table.accepting > 0.0, 0.0, np.inf)
