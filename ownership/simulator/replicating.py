"""Replicas of hot prefixes: the directory's groups count uses, the package's policy orders copies.

Traces name no repository. What counts here as a group is where a new session or a fork leaves what
others computed: the longest prefix of it that some worker can be read from. The end of a private
conversation is one, too, but nobody else comes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory import DirectoryLimits
from ownership.directory.memory_sessions import MemoryGroups
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.replication import HotPrefix, ReplicaPolicy
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.simulator.machine.peer_reads import PeerReads
from ownership.simulator.machine.worker import Worker
from ownership.simulator.traces.block_runs import BlockRuns

_LOOK_S = 1.0
"""Seconds between two looks at what is hot."""
_LOOKED_AT = 8
"""The hottest groups: each is looked up at every worker."""
_MAX_GROUPS = 1_024


class Replicating:
    """Counts what new sessions share, and has copies of the hottest made now and then."""

    def __init__(
        self, policy: ReplicaPolicy, workers: Mapping[str, Worker], reads: PeerReads
    ) -> None:
        self.copies = 0
        """That arrived."""
        self._policy, self._workers, self._reads = policy, workers, reads
        self._groups = MemoryGroups(DirectoryLimits(max_groups=_MAX_GROUPS))
        self._chains: dict[str, BlockRuns] = {}
        """By group: what a copy of it is."""
        self._under_way: dict[str, int] = {}
        """Copies on their way, by group."""
        self._look_s = 0.0

    def begins(self, step: Step, chain: BlockRuns, chunk_tokens: int, now_s: float) -> None:
        """A session or a fork begins: count a use of what it shares with others."""
        shared = max((held.dram_tokens for held in step.prefixes.values()), default=0)
        if not shared:
            return
        prefix = chain.head(shared // chunk_tokens)
        first, count = prefix.runs[-1]
        key = ChunkKey((first + count - 1).to_bytes(16, "little"))
        self._chains[key.hex()] = prefix
        self._groups.use(key.hex(), key, now_s)
        if len(self._chains) > 2 * _MAX_GROUPS:
            known = {group.name for group in self._groups.hottest(_MAX_GROUPS, now_s)}
            self._chains = {name: chain for name, chain in self._chains.items() if name in known}

    def look(self, fleet: FleetView, chunk_tokens: int, now_s: float) -> set[str]:
        """Have copies made where the policy wants some; workers that are busy with that now."""
        if now_s < self._look_s:
            return set()
        self._look_s = now_s + _LOOK_S
        hot = [
            HotPrefix(name, heat, chain.num_blocks * chunk_tokens, self._held(chain))
            for name, heat, _ in self._groups.hottest(_LOOKED_AT, now_s)
            if not self._under_way.get(name)
            for chain in (self._chains[name],)
        ]
        busy: set[str] = set()
        for order in self._policy.orders(hot, fleet):
            source, target = self._workers[order.source], self._workers[order.target]
            chain, ended = self._chains[order.prefix], partial(self._ended, order.prefix)
            if self._reads.begin(source, target, chain, chain.num_blocks, ended):
                self._under_way[order.prefix] = self._under_way.get(order.prefix, 0) + 1
                busy |= {order.source, order.target}
        return busy

    def _held(self, chain: BlockRuns) -> dict[str, WorkerPrefix]:
        up = (worker for worker in self._workers.values() if worker.up)
        found = ((worker.name, worker.memory.held(chain)) for worker in up)
        return {name: held for name, held in found if held is not None}

    def _ended(self, name: str, chunks: int) -> None:
        self.copies += chunks > 0
        self._under_way[name] -= 1
        if not self._under_way[name]:
            del self._under_way[name]
