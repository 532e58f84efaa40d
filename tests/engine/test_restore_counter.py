"""Restored tokens are counted by the farthest tier that each chunk needed."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.artifacts.record import Tier, distinct_tiers
from hetero_connector.engine.scheduler.requests import PendingRestore
from hetero_connector.engine.scheduler.restore_counter import tokens_by_tier
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.spec import StateType
from tests.planner.chains import CHUNK, KV, LOCAL, SWA, chain_of


@pytest.mark.parametrize(
    ("kv", "local", "swa", "expected"),
    [
        (Tier.DRAM, Tier.DRAM, Tier.DRAM, {"dram": 2 * CHUNK}),
        (Tier.SSD, Tier.PEER, Tier.DRAM, {"peer": 2 * CHUNK}),
        (Tier.PEER, Tier.SSD, Tier.DRAM, {"peer": 2 * CHUNK}),
        (Tier.DRAM, Tier.DRAM, Tier.SSD, {"dram": CHUNK, "ssd": CHUNK}),
        (Tier.SSD, Tier.DRAM, Tier.PEER, {"ssd": CHUNK, "peer": CHUNK}),
    ],
)
def test_tokens_by_the_farthest_tier(
    kv: Tier, local: Tier, swa: Tier, expected: dict[str, int]
) -> None:
    tiers: dict[StateType, Tier] = {KV: kv, LOCAL: local, SWA: swa}
    chunks = chain_of([tiers] * 2)
    plan = RestorePlan(2 * CHUNK, chunks, (KV, LOCAL), (SWA,), distinct_tiers(chunks))
    handle: Any = None
    assert tokens_by_tier(PendingRestore(plan, handle, local_tokens=0)) == expected
