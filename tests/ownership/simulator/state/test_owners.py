"""Owners by name are what the package's directory would answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.spec.state_types import StateType
from ownership.directory import CHECKSUM_BYTES, Claim, Copy, Worker
from ownership.directory.identifiers import Epoch, Token
from ownership.directory.memory import MemoryDirectory
from ownership.simulator.state.owners import ChunkOwners, OwnedSpan, are_covered
from ownership.simulator.traces.block_runs import BlockRuns
from tests.ownership.simulator.state.few_chunks import names, prompts

WORKERS = ("a", "b", "c")
COPY = Copy(1, bytes(CHECKSUM_BYTES))


class Fleet:
    """Workers that hold what they claim, with a directory that gets the same claims."""

    def __init__(self) -> None:
        self.owners = ChunkOwners(self._owned)
        self.owned: dict[str, dict[int, Token]] = {name: {} for name in WORKERS}
        self.directory = MemoryDirectory(lambda: 0.0)
        self.epochs: dict[str, Epoch] = {}
        for name in WORKERS:
            self.register(name)

    def register(self, name: str) -> None:
        self.epochs[name] = self.directory.register(Worker(name, b""), 10.0).epoch

    def claim(self, name: str, chain: BlockRuns, first: int) -> tuple[list[str], list[str]]:
        """Return the owners of the chunks by name, and by the directory."""
        chunks = chain.tail(first).ids().tolist()
        by_name, begin = list[str](), first
        for end, owner in self.owners.claim(name, chain, first):
            by_name += [owner] * (end - begin)
            begin = end
        epoch = self.epochs[name]
        grants = self.directory.claim_owner(epoch, [Claim(_id(c), COPY) for c in chunks])
        of_epoch = {epoch: name for name, epoch in self.epochs.items()}
        for chunk, grant in zip(chunks, grants, strict=True):
            if grant.owner == epoch:
                self.owned[name][chunk] = grant.token
        return by_name, [of_epoch[grant.owner] for grant in grants]

    def lose(self, name: str, chain: BlockRuns, start: int, end: int) -> None:
        for chunk in chain.head(end).tail(start).ids().tolist():
            if (token := self.owned[name].pop(chunk, None)) is not None:
                self.directory.release(self.epochs[name], {_id(chunk): token})

    def die(self, name: str) -> None:
        """And its lease runs out; it comes back with nothing."""
        self.directory.end_lease(self.epochs[name])
        self.owned[name].clear()
        self.register(name)

    def _owned(self, name: str, chain: BlockRuns) -> list[tuple[int, int]]:
        chunks = enumerate(chain.ids().tolist())
        return [(at, at + 1) for at, chunk in chunks if chunk in self.owned[name]]


def _id(chunk: int) -> ArtifactId:
    return ArtifactId(ChunkKey(chunk.to_bytes(16, "big")), StateType.DENSE_KV)


@given(prompts, st.data())
def test_claims_are_granted_as_by_the_directory(
    texts: list[list[int]], data: st.DataObject
) -> None:
    fleet = Fleet()
    for chain in names(texts):
        name = data.draw(st.sampled_from(WORKERS))
        first = data.draw(st.integers(0, chain.num_blocks - 1))
        by_name, by_directory = fleet.claim(name, chain, 0)
        assert by_name == by_directory
        other = data.draw(st.sampled_from(WORKERS))
        if data.draw(st.booleans()):
            fleet.lose(other, chain, first, data.draw(st.integers(first, chain.num_blocks)))
        elif data.draw(st.booleans()):
            fleet.die(other)


def test_chunks_that_their_owner_has_stay_its_own() -> None:
    fleet = Fleet()
    (chain,) = names([[0, 1, 2, 3, 4]])
    fleet.claim("a", chain.head(4), 0)
    fleet.lose("a", chain, 3, 4)
    assert fleet.owners.claim("b", chain, 0) == [OwnedSpan(3, "a"), OwnedSpan(5, "b")]
    assert fleet.claim("b", chain, 0)[1] == ["a", "a", "a", "b", "b"]
    assert fleet.owners.claim("b", chain, 4) == [OwnedSpan(5, "b")]
    assert fleet.owners.claim("c", chain, 2) == [OwnedSpan(3, "a"), OwnedSpan(5, "b")]


def test_chunks_that_their_owner_lost_can_be_claimed() -> None:
    fleet = Fleet()
    (chain,) = names([[0, 1, 2, 3, 4]])
    fleet.claim("a", chain, 0)
    fleet.lose("a", chain, 1, 3)
    owned = [OwnedSpan(1, "a"), OwnedSpan(3, "b"), OwnedSpan(5, "a")]
    assert fleet.owners.claim("b", chain, 0) == owned
    assert not are_covered(fleet.owners.owned("a", chain), 0, 5)
    assert are_covered(fleet.owners.owned("a", chain), 3, 5)
