"""The studies of `benchmarks.simulated_fleets`: traces, models, sizes and policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ownership.scheduling.registry import POOLED
from ownership.simulator.policies import TERMS
from ownership.simulator.sweeps.running import Point
from ownership.simulator.workload import Half

DENSE, HYBRID = "llama-3.1-8b", "deepseek-v4-flash"
GPUS = {DENSE: 1, HYBRID: 2}
SEEDS = (0, 1, 2)
ORACLE = "oracle"
FIXED = ("ownerserve+without=fullness", "ownerserve+copies=1+without=fullness")
"""`ownerserve` with the same price of copies however full caches are, 3 and 1."""
SCHEDULING = (
    "ownerserve", *FIXED, "colocated", "prefix_aware", "dynamo",
    "dynamo+prefill_scale=16", "dynamo_kv", "predicted_latency", "conductor", "static_pd",
    "round_robin_pd", ORACLE,
)  # fmt: skip
LOADED = tuple(policy for policy in SCHEDULING if policy != ORACLE)
"""Without the bound: it is for all requests, not for a window, and for starts that are known."""
CAPACITY = (
    "ownerserve", "ownerserve+state=paged", "ownerserve+tiers=gpu",
    "ownerserve+state=paged+tiers=gpu", "prefix_aware", "prefix_aware+tiers=gpu",
)  # fmt: skip
"""Typed state, state paged as if every layer needed all tokens, and the GPU's state alone."""
COSTS = (
    "launch_s", "weights_s", "token_s", "pair_s", "context_s", "pcie", "ssd_read", "rdma",
)  # fmt: skip
"""Coefficients of machines, which policies know: of a `Roofline`, and a link's seconds per byte."""
WITHOUT = ("ownerserve", *(f"ownerserve+without={term}" for term in TERMS))
"""`ownerserve`, whole and without each of its parts."""
TUNED = (
    "ownerserve", *FIXED, "ownerserve+copies=1", "ownerserve+copies=10",
    "ownerserve+without=stalls",
    "ownerserve+without=roles", "dynamo+prefill_scale=16", "dynamo_kv", "prefix_aware",
)  # fmt: skip
"""Other prices of `ownerserve`, and others: one half of a trace may choose, the other shows."""
CACHES = (
    "colocated", "colocated+checkpoints=full", "colocated+checkpoints=periodic:4",
    "colocated+checkpoints=zero", "colocated+eviction=value", "colocated+tiers=dram",
    "colocated+tiers=gpu", "colocated+state=paged", ORACLE,
)  # fmt: skip
"""Policies of one worker, where placement makes no difference."""


@dataclass(frozen=True)
class StudyPoint(Point):
    """One simulation of a study."""

    study: str = ""
    costs: str | None = None


@dataclass(frozen=True)
class Setting:
    """One column of a sweep."""

    workers: int
    rate: float | None = None
    """Sessions (of Mooncake: requests) a second."""
    sessions: int | None = None
    sharing: float | None = None
    speed: float | None = None
    """Recorded arrivals, so many times as fast."""
    population: int | None = None
    """Sessions under way for each worker."""
    begin_s: float | None = None
    """The window that figures are of."""
    end_s: float | None = None
    costs: str | None = None
    """A coefficient of `COSTS` and its factor, as `token_s=1.5`."""
    half: Half | None = None
    """The half of the trace; None: all of it."""

    def scaled(self, scale: float) -> Setting:
        """Return a smaller one: fewer sessions, or a shorter window."""
        sessions, end_s = self.sessions, self.end_s
        if sessions is not None:
            sessions = max(4, int(scale * sessions))
        if end_s is not None:
            begin_s = self.begin_s or 0.0
            end_s = begin_s + scale * (end_s - begin_s)
        return replace(self, sessions=sessions, end_s=end_s)


@dataclass(frozen=True)
class Study:
    """A trace, a model, policies, and what is swept."""

    name: str
    trace: str
    """`agents` or `mooncake`."""
    model: str
    settings: Sequence[Setting]
    policies: Sequence[str] = SCHEDULING
    dram_gib: float = 256.0
    ssd_gib: float = 2048.0
    seeds: Sequence[int] = SEEDS
    first_population: int | None = None
    """If given, the study searches for the largest population for each worker, from this one on."""

    def points(self, scale: float = 1.0) -> Iterator[StudyPoint]:
        """Every simulation; `scale`: of the numbers of sessions, or of the window.

        Policies that need two pools are simulated with each of `PREFILL_SHARES`.
        """
        for setting in self.settings:
            given = asdict(setting.scaled(scale))
            for seed in self.seeds:
                for policy in placed(self.policies, setting.workers):
                    yield StudyPoint(policy, seed=seed, study=self.name, **given)


PREFILL_SHARES = (0.25, 0.5, 0.75)
"""Shares of the workers that are the prefill pool."""


def placed(policies: Sequence[str], workers: int) -> Iterator[str]:
    """Yield the policies, those of two pools with each number of prefill workers or not at all."""
    pools = sorted({max(1, round(share * workers)) for share in PREFILL_SHARES})
    for policy in policies:
        if not POOLED.get(policy.partition("+")[0]):
            yield policy
            continue
        yield from (f"{policy}+prefillers={number}" for number in pools if number < workers)


AGENTS_A_WORKER_S = 0.05
MOONCAKE_A_WORKER_S = 0.83
"""The recorded rate (3.3 a second) over four workers."""

STUDIES = (
    Study(
        "agents-rate", "agents", HYBRID,
        [Setting(4, rate, 80, 0.5) for rate in (0.05, 0.2, 0.8)],
    ),
    Study(
        "agents-sharing", "agents", HYBRID,
        [Setting(4, 0.2, 80, sharing) for sharing in (0.0, 1.0)],
    ),
    Study(
        "agents-workers", "agents", HYBRID,
        [
            Setting(workers, AGENTS_A_WORKER_S * workers, sessions, 0.5)
            for workers, sessions in ((1, 30), (16, 100), (64, 150))
        ],
    ),
    Study("agents-dense", "agents", DENSE, [Setting(4, 0.1, 50, 0.5)]),
    Study(
        "mooncake-rate", "mooncake", DENSE,
        [Setting(4, rate, 2_000) for rate in (1.7, 3.3, 4.2)],
    ),
    Study(
        "mooncake-workers", "mooncake", DENSE,
        [
            Setting(workers, MOONCAKE_A_WORKER_S * workers, requests)
            for workers, requests in ((1, 800), (16, 2_500), (64, 3_000))
        ],
    ),
    Study(
        "mooncake-hour", "mooncake", DENSE,
        [Setting(4, sessions=12_031, speed=speed, begin_s=300.0) for speed in (1, 1.25)],
        LOADED, seeds=(0,),
    ),
    Study(
        "mooncake-halves", "mooncake", DENSE,
        [Setting(4, speed=1, half="first"), Setting(4, speed=1, half="second")], TUNED, seeds=(0,),
    ),
    Study(
        "mooncake-hour-workers", "mooncake", DENSE,
        [Setting(16, sessions=12_031, speed=4.0, begin_s=75.0)], LOADED, seeds=(0,),
    ),
    Study(
        "agents-population", "agents", HYBRID,
        [
            Setting(2, sharing=0.5, population=sessions, begin_s=900.0, end_s=2_700.0)
            for sessions in (50, 100)
        ],
        LOADED,
    ),
    *(
        Study(
            f"agents-capacity-{name}", "agents", model,
            [Setting(2, sharing=0.5, begin_s=900.0, end_s=1_800.0)], CAPACITY,
            seeds=(0, 1), first_population=first,
        )
        for name, model, first in (("hybrid", HYBRID, 48), ("dense", DENSE, 8))
    ),
    Study(
        "mooncake-terms", "mooncake", DENSE,
        [Setting(4, 3.3, 2_000), Setting(4, 4.2, 2_000), Setting(16, 13.28, 2_500)], WITHOUT,
    ),
    Study("agents-terms", "agents", HYBRID, [Setting(2, 0.8, 150, 0.5)], WITHOUT),
    Study("agents-dense-terms", "agents", DENSE, [Setting(4, 1.0, 120, 0.5)], WITHOUT),
    Study(
        "mooncake-costs", "mooncake", DENSE,
        [
            Setting(4, 3.3, 2_000, costs=costs)
            for costs in (None, *(f"{name}={x:g}" for name in COSTS for x in (0.5, 1.5)))
        ],
        LOADED, seeds=(0,),
    ),
    Study("mooncake-hybrid", "mooncake", HYBRID, [Setting(4, 6.0, 2_000)]),
    Study(
        "agents-cache", "agents", HYBRID, [Setting(1, 0.05, 40, 0.5)], CACHES,
        dram_gib=1.0, ssd_gib=2.0,
    ),
    Study(
        "mooncake-cache", "mooncake", DENSE, [Setting(1, 0.7, 1_500)], CACHES,
        dram_gib=128.0, ssd_gib=256.0,
    ),
)  # fmt: skip
