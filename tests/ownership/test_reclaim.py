"""When an owner ends, what it owned is claimed at once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Copy, Grant, Outcome, Worker
from ownership.identifiers import Epoch, Token
from ownership.ledger import Ledger
from ownership.live_peers import LivePeers
from tests.ownership.test_ledger import ListedStore, change

BOB, EVE, CARL = Epoch(2), Epoch(3), Epoch(4)


class Published:
    """In place of a `DirectoryThread`."""

    def __init__(self) -> None:
        self.artifacts: list[ArtifactId] = []

    def publish(self, claims: Sequence[Claim]) -> int:
        self.artifacts += [claim.artifact for claim in claims]
        return len(claims)


def held_by(ledger: Ledger, owner: Epoch, *numbers: int) -> None:
    claims = [Claim(change(number).id, Copy(64, bytes(16), 0, 1)) for number in numbers]
    grants = [Grant(Outcome.HELD, owner, Token(9))] * len(claims)
    ledger.granted(Epoch(1), claims, grants)


def test_only_replicas_of_what_the_ended_owned_are_claimed_at_once() -> None:
    store, published = ListedStore(), Published()
    store.put(*map(change, range(1, 6)))
    ledger = Ledger(store, published, Recorder())  # type: ignore[arg-type]
    held_by(ledger, BOB, 1, 2)
    held_by(ledger, EVE, 3)
    held_by(ledger, CARL, 4, 5)
    held_by(ledger, EVE, 2)  # has changed hands meanwhile
    ledger.reclaim({EVE})
    assert set(published.artifacts) == {change(2).id, change(3).id}
    published.artifacts.clear()
    ledger.reclaim({Epoch(99)})
    assert published.artifacts == []


def test_each_end_is_told_once() -> None:
    peers = LivePeers(10.0, lambda: 0.0)
    peers.refresh({BOB: Worker("bob", b"card"), EVE: Worker("eve", b"card")}, 0.0)
    assert peers.take_ended() == set()
    peers.refresh({BOB: Worker("bob", b"card")}, 1.0)
    peers.refresh({}, 2.0)
    assert peers.take_ended() == {BOB, EVE}
    assert peers.take_ended() == set()
