"""Small fleets whose prices are easy to compute, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_model import CostModel, HandoffCost
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec import StateType
from ownership.scheduling import (
    FleetView,
    Link,
    PlacementWeights,
    Role,
    StateFootprint,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
)

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
GIB = 1 << 30
FREE = PlacementWeights(0.0, 0.0)
BYTE_A_TOKEN = StateFootprint({KV: 1.0}, {}, 1.0, 1)
"""One byte of state and of pages per token, in one layer."""


def rates(latency_s: float, s_per_byte: float) -> TierRates:
    return TierRates(latency_s, dict.fromkeys(StateType, s_per_byte), s_per_byte)


def costs_of(
    token_s: float = 1e-3,
    peer_s: float = 1e-4,
    ssd_s: float = 1e-4,
    *,
    step_s: float = 0.0,
    attention_s: float = 0.0,
    step_tokens: int = 0,
    interference: InterferenceCoefficients | None = None,
) -> CostModel:
    """1 ms per computed token, 0.1 ms per byte from SSD or a peer; filling pages is free."""
    load = {
        Tier.DRAM: rates(0.0, 0.0),
        Tier.SSD: rates(0.0, ssd_s),
        Tier.PEER: rates(0.0, peer_s),
    }
    return CostModel(
        ComputeRegression(ComputeCoefficients(step_s, token_s, attention_s)),
        LoadModel([KV, SWA], load),
        step_tokens=step_tokens,
        interference=InterferenceRegression(interference),
    )


def worker(
    name: str,
    load: WorkerLoad | None = None,
    costs: CostModel | None = None,
    role: Role = Role.BOTH,
    hbm_bytes: int = GIB,
    cache_bytes: int = 0,
) -> WorkerView:
    return WorkerView(name, costs or costs_of(), hbm_bytes, role, load or WorkerLoad(), cache_bytes)


def fleet_of(*workers: WorkerView, links: dict[tuple[str, str], Link] | None = None) -> FleetView:
    return FleetView(BYTE_A_TOKEN, workers, links)


NAMES = ("a", "b", "c", "d")
counts = st.integers(0, 5_000)
paces = st.floats(1e-6, 1e-3)
loads = st.builds(
    WorkerLoad,
    counts,
    st.integers(0, 9),
    st.integers(0, 9),
    counts,
    st.integers(0, 12_000),
    st.sampled_from([0.0, 0.5]),
    counts,
    counts,
    counts,
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0.0, 3.5]),
    st.sampled_from([0.0, 9_000.0]),
)
worker_prefixes = st.builds(WorkerPrefix, counts, counts, counts)


# A strategy that is made in a composite is made anew for every worker of every example, which took
# as long as what is tested with it.
roles = st.sampled_from(list(Role))
tier_rates = st.builds(rates, st.floats(0, 0.1), paces)
cost_models = st.builds(
    lambda load, compute, step_tokens, delays, handoff: CostModel(
        ComputeRegression(compute),
        LoadModel([KV, SWA], dict(zip(Tier, load, strict=True))),
        step_tokens=step_tokens,
        interference=InterferenceRegression(delays),
        handoff=handoff,
    ),
    st.tuples(*[tier_rates] * len(Tier)),
    st.builds(ComputeCoefficients, st.floats(0, 0.01), paces, st.floats(1e-10, 1e-6)),
    st.sampled_from([0, 256, 2048]),
    st.none() | st.builds(InterferenceCoefficients, *[st.floats(0, 1e-3)] * 6),
    st.builds(HandoffCost, st.floats(0, 0.1), st.floats(0, 1e-4)),
)
worker_views = {
    name: st.builds(
        WorkerView,
        st.just(name),
        cost_models,
        st.sampled_from([10_000, 1 << 20]),
        roles,
        loads,
        st.sampled_from([0, 20_000]),
    )
    for name in NAMES
}


@st.composite
def workers(draw: st.DrawFn) -> list[WorkerView]:
    """Draw workers; at least one accepts requests and has room for any prompt."""
    names = NAMES[: draw(st.integers(1, 4))]
    found = [draw(worker_views[name]) for name in names]
    first = found[0]
    found[0] = WorkerView(
        first.name,
        first.costs,
        1 << 20,
        first.role,
        first.load._replace(accepting=True),
        first.cache_bytes,
    )
    return found


prefixes = st.dictionaries(st.sampled_from(NAMES), worker_prefixes)
owners = st.none() | st.sampled_from(NAMES)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    tokens = draw(st.integers(1, 6_000))
    return Step(
        tokens,
        draw(prefixes),
        "session",
        draw(owners),
        draw(st.integers(0, tokens)),
        draw(st.sampled_from([0.0, 100.0])),
        draw(st.booleans()),
    )
