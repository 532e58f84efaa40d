"""Prices every route by which one step can be served, and compares them.

A route has a worker that prefills, perhaps another that it reads state from first, and one that
decodes. If one worker prefills and decodes, there is one route per worker, or one per source and
worker; otherwise one per pair. Prices are computed when asked for, from figures copied at the
start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownership.scheduling.fleet import FleetView, Floats
from ownership.scheduling.prefill_pricing import PrefillPricing, PrefillTerms
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step import Step
from ownership.scheduling.weights import PlacementWeights


class Route(NamedTuple):
    """The workers that serve a step, by index."""

    decode: int
    prefill: int
    source: int | None = None
    """The worker that the prefill reads from first; None if it reads from no other worker."""


class PlacementTerms(NamedTuple):
    """The predicted cost of one route in seconds, by term. The terms add up:

    C = T_queue + T_compute + T_network + T_restore + mu I_decode + kappa M_copies + roles

    where T_compute is `compute_s + decode_s`.
    """

    queue_s: float
    """Until the tokens scheduled before it are computed and there are pages for it."""
    compute_s: float
    """Computing the part of the prompt that is not restored."""
    network_s: float
    """Reading state from other workers, less the part that the queue hides."""
    restore_s: float
    """Loading from SSD to DRAM and from DRAM to pages, less the part that is hidden."""
    decode_s: float
    """Decoding the expected tokens in the batch that it joins."""
    interference_s: float
    """mu I_decode: price of the delay of running decodes."""
    copy_s: float
    """kappa M_copies: price of state that two workers have from then on."""
    role_s: float
    """Price of decoding where prefills gather, and of delaying decodes elsewhere (`roles`)."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: without decoding and without the price for others."""
        return self.queue_s + self.compute_s + self.network_s + self.restore_s

    @property
    def total_s(self) -> float:
        """The cost that is compared."""
        return sum(self)


class StepPricing:
    """The routes of one step over the fleet, priced by the figures at its creation."""

    def __init__(
        self,
        step: Step,
        fleet: FleetView,
        weights: PlacementWeights,
        sources: Sequence[int] = (),
        leaning: Leaning | None = None,
    ) -> None:
        """`sources`: the workers that a prefill may read from, by index. `leaning`: soft roles."""
        self._step, self._fleet, self._weights = step, fleet, weights
        self.table = fleet.table()
        self.sources, self._leaning = tuple(sources), leaning

    @cached_property
    def prefills(self) -> PrefillPricing:
        """The price of everything before the first token."""
        return PrefillPricing(
            self._step, self._fleet, self.table, self._weights, self.sources, self._leaning
        )

    @cached_property
    def local_row(self) -> NDArray[np.intp]:
        """`[workers]`: the row of each worker's own tier from which resuming is cheapest."""
        prefills = self.prefills
        rows = prefills.local_rows
        total_s: Floats = prefills.ready_s[rows] + prefills.price_s[rows]
        row: NDArray[np.intp] = total_s.argmin(axis=0)
        return row

    @cached_property
    def local_ready_s(self) -> Floats:
        """`[workers]`: seconds until the prompt is computed, with the worker's own state."""
        return self._of_local_row(self.prefills.ready_s)

    @property
    def fetched_ready_s(self) -> Floats:
        """`[sources, workers]`: the same, with the source's state."""
        return self.prefills.ready_s[self.prefills.source_rows]

    @cached_property
    def local_total_s(self) -> Floats:
        """`[workers]`: cost of prefilling and decoding there without the network."""
        total_s: Floats = self.local_ready_s + self._local_price_s + self._decoding_s
        return total_s

    @cached_property
    def fetched_total_s(self) -> Floats:
        """`[sources, workers]`: cost of reading from a source, then prefilling and decoding."""
        price_s = self.prefills.price_s[self.prefills.source_rows]
        total_s: Floats = self.fetched_ready_s + price_s + self._decoding_s
        return total_s

    @property
    def remote_least_s(self) -> float:
        """A bound that no remote prefill goes below. It costs less than to price all pairs."""
        prefills = self.prefills
        there_s = self.local_ready_s + self._closed_s + self._local_price_s
        here_s = prefills.active_s[-1] + prefills.price_s[-1] + self._decoding_s
        if len(prefills.handoff_s) == 1:
            here_s += prefills.handoff_s[0]
        least_s: float = there_s.min() + here_s.min()
        return least_s

    @cached_property
    def remote_total_s(self) -> Floats:
        """`[prefill, decode]`: cost of prefilling at one and decoding at another worker.

        Infinite on the diagonal.
        """
        prefills = self.prefills
        there_s = prefills.handoff_s + (self.local_ready_s + self._closed_s)[:, None]
        total_s: Floats = np.maximum(there_s, prefills.queue_s, out=there_s)
        total_s += prefills.active_s[-1] + prefills.price_s[-1] + self._decoding_s
        total_s += self._local_price_s[:, None]
        total_s.flat[:: len(total_s) + 1] = np.inf
        return total_s

    def terms(self, route: Route) -> PlacementTerms:
        """Return the terms of any route, also one that fetches, prefills and hands off."""
        prefills, at = self.prefills, route.prefill
        first = prefills.terms(self._row(route), at)
        if route.decode == at:
            return self._terms(route, [first])
        joined = prefills.terms(-1, route.decode)
        read_s = prefills.handoff_s
        network_s = read_s.item(at if len(read_s) > 1 else 0, route.decode)
        ready_s = first.queue_s + first.network_s + first.restore_s + first.compute_s
        # Meanwhile the decoding worker works off its own queue.
        there_s = ready_s + network_s
        left_s = max(joined.queue_s - there_s, 0.0) if there_s < np.inf else 0.0
        return self._terms(route, [first, joined._replace(queue_s=left_s, network_s=network_s)])

    def resume_tokens(self, route: Route) -> int:
        """Return the token from which the prefill worker computes."""
        return int(self.prefills.resume[self._row(route), route.prefill])

    def routes(self, remote: bool) -> Iterator[Route]:
        """Iterate over all possible routes, the simplest first."""
        accepting = np.flatnonzero(self.table.accepting).tolist()
        for worker in accepting:
            yield Route(worker, worker)
        for source in self.sources:
            lacking = self.prefills.readable[source] > self.prefills.resident
            yield from (Route(i, i, source) for i in accepting if lacking[i])
        if remote:
            for prefill in accepting:
                yield from (Route(i, prefill) for i in accepting if i != prefill)

    def _row(self, route: Route) -> int:
        """Return the row of `prefills` by which the prefill worker gets the prompt's state."""
        if route.source is not None:
            return self.prefills.row_of(route.source)
        return int(self.local_row[route.prefill])

    def _terms(self, route: Route, parts: Sequence[PrefillTerms]) -> PlacementTerms:
        """Add up the parts, and decoding."""
        queue_s, network_s, restore_s, compute_s, delay_s, copy_s, role_s = map(
            sum, zip(*parts, strict=True)
        )
        decode_s, others_s = (x.item(route.decode) for x in self._decode_terms)
        decode_role_s = 0.0
        if self._leaning is not None:
            decoding_s = self._unleaning_s.item(route.decode)
            decode_role_s = (self._leaning.decode.item(route.decode) - 1.0) * decoding_s
        return PlacementTerms(
            queue_s,
            compute_s,
            network_s,
            restore_s,
            decode_s,
            self._weights.stall * (delay_s + others_s),
            copy_s,
            role_s + decode_role_s,
        )

    def _of_local_row(self, values: Floats) -> Floats:
        """Return `[workers]` from `[rows, workers]`."""
        picked: Floats = values.take(self._local_at)
        return picked

    @cached_property
    def _local_at(self) -> NDArray[np.intp]:
        """`[workers]`: the place of each worker's `local_row` in `[rows, workers]`."""
        workers = len(self.local_row)
        at: NDArray[np.intp] = self.local_row * workers + np.arange(workers)
        return at

    @cached_property
    def _local_price_s(self) -> Floats:
        return self._of_local_row(self.prefills.price_s)

    @cached_property
    def _decode_terms(self) -> tuple[Floats, Floats]:
        """`[workers]`: seconds of decoding, and the delay of the batch that it joins."""
        step, table = self._step, self.table
        tokens, output = float(step.prompt_tokens), step.output_tokens
        own_s = output * (table.decode_s + tokens * table.context_s)
        batch_s = table.running * table.decode_s + table.context_tokens * table.context_s
        decode_s: Floats = own_s + output * (table.decode_step_s + batch_s)
        if self._step.owner is None:
            # The session stays: idle sessions there will decode together with its later turns.
            decode_s += own_s * table.returning
        return decode_s, own_s * table.running

    @cached_property
    def _decoding_s(self) -> Floats:
        """`[workers]`: price of decoding there; infinite if the worker accepts no requests."""
        total_s = self._unleaning_s
        if self._leaning is not None:
            total_s = total_s * self._leaning.decode
        return total_s + self._closed_s

    @cached_property
    def _unleaning_s(self) -> Floats:
        """`[workers]`: price of decoding there if workers had no roles."""
        decode_s, delay_s = self._decode_terms
        total_s: Floats = decode_s + self._weights.stall * delay_s
        return total_s

    @cached_property
    def _closed_s(self) -> Floats:
        return np.where(self.table.accepting > 0.0, 0.0, np.inf)
