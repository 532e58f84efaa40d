"""When an owner ends, replicas are claimed at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Copy, Grant, Outcome, Worker
from ownership.identifiers import Epoch, Token
from ownership.ledger import Ledger
from ownership.live_peers import LivePeers
from tests.ownership.test_ledger import ListedStore, change

BOB, EVE = Epoch(2), Epoch(3)


class Published:
    """In place of a `DirectoryThread`."""

    def __init__(self) -> None:
        self.artifacts: list[ArtifactId] = []

    def publish(self, claims: Sequence[Claim]) -> int:
        self.artifacts += [claim.artifact for claim in claims]
        return len(claims)

    def call(self, *_: object) -> Future[None]:
        """Never answered."""
        return Future()


def held_by(ledger: Ledger, owner: Epoch, *numbers: int) -> None:
    claims = [Claim(change(number).id, Copy(64, bytes(16), 0, 1)) for number in numbers]
    grants = [Grant(Outcome.HELD, owner, Token(9))] * len(claims)
    ledger.granted(Epoch(1), claims, grants)


def test_all_replicas_are_claimed_at_once() -> None:
    """Who owned each last is not known: it may have changed hands since it was claimed."""
    store, published = ListedStore(), Published()
    store.put(*map(change, range(1, 4)))
    now_s = [0.0]
    ledger = Ledger(store, published, Recorder(), clock=lambda: now_s[0])  # type: ignore[arg-type]
    ledger.keep()
    held_by(ledger, BOB, 1, 2)
    held_by(ledger, EVE, 3)
    published.artifacts.clear()
    now_s[0] = 1.0
    ledger.keep()
    assert published.artifacts == []
    ledger.reclaim()
    ledger.keep()
    assert set(published.artifacts) == {change(n).id for n in (1, 2, 3)}


def test_owners_are_those_of_replicas_that_are_still_here() -> None:
    store, published = ListedStore(), Published()
    store.put(*map(change, range(1, 4)))
    ledger = Ledger(store, published, Recorder(), clock=lambda: 0.0)  # type: ignore[arg-type]
    held_by(ledger, BOB, 1, 2)
    held_by(ledger, EVE, 3)
    assert ledger.owners == {BOB, EVE}
    held_by(ledger, EVE, 1)
    assert ledger.owners == {BOB, EVE}
    held_by(ledger, EVE, 2)
    assert ledger.owners == {EVE}
    for _ in ledger.inventory():
        pass
    assert ledger.owners == set()


def test_each_end_is_told_once() -> None:
    peers = LivePeers(10.0, lambda: 0.0)
    peers.refresh({BOB: Worker("bob", b"card"), EVE: Worker("eve", b"card")}, 0.0)
    assert peers.take_ended() == set()
    peers.refresh({BOB: Worker("bob", b"card")}, 1.0)
    peers.refresh({}, 2.0)
    assert peers.take_ended() == {BOB, EVE}
    assert peers.take_ended() == set()
