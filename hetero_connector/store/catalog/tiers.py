"""What lies where: the index, the slots of both tiers and their eviction, kept consistent.

Every method needs the store's lock held. Slot life cycle: `take` reserves one (evicting
from DRAM if needed), `attach` puts an artifact into it, `drop` and `forget` give it back;
a DRAM slot waits for the artifact's pins and holds, an SSD slot for the journal to forget its row
(`Forgotten`), and either for transfers that still touch it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from hetero_connector.artifacts.record import ArtifactId, SlotRef, StoredChunk, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.chain_users import ReadersLast
from hetero_connector.store.catalog.evict_first import Demoted
from hetero_connector.store.catalog.evictability import Standing
from hetero_connector.store.catalog.eviction import make_policy
from hetero_connector.store.catalog.exports import ExportFeed
from hetero_connector.store.catalog.hold import Hold, Holds
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.catalog.jobs import Forgotten
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.prefetched import Prefetched
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from hetero_connector.store.catalog.slots import Generations, SlotGeometry, SlotPool

_SHORT = 8
"""A tier with less than one in so many slots free is about to evict."""


class Tiers:
    """Index, slots and eviction of DRAM and, if there is one, SSD."""

    def __init__(
        self,
        chunk_tokens: int,
        dram: SlotGeometry,
        ssd: SlotGeometry | None,
        recorder: Recorder,
        eviction: EvictionName = "leaf_lru",
        seconds_saved: SecondsSaved = default_seconds_saved,
        generations: Generations | None = None,
        exports: ExportFeed | None = None,
    ) -> None:
        self.index = PrefixIndex(chunk_tokens, self._offer)
        self.dram = SlotPool(Tier.DRAM, dram, generations)
        self.feed = exports
        """What the fleet is told, as it changes; None: there is no fleet."""
        self.ssd = None if ssd is None else SlotPool(Tier.SSD, ssd)
        self.forgotten: list[Forgotten] = []
        """SSD slots waiting for the journal."""
        self.on_forgotten: Callable[[Artifact], None] = lambda artifact: None
        """Called for each artifact that leaves the index."""
        self.journal_stale = False
        """The whole journal must be cleared (`clear` was called)."""
        self.seconds_saved = seconds_saved
        self.prefetched = Prefetched(recorder)
        self.demoted = Demoted()
        self._has_prefix = any(t.family is Family.PREFIX for t in dram.stride_bytes)
        self._holds = Holds()
        self._recorder = recorder
        self._policies: dict[tuple[Tier, StateType], ReadersLast] = {
            (tier, t): ReadersLast(
                make_policy(eviction, seconds_saved, lambda: self._tick),
                make_policy(eviction, seconds_saved, lambda: self._tick),
            )
            for tier in (Tier.DRAM, Tier.SSD)
            for t in dram.stride_bytes
        }
        self._bytes: defaultdict[tuple[Tier, StateType], int] = defaultdict(int)
        self._count: defaultdict[tuple[Tier, StateType], int] = defaultdict(int)
        self._tick = 0

    def tick(self) -> int:
        """The next moment of the store's logical clock: recency without time stamps."""
        self._tick += 1
        return self._tick

    def take_dram(
        self, state_type: StateType, spares: Callable[[Artifact], bool] | None = None
    ) -> SlotRef | None:
        """A DRAM slot, evicting as needed; None if everything of the type is held.

        `spares`: asked of the next victim; where it says so, the victim stays and the answer
        is None.
        """
        while (ref := self.dram.take(state_type)) is None:
            victim = self._pop(Tier.DRAM, state_type, spares)
            if victim is None:
                return None
            self._evict(victim, Tier.DRAM)
        return ref

    def evict_ssd(self, state_type: StateType) -> bool:
        """Drop the next SSD victim; its slot is free once the journal has forgotten it."""
        victim = self._pop(Tier.SSD, state_type)
        if victim is not None:
            self._evict(victim, Tier.SSD)
        return victim is not None

    def used(self, artifacts: Sequence[Artifact], now: int) -> None:
        """A restore used them, at this moment of the logical clock."""
        for artifact in artifacts:
            artifact.last_used = now
            artifact.uses += 1
        self.prefetched.used(artifacts)
        self.demoted.used(artifacts)

    def demote(self, chunks: Sequence[StoredChunk]) -> None:
        """They leave the tier they are in before others, while nobody uses them."""
        for stored in chunks:
            node = self.index.nodes.get(stored.chunk.key)
            for artifact in node.artifacts.values() if node else ():
                if artifact.sealed and not artifact.pins:
                    tier = Tier.SSD if artifact.dram is None else Tier.DRAM
                    self.demoted.add(artifact, tier)

    def is_theirs(self, artifact: Artifact) -> None:
        """Another worker owns it: it may leave DRAM where our own could not."""
        artifact.replica = True
        self._offer(artifact)

    def attach(self, artifact: Artifact, ref: SlotRef) -> None:
        """The artifact lies in `ref` from now."""
        offset = self.dram.offset(ref) if ref.tier is Tier.DRAM else -1
        self.index.attach(artifact, ref, offset)
        self._account(artifact, ref.tier, 1)
        if self.feed is not None:
            self.feed.here(artifact)

    def adopted(self, artifacts: Iterable[Artifact]) -> None:
        """They are in the index and on SSD: visible from now."""
        self.index.show_adopted()
        for artifact in artifacts:
            self._account(artifact, Tier.SSD, 1)
            if self.index.standing(artifact, Tier.SSD) is not Standing.HELD:  # offered later
                self._offer(artifact)
        for node in list(self.index.nodes.values()):
            self.forget_remains(node)

    def drop(self, artifact: Artifact, tier: Tier) -> None:
        """Drop the copy in `tier`, and with the last copy the artifact."""
        other = artifact.ssd if tier is Tier.DRAM else artifact.dram
        if other is None:
            self.forget(artifact)
            return
        if tier is Tier.DRAM:
            self.prefetched.left(artifact)
        self._account(artifact, tier, -1)
        self._give_back(artifact.id, self.index.detach(artifact, tier))
        if self.feed is not None:
            self.feed.here(artifact)

    def forget(self, artifact: Artifact) -> None:
        """Remove it from the index; memory still pinned is given back with the last pin."""
        self.index.remove(artifact)
        self._forgotten(artifact)

    def lose(self, artifact: Artifact) -> None:
        """Forget what could not be read or is wrong, and what is left of its chunk."""
        self.forget(artifact)
        self.forget_remains(artifact.node)

    def forget_remains(self, node: Node) -> None:
        """Forget what is left of a leaf that has lost its prefix-proportional state.

        Nobody can restore it, and it would keep the chunks above in place: a tier has as many
        slots for checkpoints as for chunks, so where few chunks have one they are never short.
        """
        while self._has_prefix and node.parent is not None and not node.num_children:
            remains = list(node.artifacts.values())
            if any(a.state_type.family is Family.PREFIX for a in remains):
                return
            for artifact in remains:
                for tier in (Tier.DRAM, Tier.SSD):
                    if artifact.slot(tier) is not None:
                        self._count_eviction(tier, artifact.state_type)
                self.forget(artifact)
            node = node.parent

    def clear(self) -> None:
        """Forget everything."""
        for artifact in self.index.clear():
            self._forgotten(artifact)
        for policy in self._policies.values():
            policy.clear()
        self.demoted.clear()
        self.journal_stale = self.ssd is not None

    def unpin(self, artifact: Artifact) -> None:
        """Drop one pin (pins are taken by adding to `artifact.pins`)."""
        artifact.pins -= 1
        if artifact.pins == 0:
            self._freed(artifact)

    def soon_to_leave(self, count: int) -> list[Node]:
        """Chunks of our own among the next to leave a full DRAM tier, about `count` a type."""
        found: dict[Node, None] = {}
        for kind in self.dram.geometry.stride_bytes:
            if self.dram.free(kind) * _SHORT <= self.dram.geometry.count:
                for artifact in self._policies[Tier.DRAM, kind].soon(count):
                    is_leaf = self.index.standing(artifact, Tier.DRAM) is Standing.LEAF
                    if is_leaf and not artifact.replica:
                        found[artifact.node] = None
        return list(found)

    def unread(self, node: Node) -> None:
        """Nobody reads the chunk any more: it leaves when its turn comes."""
        for artifact in node.artifacts.values():
            for tier in (Tier.DRAM, Tier.SSD):
                self._policies[tier, artifact.state_type].unread(artifact)

    def hold(self, hold: Hold) -> None:
        """Keep in place what it covers, until `let_go`."""
        self._holds.add(hold)

    def let_go(self, hold: Hold) -> None:
        """End a hold: what was passed over for its sake is looked at again."""
        for artifact in self._holds.remove(hold):
            if not artifact.pins:
                self._freed(artifact)

    def held(self, artifact: Artifact) -> bool:
        """Return whether a restore needs the artifact where it is. O(1), amortised over the holds.

        If so it is offered again when the last hold of it ends.
        """
        return self._holds.pass_over(artifact)

    def in_use(self) -> list[Artifact]:
        """What a pin or a hold keeps in place now. For tests and diagnosis: O(artifacts)."""
        return [
            artifact
            for artifact in self.index.artifacts()
            if artifact.pins or self._holds.has(artifact)
        ]

    def publish_gauges(self) -> None:
        """Write occupancy into the recorder."""
        pools = [self.dram] if self.ssd is None else [self.dram, self.ssd]
        for pool in pools:
            tier = pool.tier
            self._recorder.set(
                "heterocache_capacity_bytes", pool.geometry.size_bytes, tier=tier.value
            )
            for kind in pool.geometry.stride_bytes:
                labels = {"tier": tier.value, "state_type": kind.value}
                self._recorder.set("heterocache_bytes", self._bytes[tier, kind], **labels)
                self._recorder.set("heterocache_artifacts", self._count[tier, kind], **labels)

    def check_integrity(self) -> None:
        """Raise AssertionError unless index, slots and accounts agree."""
        self.index.check_integrity()
        occupied: defaultdict[Tier, set[SlotRef]] = defaultdict(set)
        size: defaultdict[tuple[Tier, StateType], int] = defaultdict(int)
        for artifact in self.index.artifacts():
            for ref in (artifact.dram, artifact.ssd):
                if ref is not None:
                    assert ref not in occupied[ref.tier], "two artifacts in one slot"
                    occupied[ref.tier].add(ref)
                    size[ref.tier, ref.state_type] += artifact.size_bytes
        assert size == {k: v for k, v in self._bytes.items() if v}, "accounts disagree"
        for pool in (self.dram, self.ssd):
            if pool is not None:
                pool.check_integrity()
                for kind in pool.geometry.stride_bytes:
                    stored = sum(r.state_type is kind for r in occupied[pool.tier])
                    assert stored <= pool.used(kind)

    def _offer(self, artifact: Artifact) -> None:
        if artifact.pins or not artifact.sealed:
            return  # offered again when the last pin goes
        if artifact.dram is not None:
            self._policies[Tier.DRAM, artifact.state_type].offer(artifact)
        if artifact.ssd is not None:
            self._policies[Tier.SSD, artifact.state_type].offer(artifact)

    def _freed(self, artifact: Artifact) -> None:
        """No pin is left: it may be evicted; if it is forgotten its memory is free."""
        if not artifact.forgotten:
            self._offer(artifact)
        elif artifact.dram is not None and not self.held(artifact):
            self.dram.give_back(artifact.dram)
            artifact.dram = None

    def _pop(
        self,
        tier: Tier,
        state_type: StateType,
        spares: Callable[[Artifact], bool] | None = None,
    ) -> Artifact | None:
        def standing(artifact: Artifact) -> Standing:
            return Standing.HELD if self.held(artifact) else self.index.standing(artifact, tier)

        victim = self.demoted.pop(tier, state_type, standing)
        if victim is not None:
            self._recorder.add(
                "heterocache_evicted_first_bytes",
                victim.size_bytes,
                tier=tier.value,
                state_type=state_type.value,
            )
            return victim
        victim = self._policies[tier, state_type].pop(standing)
        if victim is not None and spares is not None and spares(victim):
            self._offer(victim)
            return None
        return victim

    def _evict(self, victim: Artifact, tier: Tier) -> None:
        self._count_eviction(tier, victim.state_type)
        self.drop(victim, tier)
        if victim.forgotten:
            self.forget_remains(victim.node)

    def _count_eviction(self, tier: Tier, state_type: StateType) -> None:
        self._recorder.add("heterocache_evictions", tier=tier.value, state_type=state_type.value)

    def _forgotten(self, artifact: Artifact) -> None:
        self.on_forgotten(artifact)
        self.prefetched.left(artifact)
        if self.feed is not None:
            self.feed.gone(artifact)
        if artifact.dram is not None:
            self._account(artifact, Tier.DRAM, -1)
            if not artifact.pins:
                self._freed(artifact)
        if artifact.ssd is not None:
            self._account(artifact, Tier.SSD, -1)
            self._give_back(artifact.id, artifact.ssd)
            artifact.ssd = None

    def _give_back(self, artifact_id: ArtifactId, ref: SlotRef) -> None:
        if ref.tier is Tier.DRAM:
            self.dram.give_back(ref)
        else:
            self.forgotten.append(Forgotten(artifact_id, ref))

    def _account(self, artifact: Artifact, tier: Tier, step: int) -> None:
        self._bytes[tier, artifact.state_type] += step * artifact.size_bytes
        self._count[tier, artifact.state_type] += step
