"""Prices every route by which one step can be served, and compares them.

A route has a worker that prefills, perhaps another that it reads state from first, and one that
decodes. If one worker prefills and decodes, there is one route per worker, or one per source and
worker; otherwise one per pair. Prices are computed when asked for, from figures copied at the
start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ownership.scheduling.fleet import FleetView, Floats, least
from ownership.scheduling.prefill_pricing import PrefillPricing, PrefillTerms
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step import Step
from ownership.scheduling.weights import PlacementWeights

_WEIGHTS = PlacementWeights()


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
    """Reading state from other workers, less the part that the queue hides, and what a handoff
    takes besides."""
    restore_s: float
    """Loading from SSD to DRAM and from DRAM to pages, less the part that is hidden."""
    decode_s: float
    """Decoding the expected tokens together with the requests that run or wait there."""
    interference_s: float
    """mu I_decode: price of the delay of other requests' decodes."""
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
        weights: PlacementWeights = _WEIGHTS,
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

    @property
    def local_ready_s(self) -> Floats:
        """`[workers]`: seconds until the prompt is computed, with the worker's own state."""
        return self.prefills.local_ready_s

    @property
    def fetched_ready_s(self) -> Floats:
        """`[sources, workers]`: the same, with the source's state."""
        return self.prefills.fetched_ready_s

    @property
    def local_total_s(self) -> Floats:
        """`[workers]`: cost of prefilling and decoding there without the network."""
        total_s: Floats = self.prefills.local_ready_s + self.prefills.local_price_s
        total_s += self._decoding.price_s
        return total_s

    @property
    def fetched_least_s(self) -> float:
        """A bound that no fetch goes below, as if nothing were read or computed.

        Like `remote_least_s` it costs far less than to price all, and is nearly always enough,
        because it has the price of copies.
        """
        prefills = self.prefills
        total_s = prefills.queue_s + prefills.copy_s[0]
        total_s += self._decoding.price_s
        longest = max(map(prefills.readable.item, self.sources))
        np.putmask(total_s, prefills.resident >= longest, np.inf)
        return least(total_s)

    @property
    def fetched_total_s(self) -> Floats:
        """`[sources, workers]`: cost of reading from a source, then prefilling and decoding."""
        total_s: Floats = self.prefills.fetched_ready_s + self.prefills.fetched.price_s
        total_s += self._decoding.price_s
        return total_s

    @property
    def remote_least_s(self) -> float:
        """A bound that no remote prefill goes below, as if the hand-off took no time."""
        prefills = self.prefills
        there_s = prefills.local_ready_s + prefills.local_price_s
        there_s += self.table.load_terms.closed_s
        here_s = prefills.copy_s[1] + self._decoding.price_s
        return least(there_s) + least(here_s)

    @property
    def remote_total_s(self) -> Floats:
        """`[prefill, decode]`: cost of prefilling at one and decoding at another worker.

        Infinite on the diagonal.
        """
        prefills, closed_s = self.prefills, self.table.load_terms.closed_s
        there_s = prefills.handoff_s + (prefills.local_ready_s + closed_s)[:, None]
        total_s: Floats = np.maximum(there_s, prefills.queue_s, out=there_s)
        total_s += prefills.joined.active_s + prefills.joined.price_s + self._decoding.price_s
        total_s += prefills.local_price_s[:, None]
        np.fill_diagonal(total_s, np.inf)
        return total_s

    def terms(self, route: Route) -> PlacementTerms:
        """Return the terms of any route, also one that fetches, prefills and hands off."""
        prefills, at = self.prefills, route.prefill
        first = prefills.terms(at, route.source)
        if route.decode == at:
            return self._terms(route, first)
        joined = prefills.joined_terms(route.decode)
        read_s = prefills.handoff_s
        network_s = read_s.item(at if len(read_s) > 1 else 0, route.decode)
        ready_s = first.queue_s + first.network_s + first.restore_s + first.compute_s
        # Meanwhile the decoding worker works off its own queue.
        there_s = ready_s + network_s
        left_s = max(joined.queue_s - there_s, 0.0) if there_s < np.inf else 0.0
        joined = joined._replace(queue_s=left_s, network_s=network_s)
        return self._terms(route, PrefillTerms(*map(sum, zip(first, joined, strict=True))))

    def resume_tokens(self, route: Route) -> int:
        """Return the token from which the prefill worker computes."""
        return self.prefills.resume_tokens(route.prefill, route.source)

    def _terms(self, route: Route, prefill: PrefillTerms) -> PlacementTerms:
        """Return the terms of a route: `prefill`, and decoding."""
        queue_s, network_s, restore_s, compute_s, delay_s, copy_s, role_s = prefill
        decode_s, others_s, unleaning_s, _ = self._decoding
        if self._leaning is not None:
            leaning = self._leaning.decode.item(route.decode) - 1.0
            role_s += leaning * unleaning_s.item(route.decode)
        return PlacementTerms(
            queue_s,
            compute_s,
            network_s,
            restore_s,
            decode_s.item(route.decode),
            self._weights.stall * (delay_s + others_s.item(route.decode)),
            copy_s,
            role_s,
        )

    @cached_property
    def _decoding(self) -> _Decoding:
        step, table, terms = self._step, self.table, self.table.load_terms
        output, machine = step.output_tokens, table.machine
        own_s = output * (machine.decode_s + float(step.prompt_tokens) * machine.context_s)
        decode_s: Floats = own_s + output * terms.batch_s
        if step.session_id and step.owner is None:
            # A new session stays: idle sessions there will decode together with its later turns.
            decode_s += own_s * table.returning
        delay_s: Floats = own_s * (table.running + table.waiting)
        unleaning_s: Floats = decode_s + self._weights.stall * delay_s
        leaning = self._leaning
        price_s = unleaning_s if leaning is None else unleaning_s * leaning.decode
        return _Decoding(decode_s, delay_s, unleaning_s, price_s + terms.closed_s)


class _Decoding(NamedTuple):
    """Decoding, each `[workers]`."""

    decode_s: Floats
    delay_s: Floats
    """The delay of the others, summed over them."""
    unleaning_s: Floats
    """The price if workers had no roles."""
    price_s: Floats
    """Infinite if the worker accepts no requests."""
