"""llm-d's scheduling by predicted latency."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView, Floats
from ownership.scheduling.policy import accepting_workers
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing

_WEIGHTS = 100
"""Scores are whole hundredths from 1 on."""


@dataclass
class PredictedLatency:
    """Draw a worker by the predicted times to the first token and to each further one.

    Filters come first: workers with nearly all of the prompt, then those with most of it. They do
    not apply where waiting for those workers costs more than 5 s. Of what is left idle workers come
    first, and one is drawn with weights: 0.8 for the time to the first token and 0.2 for each
    further one, both relative to the others', most for the least times. Objectives are left out:
    llm-d takes requests without them for ones that no worker meets, as all do here.

    llm-d predicts by a model that is trained on the requests served; here it is this project's
    cost model, which the simulated engines follow, so predictions are better than llm-d's.

    Source: llm-d/llm-d-router v0.10, `config/charts/routerlib/templates/_config.yaml` (the profile)
    and `pkg/epp/framework/plugins/scheduling/`: `filter/prefixcacheaffinity/plugin.go`,
    `filter/sloheadroomtier/plugin.go`, `scorer/latency/plugin.go`.
    """

    rng: random.Random
    max_penalty_s: float = 5.0
    """Longer waiting for a worker with the prefix than for another makes the prefix not count."""
    name: str = "predicted_latency"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        found = accepting_workers(pricing, range(len(fleet)))
        times_s = np.array((pricing.local_ready_s, self.token_s(step, pricing)))
        for share in (0.99, 0.80):
            found = self._with_prefix(step, fleet, times_s[0], found, share)
        requests = pricing.table.running + pricing.table.waiting
        found = [i for i in found if not requests[i]] or found
        at = self.rng.choices(found, self.scores(times_s[:, found]).tolist())[0]
        return PlacementDecision(step, Route(at, at), fleet.names, pricing)

    def token_s(self, step: Step, pricing: StepPricing) -> Floats:
        """Return `[workers]`: seconds of a decode step with the request in it.

        Prompts that wait there delay the answer's tokens: their time is spread over the answer.
        """
        table = pricing.table
        context = table.context_tokens + step.prompt_tokens
        step_s = table.machine.decode_step_s + (table.running + 1.0) * table.machine.decode_s
        delay_s = table.queued_tokens * table.machine.delay_token_s / max(step.output_tokens, 1.0)
        token_s: Floats = step_s + context * table.machine.context_s + delay_s
        return token_s

    def _with_prefix(
        self, step: Step, fleet: FleetView, ttft_s: Floats, found: list[int], share: float
    ) -> list[int]:
        """Return the workers that have so much of the prompt, unless others are much faster."""
        names = fleet.names
        least = share * step.prompt_tokens
        near = [
            i for i in found
            if names[i] in step.prefixes and step.prefixes[names[i]].local_tokens >= least
        ]  # fmt: skip
        others = [i for i in found if i not in near]
        if near and others:
            penalty_s = min(ttft_s[i] for i in near) - min(ttft_s[i] for i in others)
            return found if penalty_s > self.max_penalty_s else near
        return near or found

    def scores(self, times_s: Floats) -> Floats:
        """Return `[workers]`: 0.01 to 1.01, higher for lesser times. `times_s`: `[2, workers]`.

        A time that is the same for all does not count.
        """
        times_s = np.where(np.isfinite(times_s), times_s, np.finfo(np.float64).max / 4)
        spread = np.ptp(times_s, axis=1)
        weights = np.array((0.8, 0.2)) * (spread > 1e-9)
        if not weights.any():
            return np.ones(times_s.shape[1])
        relative = (times_s - times_s.min(axis=1)[:, None]) / np.maximum(spread, 1e-9)[:, None]
        combined = weights @ relative / weights.sum()
        scores: Floats = (np.floor((1.0 - combined) * _WEIGHTS) + 1.0) / _WEIGHTS
        return scores
