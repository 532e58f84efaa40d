"""The price of a step's prefill on every worker, as arrays over the fleet.

It follows the models and rules of the planner's `pricing`: the queue hides staging (from SSD or a
peer to DRAM), and the first step's compute hides, layer by layer, the copies from DRAM to pages.
The planner prices many boundaries of one worker; here few boundaries of many workers are priced
in one pass, because a numpy call costs more than the numbers in it. What needs the network is
priced when it is asked for: most decisions know without that it is dearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ownership.scheduling.fleet import FleetView, Floats, WorkerTable, least, most
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


class Ways(NamedTuple):
    """Ways to get a prompt's state onto workers, each `[ways, workers]`."""

    resume: Floats
    """The token from which the engine computes."""
    compute_s: Floats
    exposed_s: Floats
    """Filling pages from DRAM, without what computing hides."""
    delay_s: Floats
    """Delay of the running decodes, summed over them."""
    active_s: Floats
    """Seconds from the first page filled to the last token computed."""
    price_s: Floats
    """The price for other requests, and of copies."""


class PrefillPricing:
    """One step's prefill over the fleet, by the present figures."""

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
        self._leaning, self._fleet_groups = leaning, (fleet.names, fleet.groups)
        self._tokens = float(step.prompt_tokens)
        self._has_session = bool(step.session_id)
        self._state_bytes = footprint.all_token_bytes, footprint.all_checkpoint_bytes
        self._per_layer = 1.0 + 1.0 / footprint.num_layers
        page_bytes = footprint.page_bytes_per_token
        tokens = self._prefixes(step, fleet)
        self.readable: Floats = tokens[1]
        """`[workers]`: tokens that others can read."""
        self._held: Floats = np.maximum.accumulate(tokens)
        """`[tiers, workers]`: tokens in HBM, in HBM or DRAM, in any tier."""
        prompt_bytes = page_bytes * self._tokens
        self.queue_s = self._queue_s(prompt_bytes, prompt_bytes + page_bytes * step.output_tokens)
        self.copy_s = self._copies(weights)
        """`[2, workers]`: price of the second copies that a step there makes: of what other
        workers have, and of all that another worker has just computed."""
        self._price_local(step)

    @property
    def resident(self) -> Floats:
        """`[workers]`: tokens that each has in HBM or DRAM."""
        resident: Floats = self._held[1]
        return resident

    @cached_property
    def fetched(self) -> Ways:
        """The ways that read from a source's DRAM first, in the order of `sources`."""
        readable = self.readable.take(self.sources)
        return self._priced(np.maximum(readable[:, None], self._held[0]), self.copy_s[0])

    @cached_property
    def joined(self) -> Ways:
        """One way: another worker has just computed all but the last token."""
        return self._priced(np.full((1, len(self.resident)), self._tokens - 1.0), self.copy_s[1])

    @cached_property
    def fetched_ready_s(self) -> Floats:
        """`[sources, workers]`: seconds until the prompt is computed, with the source's state.

        Infinite if a source has nothing that is missing, or is not read by the worker.
        """
        ready_s = np.maximum(self._network_s, self.queue_s)
        ready_s += self.fetched.active_s
        np.putmask(ready_s, self.fetched.resume <= self.resident, np.inf)
        names, groups = self._fleet_groups
        if groups is not None:
            group = np.array([groups.get(name, np.nan) for name in names])  # nan is not nan's equal
            np.putmask(ready_s, group.take(self.sources)[:, None] != group, np.inf)
        return ready_s

    @cached_property
    def handoff_s(self) -> Floats:
        """`[prefill, decode]` or `[1, decode]`: seconds from one worker to the other: of the
        handoff itself, and of reading what the other computed."""
        machine = self._table.machine
        read_s = self._network(self._tokens - 1.0 - self.resident, None)
        handoff_s: Floats = read_s + machine.joining_s + self._tokens * machine.joining_token_s
        return handoff_s

    def resume_tokens(self, worker: int, source: int | None) -> int:
        """Return the token from which a worker computes.

        `source`: the worker that it reads from first; None if it reads from no other.
        """
        ways, way = self._way(worker, source)
        return int(ways.resume.item(way, worker))

    def terms(self, worker: int, source: int | None) -> PrefillTerms:
        """Return the terms of a prefill at a worker. `source`: as in `resume_tokens`."""
        ways, way = self._way(worker, source)
        network_s, ssd_s = 0.0, 0.0
        if source is not None:
            network_s = self._network_s.item(way, worker)
        elif way == _DEPTHS - 1:
            ssd_s = self._ssd_s.item(worker)
        return self._terms(ways, way, worker, self.copy_s[0], network_s, ssd_s)

    def joined_terms(self, worker: int) -> PrefillTerms:
        """Return the terms of the worker that decodes what another has computed, without those
        of the hand-off."""
        return self._terms(self.joined, 0, worker, self.copy_s[1])

    def _way(self, worker: int, source: int | None) -> tuple[Ways, int]:
        if source is None:
            return self._local, self._tier.item(worker)
        return self.fetched, self.sources.index(source)

    def _terms(
        self,
        ways: Ways,
        way: int,
        worker: int,
        copy_s: Floats,
        network_s: float = 0.0,
        ssd_s: float = 0.0,
    ) -> PrefillTerms:
        queue_s, delay_s = self.queue_s.item(worker), ways.delay_s.item(way, worker)
        leaning = 0.0 if self._leaning is None else self._leaning.delay.item(worker) - 1.0
        return PrefillTerms(
            queue_s,
            max(network_s - queue_s, 0.0),
            max(ssd_s - queue_s, 0.0) + ways.exposed_s.item(way, worker),
            ways.compute_s.item(way, worker),
            delay_s,
            copy_s.item(worker),
            self._stall * delay_s * leaning,
        )

    def _price_local(self, step: Step) -> None:
        """Price resuming from each worker's own tiers, and choose the cheapest."""
        depths, workers = _depths(step), len(self.resident)
        self._local = self._priced(self._held[:depths], self.copy_s[0])
        ready_s = self._local.active_s + self.queue_s
        if depths == _DEPTHS:
            self._ssd_s = self._from_ssd()
            staged_s = np.maximum(self._ssd_s, self.queue_s)
            ready_s[_DEPTHS - 1] = staged_s + self._local.active_s[_DEPTHS - 1]
        self._tier = (ready_s + self._local.price_s).argmin(axis=0)
        at = self._tier * workers + np.arange(workers)  # in `[ways, workers]`
        self.local_ready_s: Floats = ready_s.take(at)
        """`[workers]`: seconds until the prompt is computed, with the worker's own state."""
        self.local_price_s: Floats = self._local.price_s.take(at)

    def _priced(self, resume: Floats, copy_s: Floats) -> Ways:
        table, machine, fixed = self._table, self._table.machine, self._table.machine_terms
        rest, half_s = self._tokens - resume, fixed.half_attention_s
        both_s = resume * half_s  # `attention_work` of the rest is rest (tokens + resume) / 2
        both_s += fixed.prefill_token_s + half_s * self._tokens
        both_s *= rest
        both_s += np.ceil(rest / machine.step_tokens) * fixed.prefill_step_s
        compute_s, delay_s = both_s
        delay_s *= table.running
        loaded = resume - self._held[0]
        dram_s = loaded * machine.dram_token_s
        dram_s += fixed.dram_start_s
        dram_s *= np.sign(loaded)  # nothing is loaded in no time; it is never below 0
        hidden_s = resume * fixed.context_step_s
        hidden_s += fixed.full_step_s
        np.minimum(hidden_s, compute_s, out=hidden_s)
        np.minimum(hidden_s, dram_s, out=hidden_s)
        exposed_s = dram_s * self._per_layer
        exposed_s -= hidden_s
        price_s = self._stall * delay_s
        if self._leaning is not None:
            price_s *= self._leaning.delay
        price_s += copy_s
        return Ways(resume, compute_s, exposed_s, delay_s, exposed_s + compute_s, price_s)

    @cached_property
    def _network_s(self) -> Floats:
        """`[sources, workers]`: seconds of reading what is missing."""
        return self._network(self.fetched.resume - self.resident, self.sources)

    def _from_ssd(self) -> Floats:
        """Return `[workers]`: seconds of staging what is only on SSD."""
        machine, lacking = self._table.machine, self._held[2] - self.resident
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
        hbm, dram, ssd = tokens
        for name, prefix in step.prefixes.items():
            worker = fleet.index.get(name)
            if worker is not None:
                hbm[worker], dram[worker], ssd[worker] = prefix
        return np.minimum(tokens, self._tokens - 1.0, out=tokens)

    def _copies(self, weights: PlacementWeights) -> Floats:
        """Return `copy_s`: the price of computing its tokens, without that of steps, times kappa.
        What is handed off never costs less than `weights.copy`."""
        own = self._held[2]
        end = np.array(((most(own),), (self._tokens - 1.0,)))
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
        if least(free) >= needed_bytes:
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
