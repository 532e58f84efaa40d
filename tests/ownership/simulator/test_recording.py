"""A recorded simulation: the same figures, and a timeline that agrees with them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from hetero_connector.timeline import Timeline
from ownership.scheduling.fleet import Role
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from tests.chrome_trace import read_trace
from tests.ownership.simulator.small_fleets import DENSE, TIGHT, agents, fleet

FLEETS = {
    "ownerserve": fleet(2, capacity=TIGHT[DENSE]),
    "static_pd": fleet(2, roles=(Role.PREFILL, Role.DECODE)),
}


@pytest.mark.parametrize("policy", FLEETS)
def test_the_timeline_agrees_with_the_figures(policy: str, tmp_path: Path) -> None:
    spec: FleetSpec = FLEETS[policy]
    timeline, trace = Timeline(), agents(sessions=6)
    recorded = simulate(trace, spec, parse_policy(policy), timeline=timeline).figures
    assert recorded == simulate(trace, spec, parse_policy(policy)).figures
    timeline.write(tmp_path / "t.json")
    slices = read_trace(tmp_path / "t.json")
    assert {x.process for x in slices} == {worker.name for worker in spec.workers}
    seconds: defaultdict[str, float] = defaultdict(float)
    for found in slices:
        seconds[found.track] += 1e-6 * (found.end_us - found.begin_us)
    span_s = recorded.span_s * len(spec.workers)
    assert seconds["engine"] == pytest.approx(recorded.busy_share * span_s, rel=1e-3)
    decodes = [x for x in slices if x.name == "decode" and x.track.startswith("requests")]
    assert len(decodes) == recorded.requests
    answers = [x for x in slices if x.name.startswith("session")]
    assert len(answers) == recorded.requests * (2 if policy == "static_pd" else 1)
    assert (seconds["from peers"] > 0) == (recorded.network_bytes > 0)
    assert (seconds["SSD reads"] > 0) == (recorded.ssd_read_bytes > 0)
