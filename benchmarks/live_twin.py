"""The sessions of `benchmarks.live_policies` in the simulator, request by request.

Steps and loads take what the servers have learned of them. What a client waits besides (HTTP,
router, event loops, other processes on these cores) is measured on other sessions, played before: a
line over the prompt's length, and the time by which later tokens come late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean, median
from typing import NamedTuple

import httpx

from benchmarks.accounts import Account, Answers, RequestName
from benchmarks.contention import Played as Compared
from benchmarks.contention import decoding_late
from benchmarks.live_client import Played
from examples.serving import Server
from hetero_connector.planner.cost_model import OverheadSample, RequestOverhead
from hetero_connector.planner.profile import CostProfile
from ownership.router.alike import pooled
from ownership.router.figures import page_tokens
from ownership.router.view import PublishedChain
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView, Role
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.machine.worker import WorkerSpec
from ownership.simulator.policies import PolicySpec, parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

_OPTIONS = "+answers=kept+handoffs=tokens"


class Simulated(NamedTuple):
    """A simulated run."""

    workers: dict[RequestName, str]
    """The worker that decoded."""
    ttft_s: dict[RequestName, float]
    answer_s: dict[RequestName, float]
    task_s: list[float]
    are_equal: list[bool]
    """See `Following`."""


class Where(NamedTuple):
    """The workers of a placement."""

    prefill: str
    decode: str


class Following:
    """A policy that is asked, and a fleet that follows other placements.

    So all its decisions are made on a fleet that has served what the other one has served.
    """

    def __init__(self, policy: SchedulingPolicy, placed: Mapping[tuple[str, int], Where]) -> None:
        """`placed`: by session and length of the prompt."""
        self.name = policy.name
        self._policy, self._placed = policy, placed
        self.are_equal: list[bool] = []
        """For each decision, if it is the one that is followed."""

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        decision = self._policy.decide(step, fleet)
        there = self._placed[step.session_id, step.prompt_tokens]
        found = decision.placement
        self.are_equal.append(there == (found.prefill_worker, found.decode_worker))
        if self.are_equal[-1]:
            return decision
        route = Route(fleet.index[there.decode], fleet.index[there.prefill])
        return replace(decision, route=route, refusal=None)


@dataclass(frozen=True)
class _PolicyOf(PolicySpec):
    """A policy that exists already."""

    made: SchedulingPolicy | None = None

    def scheduler(self, rng: Random, can_hand_off: bool = True) -> SchedulingPolicy:
        assert self.made is not None
        return self.made


@dataclass(frozen=True)
class Machine:
    """A server's model, sizes and limits, as it tells them."""

    published: PublishedChain
    capacity: TierBytes
    limits: EngineLimits

    @classmethod
    def of(cls, server: Server, limits: EngineLimits) -> Machine:
        told = httpx.get(f"{server.url}/v1/heterocache/chain", timeout=60).json()["engines"][0]
        chain = PublishedChain.of(told)
        shape = StateShape.of(chain.model, chain.chunk_tokens)
        tokens = page_tokens(httpx.get(f"{server.url}/metrics", timeout=60).text)
        sizes = {have["tier"]: n for have, n in server.series("heterocache_capacity_bytes")}
        hbm_bytes = int(tokens * shape.footprint.page_bytes_per_token)
        return cls(chain, TierBytes(hbm_bytes, int(sizes["dram"])), limits)

    def simulated(
        self,
        trace: Trace,
        policy: str,
        names: Sequence[str],
        roles: Sequence[Role],
        profile: CostProfile,
        placed: Mapping[tuple[str, int], Where] | None = None,
    ) -> Simulated:
        """Simulate sessions under a policy. `placed`: placements that it follows."""
        model, chunk_tokens = self.published.model, self.published.chunk_tokens
        costs = profile.cost_model(model.state_types, step_tokens=self.limits.step_tokens)
        workers = tuple(
            WorkerSpec(name, costs, self.capacity, role)
            for name, role in zip(names, roles, strict=True)
        )
        fleet = FleetSpec("servers", "theirs", model, workers, self.limits, {}, chunk_tokens)
        shape, recording = StateShape.of(model, chunk_tokens), Answers()
        spec, following = parse_policy(policy + _OPTIONS), None
        if placed is not None:
            following = Following(spec.scheduler(Random(0)), placed)
            spec = _PolicyOf(**vars(spec), made=following)
        run = FleetSimulation(
            fleet,
            spec,
            shape,
            iter(trace),
            trace.block_tokens,
            seed=0,
            recording=recording,
        )
        run.run()
        return Simulated(
            recording.workers,
            recording.ttft_s,
            recording.answer_s,
            list(run.tally.task_s),
            following.are_equal if following else [],
        )


def measured(
    costs: Sequence[CostProfile], machine: Machine, trace: Trace, real: Played, names: Sequence[str]
) -> CostProfile:
    """Return what the servers learned, with the rest of what clients wait, by played sessions."""
    together = pooled(dict(zip(names, costs, strict=True)))
    profile = next(iter(together.values()))
    roles = [Role.BOTH] * len(names)
    free = machine.simulated(trace, "ownerserve", names, roles, profile)
    late_s = decoding_late(
        [Compared(trace, _account(trace, real), _simulated_account(trace, free))]
    )
    delays = profile.interference
    assert delays is not None
    profile = replace(
        profile, interference=delays._replace(step_s=max(0.0, delays.step_s + late_s))
    )
    free = machine.simulated(trace, "ownerserve", names, roles, profile)
    samples = [
        OverheadSample(request.prompt_tokens, request.ttft_s - free.ttft_s[name], 0.0)
        for name, request in real.requests.items()
    ]
    return replace(profile, overhead=RequestOverhead.fitted(samples))


def _account(trace: Trace, real: Played) -> Account:
    ttft_s = {name: request.ttft_s for name, request in real.requests.items()}
    return Account({}, {}, ttft_s, real.answers_s)


def _simulated_account(trace: Trace, free: Simulated) -> Account:
    sums = [0.0 for _ in trace]
    for (session, _), seconds in free.answer_s.items():
        sums[session] += seconds
    return Account({}, {}, free.ttft_s, sums)


def placements(trace: Trace, real: Played) -> dict[tuple[str, int], Where]:
    """Return where the requests of a trace were served."""
    sessions = list(trace)
    return {
        (sessions[number].id, request.prompt_tokens): Where(request.prefill_worker, request.worker)
        for (number, _), request in real.requests.items()
    }


def compared(real: Played, twin: Simulated, followed: Simulated) -> dict[str, float]:
    """Return simulated over real, and the shares of equal placements.

    `placements_equal`: of the decisions in a simulation whose fleet follows the real placements.
    `turns_equal`: of the later turns, those that stay with the worker of the turn before, or leave
    it, in both, in a simulation by itself. There, one other placement changes all that follow.
    """
    names = real.requests.keys()
    one = {name: request.worker for name, request in real.requests.items()}
    later = [(number, index) for number, index in names if (number, index - 1) in one]
    stays = [
        [at[number, index] == at[number, index - 1] for number, index in later]
        for at in (one, twin.workers)
    ]
    ttft_s = [request.ttft_s for request in real.requests.values()]
    return {
        "placements_equal": mean(followed.are_equal),
        "turns_equal": mean(a == b for a, b in zip(*stays, strict=True)),
        "simulated_over_real_ttft": mean(twin.ttft_s.values()) / mean(ttft_s),
        "simulated_over_real_ttft_p50": median(twin.ttft_s.values()) / median(ttft_s),
        "simulated_over_real_task": mean(twin.task_s) / mean(real.task_s),
        "followed_over_real_ttft": mean(followed.ttft_s.values()) / mean(ttft_s),
        "followed_over_real_task": mean(followed.task_s) / mean(real.task_s),
        "simulated_over_real_answers": sum(twin.answer_s.values()) / sum(real.answers_s),
    }
