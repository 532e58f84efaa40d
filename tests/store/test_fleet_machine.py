"""The store's model test where other engines own some of the chains' chunks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.store.catalog.evictability import Evictability, evictability
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.peers.ports import PeerAccess
from tests.store.filling import DENSE, ids_of
from tests.store.test_store_machine import DEPTH, TRUNKS, StoreMachine, chains
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers

pytestmark = pytest.mark.long

THEIRS = {chunk.key for chunk in (*TRUNKS["b"][:2], TRUNKS["c"][1])}
"""The chunks that two chains begin with, and the middle of a third."""


class FleetMachine(StoreMachine):
    """Others' artifacts leave no trace on the SSD, and ours stay there without it."""

    def __init__(self) -> None:
        self.promoted = set[bytes]()
        super().__init__()

    def peers(self) -> PeerAccess:
        network = MemoryNetwork()
        return PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions))

    def complete(self, index: int) -> None:
        chunk = self.saves[index].chunk
        super().complete(index)
        self.judge(chunk.key)

    def judge(self, key: bytes) -> None:
        """The claims of the fleet on everything of the chunk that is here."""
        node = self.store.catalog.tiers.index.nodes.get(key)  # type: ignore[call-overload]
        assert self.store.sharing is not None
        ids = [] if node is None else [a.id for a in node.artifacts.values() if a.sealed]
        if key in THEIRS - self.promoted:
            self.store.sharing.resolve_claims({}, ids)
        else:
            self.store.sharing.resolve_claims(dict.fromkeys(ids, 1), ())

    @rule(name=chains, depth=st.integers(0, DEPTH - 1))
    def promote(self, name: str, depth: int) -> None:
        """The chunk's owner, if there is another, has ended."""
        key = TRUNKS[name][depth].key
        self.promoted.add(key)
        self.judge(key)

    @rule(name=chains)
    def a_replica_expires(self, name: str) -> None:
        for chunk in TRUNKS[name]:
            node = self.store.catalog.tiers.index.nodes.get(chunk.key)
            for artifact in node.artifacts.values() if node else ():
                if artifact.replica and artifact.dram is not None:
                    self.store.catalog.tiers.evict_first.add(artifact, Tier.DRAM)

    def may_be_a_gap(self, node: Node) -> bool:
        nodes = self.store.catalog.tiers.index.nodes.values()
        only_gaps_below = not any(n.artifacts for n in nodes if n.parent is node)
        return node.key in THEIRS or only_gaps_below

    def check_restarted(self, back: set[ArtifactId]) -> None:
        told = {
            i
            for t in TRUNKS.values()
            for x in self.store.holdings(t)
            for i in ids_of([x.chunk], x.tiers)
        }
        assert back == told

    def comes_back(self, artifact_id: ArtifactId, durable: set[ArtifactId]) -> bool:
        return ArtifactId(artifact_id.chunk, DENSE) in durable

    @invariant()
    def what_others_own_was_not_written(self) -> None:
        for artifact in self.store.catalog.tiers.index.artifacts():
            if artifact.node.key in THEIRS - self.promoted:
                assert artifact.ssd is None

    @invariant()
    def whatever_may_leave_a_tier_will(self) -> None:
        """With nothing held in place each is known to its policy, and there is one, but on an
        SSD for what DRAM alone has."""
        tiers = self.store.catalog.tiers
        if tiers._pins or tiers.timed_pins:
            return
        for (tier, kind), policy in tiers._policies.items():
            here = [a for a in tiers.index.artifacts() if a.state_type is kind and a.slot(tier)]
            free = [a for a in here if evictability(a, tier) is not Evictability.BLOCKED]
            known = set[Artifact]()
            for part in (policy._first, policy._last):
                known |= part._leaves._members | part._backed._members  # type: ignore[attr-defined]
            assert known >= set(free), "it was never offered again"
            others = list(tiers.index.artifacts())
            if any(a.pins or not a.sealed for a in others):
                continue
            if tier is Tier.DRAM or all(a.ssd is not None for a in others):
                assert free or not here, "and none can make room"


FleetMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestFleetMachine = FleetMachine.TestCase
