"""The index, the slots of both tiers and their eviction, kept consistent.

A private part of `Catalog`, which holds the lock. The life of a slot: `take_dram` or `take_ssd`
reserves it, `attach` puts an artifact into it, `drop` and `forget` release it. A DRAM slot is free
once the artifact has no pins, and a slot of either tier once no transfer touches it. An SSD slot
may be taken again at once, but nothing is written until the journal has forgotten all of
`forgotten`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from hetero_connector.artifacts.record import ArtifactId, SlotRef, StoredChunk, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.evictability import Evictability, evictability
from hetero_connector.store.catalog.eviction import EvictFirst, UsersLast, make_policy, recency
from hetero_connector.store.catalog.exports import ExportFeed
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.pins import ChainPin, ChainPins
from hetero_connector.store.catalog.prefetch_schedule import Prefetched
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.slots import Generations, SlotPool
from hetero_connector.store.catalog.timed_pins import TimedPins

_SHORT = 8
"""A tier with less than one in so many slots free is about to evict."""
_MAX_EVICTED = 64
"""Artifacts of other types that leave for one slot at most: a millisecond of the engine's time."""


class Occupancy(NamedTuple):
    """The contents of a tier, and what it can hold."""

    tier: Tier
    capacity_bytes: int
    artifacts: Mapping[StateType, int]
    bytes: Mapping[StateType, int]
    """Useful bytes, without padding."""
    max_artifacts: Mapping[StateType, int]
    """The most that fits of each type, if there is little of the others."""


class Health(NamedTuple):
    """The parts of a store that may stop working; without an SSD tier its parts count as well."""

    io_alive: bool
    ssd_writable: bool = True
    ssd_readable: bool = True
    ssd_quarantined_bytes: int = 0


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
        """Changes for the fleet; None without one."""
        self.ssd = None if ssd is None else SlotPool(Tier.SSD, ssd)
        self.forgotten: list[ArtifactId] = []
        """Artifacts that have left the SSD. The journal must forget them before a write begins."""
        self.on_forgotten: Callable[[Artifact], None] = lambda artifact: None
        """Called with each artifact that leaves the index."""
        self.on_evicted: Callable[[Artifact, Tier], None] = lambda artifact, tier: None
        """Called with each artifact whose last copy the eviction policy takes from a tier."""
        self.newest_use_s = 0.0
        """Unix time of the last use that the journal listed when it was read."""
        self.journal_stale = False
        """True after `clear`: the whole journal must be cleared."""
        self.seconds_saved = seconds_saved
        self.prefetched = Prefetched(recorder)
        self.evict_first = EvictFirst()
        self._has_prefix = any(t.family is Family.PREFIX for t in dram.stride_bytes)
        self._pins = ChainPins()
        """While workers copy."""
        smallest = min(x.size_bytes for x in (dram, ssd) if x is not None)
        self.timed_pins = TimedPins(smallest, dram.stride_bytes, self._offer)
        self._recorder = recorder
        self._policies: dict[tuple[Tier, StateType], UsersLast] = {
            (tier, t): UsersLast(
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
        """Advance the logical clock, which orders uses, and return its time."""
        self._tick += 1
        return self._tick

    def take_dram(
        self, artifact: Artifact, spares: Callable[[Artifact], bool] | None = None
    ) -> SlotRef | None:
        """Take a DRAM slot for an artifact, evicting as needed; None if all others are blocked.

        What was used longest ago leaves: of the artifact's own type, or of others until a zone is
        free. `spares`: asked about the next victim of its own type, the only one that may leave
        then; if it returns True the victim stays and the result is None.
        """
        above = artifact.above
        return self._take(self.dram, artifact, None if above is None else above.dram, spares)

    def take_ssd(self, artifact: Artifact, after: SlotRef | None) -> SlotRef | None:
        """Take an SSD slot as `take_dram` does. `after`: the slot of what the artifact continues.

        Rows of what was evicted must be forgotten before anything is written: see `forgotten`.
        """
        assert self.ssd is not None
        return self._take(self.ssd, artifact, after)

    def mark_used(self, artifacts: Sequence[Artifact], now: int) -> None:
        """Count a use by a restore, at this tick of the logical clock."""
        for artifact in artifacts:
            artifact.last_used = now
            artifact.uses += 1
        self.prefetched.count_used(artifacts)
        self.evict_first.discard(artifacts)

    def demote(self, chunks: Sequence[StoredChunk]) -> None:
        """Let chunks leave the tier they are in before others, until they are used again."""
        for stored in chunks:
            node = self.index.nodes.get(stored.chunk.key)
            for artifact in node.artifacts.values() if node else ():
                if artifact.sealed and not artifact.pins:
                    tier = Tier.SSD if artifact.dram is None else Tier.DRAM
                    self.evict_first.add(artifact, tier)

    def mark_replica(self, artifact: Artifact) -> None:
        """Note that another worker owns it: it may leave DRAM where our own could not."""
        artifact.replica = True
        self._offer(artifact)

    def attach(self, artifact: Artifact, ref: SlotRef) -> None:
        """Note that the artifact is in `ref`."""
        offset = self.dram.offset(ref) if ref.tier is Tier.DRAM else -1
        self.index.attach(artifact, ref, offset)
        self._account(artifact, ref.tier, 1)
        if self.feed is not None:
            self.feed.on_changed(artifact)

    def free_ssd(self, artifact_id: ArtifactId, ref: SlotRef) -> None:
        """Release an SSD slot that the journal may list as this artifact's."""
        assert self.ssd is not None
        self.ssd.release(ref)
        self.forgotten.append(artifact_id)

    def show_adopted(self, artifacts: Iterable[Artifact]) -> None:
        """Make artifacts visible that a journal lists."""
        self.index.show_adopted()
        for artifact in artifacts:
            self._account(artifact, Tier.SSD, 1)
            if evictability(artifact, Tier.SSD) is not Evictability.BLOCKED:  # else offered later
                self._offer(artifact)
        for node in list(self.index.nodes.values()):
            self.forget_remains(node)

    def drop(self, artifact: Artifact, tier: Tier) -> None:
        """Drop the copy in `tier`; with its last copy the artifact is forgotten."""
        other = artifact.ssd if tier is Tier.DRAM else artifact.dram
        if other is None:
            self.forget(artifact)
            return
        if tier is Tier.DRAM:
            self.prefetched.discard(artifact)
        self._account(artifact, tier, -1)
        self._release(artifact.id, self.index.detach(artifact, tier))
        if self.feed is not None:
            self.feed.on_changed(artifact)

    def forget(self, artifact: Artifact) -> None:
        """Remove it from the index; pinned memory is released with the last pin."""
        self.index.remove(artifact)
        self._forgotten(artifact)

    def lose(self, artifact: Artifact) -> None:
        """Forget an artifact that cannot be used, and what is left of its chunk."""
        self.forget(artifact)
        self.forget_remains(artifact.node)

    def forget_remains(self, node: Node, *, is_evicted: bool = False) -> None:
        """Forget what is left of a leaf that has lost its prefix-proportional state.

        It cannot be restored, and would keep the chunks above it in place until its own turn comes.
        In a fleet our own state on SSD waits for that turn: a peer may have the rest of the chunk.
        `is_evicted`: the policy evicted that state, so that this counts as its eviction, too.
        """
        while self._has_prefix and node.parent is not None and not node.num_children:
            remains = list(node.artifacts.values())
            if any(a.state_type.family is Family.PREFIX for a in remains):
                return
            if self.feed is not None and any(a.ssd and not a.replica for a in remains):
                return
            for artifact in remains:
                for tier in (Tier.DRAM, Tier.SSD):
                    if artifact.slot(tier) is not None:
                        self._count_eviction(tier, artifact.state_type)
                        if is_evicted:
                            self.on_evicted(artifact, tier)
                self.forget(artifact)
            node = node.parent

    def clear(self) -> None:
        """Forget everything."""
        for artifact in self.index.clear():
            self._forgotten(artifact)
        for policy in self._policies.values():
            policy.clear()
        self.evict_first.clear()
        self.journal_stale = self.ssd is not None

    def unpin(self, artifact: Artifact) -> None:
        """Drop one pin. Pins are taken by adding to `artifact.pins`."""
        artifact.pins -= 1
        if artifact.pins == 0:
            self._freed(artifact)

    def next_victims(self, count: int) -> list[Node]:
        """Return our own chunks among the next to leave a full DRAM tier, about `count` a type."""
        found: dict[Node, None] = {}
        for kind in self.dram.geometry.stride_bytes:
            if self.dram.num_free(kind) * _SHORT <= self.dram.geometry.num_slots(kind):
                for artifact in self._policies[Tier.DRAM, kind].soon(count):
                    is_leaf = evictability(artifact, Tier.DRAM) is Evictability.FREE
                    if is_leaf and not artifact.replica:
                        found[artifact.node] = None
        return list(found)

    def on_unused(self, node: Node) -> None:
        """Let a chunk without users leave when its turn comes."""
        for artifact in node.artifacts.values():
            for tier in (Tier.DRAM, Tier.SSD):
                self._policies[tier, artifact.state_type].on_unused(artifact)

    def pin_chain(self, pin: ChainPin) -> None:
        """Keep the artifacts of a chain in place until `unpin_chain`."""
        self._pins.add(pin)

    def unpin_chain(self, pin: ChainPin) -> None:
        """End a pin. Artifacts that an eviction passed over for it may be evicted again."""
        for artifact in self._pins.remove(pin):
            if not artifact.pins:
                self._freed(artifact)

    def pinned(self) -> list[Artifact]:
        """List the pinned artifacts. For tests and diagnosis: O(artifacts)."""
        return [
            artifact
            for artifact in self.index.artifacts()
            if artifact.pins or self._pins.has(artifact)
        ]

    def leave_to_ssd(self) -> None:
        """Drop every DRAM copy that is on SSD too and not pinned."""
        pinned = set(self.pinned())
        for artifact in list(self.index.artifacts()):
            is_kept = artifact in pinned or artifact.node in self.timed_pins
            if not is_kept and artifact.dram is not None and artifact.ssd is not None:
                self.drop(artifact, Tier.DRAM)

    def occupancy(self) -> list[Occupancy]:
        """Return the contents of each tier."""
        pools = [self.dram] if self.ssd is None else [self.dram, self.ssd]
        return [
            Occupancy(
                pool.tier,
                pool.geometry.size_bytes,
                {kind: self._count[pool.tier, kind] for kind in pool.geometry.stride_bytes},
                {kind: self._bytes[pool.tier, kind] for kind in pool.geometry.stride_bytes},
                {kind: pool.geometry.num_slots(kind) for kind in pool.geometry.stride_bytes},
            )
            for pool in pools
        ]

    def publish_gauges(self) -> None:
        """Write occupancy into the recorder."""
        for tier, capacity_bytes, artifacts, num_bytes, _ in self.occupancy():
            self._recorder.set("heterocache_capacity_bytes", capacity_bytes, tier=tier.value)
            for kind in artifacts:
                labels = {"tier": tier.value, "state_type": kind.value}
                self._recorder.set("heterocache_bytes", num_bytes[kind], **labels)
                self._recorder.set("heterocache_artifacts", artifacts[kind], **labels)

    def check_integrity(self) -> None:
        """Raise AssertionError unless index, slots and accounts agree."""
        self.index.check_integrity()
        self.timed_pins.check_integrity()
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
                    assert stored <= pool.num_used(kind)

    def _offer(self, artifact: Artifact) -> None:
        if artifact.pins or not artifact.sealed:
            return  # it is offered again with its last unpin
        if artifact.dram is not None:
            self._policies[Tier.DRAM, artifact.state_type].offer(artifact)
        if artifact.ssd is not None:
            self._policies[Tier.SSD, artifact.state_type].offer(artifact)

    def _freed(self, artifact: Artifact) -> None:
        """Free the memory of a forgotten artifact without pins; offer another to eviction."""
        if not artifact.forgotten:
            self._offer(artifact)
        elif artifact.dram is not None and not self._pins.pass_over(artifact):
            self.dram.release(artifact.dram)
            artifact.dram = None

    def _pop_first(self, tier: Tier, state_type: StateType) -> Artifact | None:
        """Take out the next artifact that leaves before all others."""
        victim = self.evict_first.pop(tier, state_type, partial(self._evictability, tier))
        if victim is not None:
            self._recorder.add(
                "heterocache_evicted_first_bytes",
                victim.size_bytes,
                tier=tier.value,
                state_type=state_type.value,
            )
        return victim

    def _pop_ranked(self, tier: Tier, state_type: StateType) -> Artifact | None:
        """Take out the next victim of the eviction policy."""
        return self._policies[tier, state_type].pop(partial(self._evictability, tier))

    def _evictability(self, tier: Tier, artifact: Artifact) -> Evictability:
        if self._pins.pass_over(artifact) or self.timed_pins.pass_over(artifact):
            return Evictability.BLOCKED
        return evictability(artifact, tier)

    def _take(
        self,
        pool: SlotPool,
        artifact: Artifact,
        after: SlotRef | None,
        spares: Callable[[Artifact], bool] | None = None,
    ) -> SlotRef | None:
        """See `take_dram`."""
        tier, kind = pool.tier, artifact.state_type
        while (ref := pool.take(kind, after)) is None:
            victim = self._pop_first(tier, kind)
            is_ranked = victim is None
            if victim is None:
                victim = self._pop_ranked(tier, kind)
                if victim is not None and spares is not None and spares(victim):
                    self._offer(victim)
                    return None
                if spares is None and self._evict_others(pool, artifact, victim):
                    if victim is not None:
                        self._offer(victim)
                    continue
            if victim is None:
                return None
            if victim.sealed:  # else it was forgotten with the last of its chunk
                self._evict(victim, tier, is_ranked=is_ranked)
        return ref

    def _next_rank(self, tier: Tier, state_type: StateType) -> tuple[bool, float, int]:
        """Return about the rank of the type's next victim; the highest without one."""
        if self.evict_first.has_any(tier, state_type):
            return (False, -1, 0)
        lowest = self._policies[tier, state_type].lowest
        return (True, inf, 0) if lowest is None else _rank(lowest)

    def _evict_others(self, pool: SlotPool, wanting: Artifact, than: Artifact | None) -> bool:
        """Evict what other types used before `than` (None: ever), until a zone is free.

        Return whether there is a slot for `wanting` now. What left in vain, because its zones have
        newer state too, has made free slots for its own types, and a start for the next call. The
        rest of its own chunk stays: a checkpoint is of no use without it.
        """
        if not pool.geometry.num_zones or len(pool.geometry.bundles) == 1:
            return False
        chunk = list(wanting.node.artifacts.values())
        for artifact in chunk:
            artifact.pins += 1
        has_slot = self._evict_older(pool, wanting.state_type, than)
        for artifact in chunk:
            self.unpin(artifact)
        return has_slot

    def _evict_older(self, pool: SlotPool, kind: StateType, than: Artifact | None) -> bool:
        """Evict what other types used before `than`; return whether there is a slot for `kind`."""
        tier, geometry = pool.tier, pool.geometry
        others = [t for t in geometry.stride_bytes if t not in geometry.bundle_with(kind)]
        next_rank = partial(self._next_rank, tier)
        left = _MAX_EVICTED
        while others and left and not pool.num_free(kind):
            other = min(others, key=next_rank)
            if than is not None and next_rank(other) >= _rank(than):
                return False
            victim = self._pop_first(tier, other)
            is_ranked = victim is None
            if victim is None:
                victim = self._pop_ranked(tier, other)
                if victim is None:
                    others.remove(other)
                    continue
                if than is not None and _rank(victim) >= _rank(than):
                    self._offer(victim)  # the one that was expected is blocked
                    continue
            self._evict(victim, tier, is_ranked=is_ranked)
            left -= 1
        return pool.num_free(kind) > 0

    def _evict(self, victim: Artifact, tier: Tier, *, is_ranked: bool) -> None:
        """Evict a victim: of the policy if `is_ranked`, else one that was to leave first."""
        self._count_eviction(tier, victim.state_type)
        self.drop(victim, tier)
        if victim.forgotten:
            if is_ranked:
                self.on_evicted(victim, tier)
            self.forget_remains(victim.node, is_evicted=is_ranked)

    def _count_eviction(self, tier: Tier, state_type: StateType) -> None:
        self._recorder.add("heterocache_evictions", tier=tier.value, state_type=state_type.value)

    def _forgotten(self, artifact: Artifact) -> None:
        self.on_forgotten(artifact)
        self.prefetched.discard(artifact)
        if self.feed is not None:
            self.feed.on_forgotten(artifact)
        if artifact.dram is not None:
            self._account(artifact, Tier.DRAM, -1)
            if not artifact.pins:
                self._freed(artifact)
        if artifact.ssd is not None:
            self._account(artifact, Tier.SSD, -1)
            self._release(artifact.id, artifact.ssd)
            artifact.ssd = None

    def _release(self, artifact_id: ArtifactId, ref: SlotRef) -> None:
        if ref.tier is Tier.DRAM:
            self.dram.release(ref)
        else:
            self.free_ssd(artifact_id, ref)

    def _account(self, artifact: Artifact, tier: Tier, step: int) -> None:
        self._bytes[tier, artifact.state_type] += step * artifact.size_bytes
        self._count[tier, artifact.state_type] += step


def _rank(artifact: Artifact) -> tuple[bool, float, int]:
    """Order artifacts of different types by what leaves first: see `eviction.recency`."""
    return artifact.node.users > 0, *recency(artifact)
