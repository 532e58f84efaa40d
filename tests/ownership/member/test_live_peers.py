"""A worker's view of the others, by its own clock."""

from __future__ import annotations

import pytest

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.spec.state_types import StateType
from ownership.directory import Worker
from ownership.directory.identifiers import Epoch, Token
from ownership.member.live_peers import LivePeers
from tests.clock import Clock

LEASE_S = 10.0
ARTIFACT = ArtifactId(ChunkKey(bytes(range(16))), StateType.DENSE_KV)
ANN, BOB = Epoch(3), Epoch(4)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock: Clock) -> LivePeers:
    made = LivePeers(LEASE_S, clock)
    made.refresh({ANN: Worker("ann", b"card"), BOB: Worker("bob", b"other")}, clock.now_s)
    return made


def copy_of(holder: Epoch, asked_s: float, token: int = 5) -> PeerCopy:
    return PeerCopy(holder, 0, 1, 64, bytes(16), token, asked_s)


def test_a_live_worker_has_a_card_and_its_copies_are_admitted(
    peers: LivePeers, clock: Clock
) -> None:
    assert peers.card(ANN) == b"card"
    assert peers.was_live(ANN)
    assert peers.may_use(ARTIFACT, copy_of(ANN, clock.now_s))


def test_an_answer_is_used_for_no_longer_than_a_lease(peers: LivePeers, clock: Clock) -> None:
    asked_s = clock.now_s
    clock.now_s += LEASE_S
    assert peers.card(ANN) is None
    assert not peers.may_use(ARTIFACT, copy_of(ANN, asked_s))
    peers.refresh({ANN: Worker("ann", b"card")}, clock.now_s)
    assert peers.card(ANN) == b"card"


def test_a_late_answer_is_as_old_as_its_question(peers: LivePeers, clock: Clock) -> None:
    asked_s = clock.now_s
    clock.now_s += LEASE_S + 1
    peers.refresh({ANN: Worker("ann", b"card")}, asked_s)
    assert peers.card(ANN) is None


def test_a_worker_that_is_no_longer_listed_has_ended_for_good(
    peers: LivePeers, clock: Clock
) -> None:
    before = copy_of(ANN, clock.now_s)
    peers.refresh({BOB: Worker("bob", b"other")}, clock.now_s)
    assert peers.card(ANN) is None
    assert not peers.may_use(ARTIFACT, before)
    # A directory that contradicts itself does not revive an ended epoch.
    peers.refresh({ANN: Worker("ann", b"card")}, clock.now_s)
    assert not peers.may_use(ARTIFACT, before)


def test_after_a_takeover_was_seen_the_old_owners_copy_is_refused(
    peers: LivePeers, clock: Clock
) -> None:
    peers.note_tokens({ARTIFACT: Token(6)})
    assert not peers.may_use(ARTIFACT, copy_of(ANN, clock.now_s, token=5))
    assert peers.may_use(ARTIFACT, copy_of(BOB, clock.now_s, token=6))


def test_a_worker_without_a_card_is_not_a_peer(clock: Clock) -> None:
    peers = LivePeers(LEASE_S, clock)
    peers.refresh({ANN: Worker("ann")}, clock.now_s)
    assert peers.card(ANN) is None
    assert not peers.was_live(ANN)
