"""A ledger that several routers keep alike: each tells the others what it sends, and what ends.

Each message has a number. A router that misses one, or hears of another router for the first time,
asks for everything that is open, and each answers with a whole message. So a router that has just
started, or has lost messages with a server, knows all within two exchanges. Nothing is kept outside
the routers: a peer that is not heard for `LEASE_S` has ended, and its requests with it.

Pure: messages are bytes, times are seconds of one clock and passed in.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from ownership.router.view import Reason
from ownership.scheduling import FleetView, Ledger, LedgerLimits, Work

LEASE_S = 5.0
"""Seconds after which a router that is not heard has ended."""
HEARTBEAT_S = 1.0
"""A message is sent at least so often."""
_ASK_S = 0.5
"""Seconds between two requests for whole messages."""
_LATE_S = 1.0
"""Seconds after the last exchange until when peers are known."""
_FORMAT = 1
_MOST_TOKENS = 1 << 31


class _Kind(StrEnum):
    SENT = "s"
    HANDED_OFF = "h"
    FIRST_TOKEN = "f"
    ENDED = "e"
    FAILED = "x"
    COMPUTED = "c"
    """Failed, or ended in a way that is not known, after its prefill was computed."""


_ENDS = frozenset({_Kind.ENDED, _Kind.FAILED, _Kind.COMPUTED})


class _Event(msgspec.Struct, frozen=True, array_like=True):
    kind: _Kind
    request: int
    work: Work | None = None
    output_tokens: int = 0


class _Message(msgspec.Struct, frozen=True, array_like=True):
    format: int
    router: str
    number: int
    is_whole: bool
    """True if the events are those of all open requests, else those since the last message."""
    asks: bool
    """True if every router shall send a whole message."""
    events: list[_Event]


@dataclass(eq=False, slots=True)
class _Peer:
    """Another router, as it was heard."""

    number: int
    """The number of its last message."""
    heard_s: float
    has_gap: bool = True
    requests: dict[int, list[_Kind]] = field(default_factory=dict)
    """The events of its open requests."""


class PeerState(NamedTuple):
    """Another router, or another process of this one, as it is known now."""

    router: str
    requests: int
    """Under way."""
    silent_s: float
    """Seconds since it was heard."""
    has_gap: bool
    """True if messages were lost, and it has not repeated them yet."""


class SharedLedger(Ledger):
    """A `Ledger` of all routers of a fleet. The requests of a peer are named (router, number)."""

    def __init__(self, router: str, fleet: FleetView, limits: LedgerLimits | None = None) -> None:
        """`router`: a name that no other process has, and none had before."""
        super().__init__(fleet, limits)
        self._router = router
        self._numbers: dict[Hashable, int] = {}
        self._open: dict[int, list[_Event]] = {}
        self._news: list[_Event] = []
        self._peers: dict[str, _Peer] = {}
        self._requests = self._messages = 0
        self._owes_whole = self._wants_whole = True
        self._told_s = self._asked_s = self._exchanged_s = self._unread_s = -math.inf

    @property
    def num_peers(self) -> int:
        """The number of other routers."""
        return len(self._peers)

    @property
    def num_peer_requests(self) -> int:
        """The number of their requests under way."""
        return sum(len(peer.requests) for peer in self._peers.values())

    def peers(self, now_s: float) -> list[PeerState]:
        """Return the other routers."""
        return [
            PeerState(name, len(x.requests), now_s - x.heard_s, x.has_gap)
            for name, x in self._peers.items()
        ]

    def sent(self, request: Hashable, work: Work, now_s: float) -> None:
        super().sent(request, work, now_s)
        self._requests += 1
        self._numbers[request] = self._requests
        self._note(request, _Kind.SENT, work)

    def handed_off(self, request: Hashable, now_s: float) -> None:
        super().handed_off(request, now_s)
        self._note(request, _Kind.HANDED_OFF)

    def first_token(self, request: Hashable, now_s: float) -> None:
        super().first_token(request, now_s)
        self._note(request, _Kind.FIRST_TOKEN)

    def ended(self, request: Hashable, output_tokens: int, now_s: float) -> None:
        super().ended(request, output_tokens, now_s)
        self._note(request, _Kind.ENDED, output_tokens=output_tokens)

    def failed(self, request: Hashable, now_s: float, *, was_computed: bool = False) -> None:
        super().failed(request, now_s, was_computed=was_computed)
        self._note(request, _Kind.COMPUTED if was_computed else _Kind.FAILED)

    def set_fleet(self, fleet: FleetView, now_s: float) -> None:
        # What peers have sent to a worker before it was known here is asked for.
        self._wants_whole |= bool(set(fleet.names) - self.workers)
        super().set_fleet(fleet, now_s)

    def doubts(self, now_s: float) -> list[Reason]:
        """Return why the load of other routers may not be known."""
        found = []
        if now_s - self._exchanged_s > _LATE_S:
            found.append(Reason.PEERS_LOST)
        if any(peer.has_gap for peer in self._peers.values()):
            found.append(Reason.PEER_GAP)
        if now_s - self._unread_s < LEASE_S:
            found.append(Reason.PEER_DIFFERS)
        return found

    def take_message(self, now_s: float) -> bytes:
        """Return what the other routers must be told now; b"" if it is nothing."""
        asks = self._wants_whole and now_s - self._asked_s >= _ASK_S
        is_due = now_s - self._told_s >= HEARTBEAT_S
        if not (self._news or self._owes_whole or asks or is_due):
            return b""
        events, self._news = self._news, []
        if self._owes_whole:
            events = [event for events in self._open.values() for event in events]
        if asks:
            self._asked_s, self._wants_whole = now_s, False
        self._messages += 1
        message = _Message(_FORMAT, self._router, self._messages, self._owes_whole, asks, events)
        self._owes_whole, self._told_s = False, now_s
        return msgspec.msgpack.encode(message)

    def on_exchanged(self, now_s: float) -> None:
        """The last message has reached the others, and theirs are taken."""
        self._exchanged_s = now_s
        for name, peer in list(self._peers.items()):
            if now_s - peer.heard_s > LEASE_S:
                self._end(name, peer, now_s)
            elif peer.has_gap and now_s - self._asked_s >= _ASK_S:
                self._wants_whole = True

    def on_lost(self, now_s: float) -> None:
        """Messages could not be exchanged. Peers' requests are counted until their lease ends."""
        self._owes_whole = self._wants_whole = True
        for name, peer in list(self._peers.items()):
            peer.has_gap = True
            if now_s - peer.heard_s > LEASE_S:
                self._end(name, peer, now_s)

    def take_in(self, content: bytes, sent_s: float, now_s: float) -> None:
        """Apply another router's message. Its own, old ones and unknown versions are left out."""
        try:
            message = msgspec.msgpack.decode(content, type=_Message)
        except msgspec.MsgspecError:
            self._unread_s = sent_s
            return
        if message.format != _FORMAT or not all(_is_possible(x) for x in message.events):
            self._unread_s = sent_s
            return
        if message.router == self._router or now_s - sent_s > LEASE_S:
            return
        self._owes_whole |= message.asks
        peer = self._peers.setdefault(message.router, _Peer(0, sent_s))
        if message.number <= peer.number:
            return
        if message.is_whole:
            peer.has_gap = False
            for request in peer.requests.keys() - {x.request for x in message.events}:
                self._apply(message.router, peer, _Event(_Kind.COMPUTED, request), now_s)
        elif message.number != peer.number + 1:
            peer.has_gap = True
        peer.number, peer.heard_s = message.number, sent_s
        for event in message.events:
            self._apply(message.router, peer, event, now_s)

    def _note(
        self, request: Hashable, kind: _Kind, work: Work | None = None, output_tokens: int = 0
    ) -> None:
        """Keep an event of a request of this router for the others."""
        number = self._numbers.get(request)
        if number is None:
            return
        event = _Event(kind, number, work, max(0, output_tokens))
        self._news.append(event)
        if kind in _ENDS:
            del self._numbers[request], self._open[number]
        else:
            self._open.setdefault(number, []).append(event)

    def _apply(self, router: str, peer: _Peer, event: _Event, now_s: float) -> None:
        """Apply an event of a peer, once."""
        name, kind = (router, event.request), event.kind
        known = peer.requests.get(event.request)
        if kind is _Kind.SENT:
            work = event.work
            assert work is not None  # checked
            if name not in self and work.prefill_worker in self.workers:
                peer.requests[event.request] = [kind]
                super().sent(name, work, now_s)
        elif known is None or kind in known:
            return
        elif kind in _ENDS:
            del peer.requests[event.request]
            if kind is _Kind.ENDED:
                super().ended(name, event.output_tokens, now_s)
            else:
                super().failed(name, now_s, was_computed=kind is _Kind.COMPUTED)
        else:
            known.append(kind)
            if kind is _Kind.HANDED_OFF:
                super().handed_off(name, now_s)
            else:
                super().first_token(name, now_s)

    def _end(self, name: str, peer: _Peer, now_s: float) -> None:
        """A peer has ended, and its requests with it: their connections are closed."""
        for request in peer.requests:
            super().failed((name, request), now_s, was_computed=True)
        del self._peers[name]


def _is_possible(event: _Event) -> bool:
    work = event.work
    if work is None:
        return event.kind is not _Kind.SENT and 0 <= event.output_tokens < _MOST_TOKENS
    return (
        0 < work.new_tokens <= work.prompt_tokens < _MOST_TOKENS
        and 0 <= work.boundary_tokens <= work.prompt_tokens
        and 0 <= work.other_tokens <= work.prompt_tokens
    )
