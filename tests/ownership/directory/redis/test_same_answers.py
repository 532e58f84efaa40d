"""Redis gives the same answers as the directory in memory, for any calls in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.errors import DirectoryError, StaleEpochError
from ownership.directory import ChainView, Claim, Directory, Grant, Worker
from ownership.directory.identifiers import Epoch, Token
from tests.ownership.fleet_bench import KV, LIMITS, WINDOW, MemoryBench, chain, copy_of
from tests.ownership.redis_bench import RedisBench

TRUNK = chain("same", 6)
FORK = [*TRUNK[:3], *chain("same fork", 3)]
CHUNKS = [*TRUNK, *FORK[3:]]
PARENT_OF = dict(zip(TRUNK[1:], TRUNK, strict=False)) | dict(zip(FORK[1:], FORK, strict=False))
ARTIFACTS = st.lists(
    st.builds(ArtifactId, st.sampled_from(CHUNKS), st.sampled_from([KV, WINDOW])), max_size=5
)
KEYS = st.lists(st.sampled_from(CHUNKS), max_size=4)
NAMES = st.sampled_from(["ann", "bob", "cat"])


class Side:
    """One directory, with its epochs and tokens numbered in the order in which they were seen."""

    def __init__(self, bench: MemoryBench | RedisBench) -> None:
        self.bench = bench
        self.directory: Directory = bench.open()
        self.epochs: list[Epoch] = []
        self.tokens: list[int] = [0]
        self.owned: dict[ArtifactId, list[Token]] = {}

    def epoch(self, number: int) -> Epoch:
        return self.epochs[number % len(self.epochs)]

    def told(self, answer: object) -> object:
        """Return the answer without the numbers that each directory chooses."""
        if isinstance(answer, ChainView):
            chunks = [
                {str(kind): self.told(found[kind]) for kind in sorted(found)}
                for found in answer.chunks
            ]
            status = [str(answer.status(epoch)) for epoch in self.epochs]
            return chunks, status, answer.now_s
        if isinstance(answer, (list, tuple)):
            return [self.told(x) for x in answer]
        return self._ordinal(answer) if isinstance(answer, int) else answer

    def _ordinal(self, number: int) -> object:
        if number in self.epochs:
            return f"epoch {self.epochs.index(Epoch(number))}"
        if number > 100_000 or number in self.tokens:
            if number not in self.tokens:
                self.tokens.append(number)
            return f"number {self.tokens.index(number)}"
        return number


class SameAnswers(RuleBasedStateMachine):
    """Every rule calls both directories."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = (Side(MemoryBench(LIMITS)), Side(RedisBench(LIMITS)))

    def both(self, ask: Callable[[Side], Any]) -> None:
        first, second = (self._outcome(side, ask) for side in self.sides)
        assert first == second

    def _outcome(self, side: Side, ask: Callable[[Side], Any]) -> object:
        try:
            return side.told(ask(side))
        except StaleEpochError as error:
            return f"stale: {side.told(error.epoch)}"
        except DirectoryError as error:
            return type(error).__name__

    @initialize()
    def two_workers(self) -> None:
        self.register("ann", 10.0)
        self.register("bob", 10.0)

    @rule(name=NAMES, lease_s=st.sampled_from([5.0, 10.0, 30.0]))
    def register(self, name: str, lease_s: float) -> None:
        def ask(side: Side) -> None:
            worker = Worker(name, b"peer", f"/ssd/{name}")
            # A floor makes numbers large, so that they are told from counts and seconds.
            side.epochs.append(side.directory.register(worker, lease_s, 1_000_000).epoch)

        self.both(ask)

    @rule(who=st.integers(0, 9))
    def renew(self, who: int) -> None:
        def ask(side: Side) -> None:
            side.directory.renew_lease(side.epoch(who))  # memories have names of their own

        self.both(ask)

    @rule(who=st.integers(0, 9))
    def end(self, who: int) -> None:
        self.both(lambda side: side.directory.end_lease(side.epoch(who)))

    @rule(who=st.integers(0, 9), what=ARTIFACTS, offset=st.integers(-1, 3), parents=st.booleans())
    def claim(self, who: int, what: list[ArtifactId], offset: int, parents: bool) -> None:
        def ask(side: Side) -> list[Grant]:
            claims = [
                Claim(a, copy_of(a, offset), PARENT_OF.get(a.chunk, ROOT) if parents else ROOT)
                for a in what
            ]
            grants = side.directory.claim_owner(side.epoch(who), claims)
            for artifact, grant in zip(what, grants, strict=True):
                side.owned.setdefault(artifact, []).append(grant.token)
            return grants

        self.both(ask)

    @rule(who=st.integers(0, 9), what=ARTIFACTS, which=st.integers(-1, 3))
    def release(self, who: int, what: list[ArtifactId], which: int) -> None:
        def ask(side: Side) -> None:
            tokens = {a: side.owned.get(a, [Token(0)]) for a in what}
            owned = {a: Token(0) if which < 0 else t[which % len(t)] for a, t in tokens.items()}
            side.directory.release(side.epoch(who), owned)

        self.both(ask)

    @rule(who=st.integers(0, 9), what=ARTIFACTS, ttl_s=st.sampled_from([3.0, 20.0]))
    def replicate(self, who: int, what: list[ArtifactId], ttl_s: float) -> None:
        copies = [Claim(a, copy_of(a, 8_192)) for a in what]
        self.both(lambda s: s.directory.replicate_readonly(s.epoch(who), copies, ttl_s))

    @rule(who=st.integers(0, 9), user=NAMES, chunks=KEYS)
    def add_chain_user(self, who: int, user: str, chunks: list[ChunkKey]) -> None:
        self.both(lambda side: side.directory.add_chain_user(side.epoch(who), user, chunks))

    @rule(who=st.integers(0, 9), user=NAMES, chunks=KEYS)
    def remove_chain_user(self, who: int, user: str, chunks: list[ChunkKey]) -> None:
        self.both(lambda side: side.directory.remove_chain_user(side.epoch(who), user, chunks))

    @rule(seconds=st.sampled_from([0.5, 3.0, 7.0, 61.0, 700.0, -50.0]))
    def pass_time(self, seconds: float) -> None:
        self.both(lambda side: side.bench.advance(seconds))

    @rule()
    def sweep(self) -> None:
        self.both(lambda side: side.directory.sweep(1_000))

    @rule(who=st.integers(0, 9), adopted=st.integers(0, 3), floor=st.integers(0, 3))
    def report_generation(self, who: int, adopted: int, floor: int) -> None:
        def ask(side: Side) -> int:
            return side.directory.report_generation(side.epoch(who), adopted, floor)

        self.both(ask)

    @invariant()
    def the_same_is_known(self) -> None:
        self.both(lambda side: side.directory.lookup(TRUNK))
        self.both(lambda side: side.directory.lookup(FORK))
        self.both(lambda side: side.directory.count_users(CHUNKS))
        self.both(lambda side: sorted(w.name for w in side.directory.workers().values()))
        self.both(lambda side: sorted(side.directory.generation().adopted.items()))

    def teardown(self) -> None:
        for side in self.sides:
            side.bench.close()


SameAnswers.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestSameAnswers = SameAnswers.TestCase
