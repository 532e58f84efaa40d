"""The history of a fleet, and a judge that finds forbidden events in it.

Pure: whoever runs a fleet notes what the directory granted, whose epoch ended when, and whose bytes
were used, in the order in which it happened; `faults` says what is wrong with that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ownership.directory import Grant, GrantOutcome

Artifact = Hashable
NO_EPOCH = 0


@dataclass(frozen=True)
class Granted:
    """The directory made an epoch the owner, or answered that it is the owner."""

    artifact: Artifact
    epoch: int
    token: int


@dataclass(frozen=True)
class Ended:
    """The directory ended the epoch: it owns nothing from then on."""

    epoch: int
    at_s: float


@dataclass(frozen=True)
class Served:
    """Bytes of an epoch's copy became visible to a reader that had asked at `asked_s`."""

    artifact: Artifact
    holder: int
    token: int
    asked_s: float
    reader: Hashable = ""


@dataclass(frozen=True)
class Cleared:
    """A reset: no grant from before may serve a reader that asks after `at_s`."""

    at_s: float
    epoch: int | None = None
    """The worker that was reset; None for the whole fleet."""


Event = Granted | Ended | Served | Cleared


def granted(artifacts: Sequence[Artifact], grants: Sequence[Grant]) -> Iterator[Granted]:
    """Return the events that the directory's answer to claims shows."""
    for artifact, grant in zip(artifacts, grants, strict=True):
        if grant.outcome is GrantOutcome.OWNED:
            yield Granted(artifact, grant.owner, grant.token)


def faults(history: Iterable[Event]) -> Iterator[str]:
    """Return the forbidden events in words; none for a sound history."""
    owner_of: dict[int, tuple[Artifact, int]] = {}
    ended_s: dict[int, float] = {}
    read: dict[tuple[Hashable, Artifact], int] = {}
    clears: list[tuple[float, set[int]]] = []
    for event in history:
        match event:
            case Granted(artifact, epoch, token):
                if epoch in ended_s:
                    yield f"{event}: its epoch had ended at {ended_s[epoch]}"
                if owner_of.setdefault(token, (artifact, epoch)) != (artifact, epoch):
                    yield f"{event}: the token was {owner_of[token]}'s"
            case Ended(epoch, at_s):
                ended_s.setdefault(epoch, at_s)
            case Served(artifact, holder, token, asked_s, reader):
                if asked_s > ended_s.get(holder, asked_s):
                    yield f"{event}: its holder had ended at {ended_s[holder]}"
                if token not in owner_of or owner_of[token][0] != artifact:
                    yield f"{event}: nobody was granted that token of it"
                if token < read.get((reader, artifact), token):
                    yield f"{event}: the reader has seen a greater token"
                for cleared_s, tokens in clears:
                    if asked_s > cleared_s and token in tokens:
                        yield f"{event}: it was granted before the reset at {cleared_s}"
                read[reader, artifact] = token
            case Cleared(at_s, whose):
                tokens = {token for token, (_, epoch) in owner_of.items() if whose in (None, epoch)}
                clears.append((at_s, tokens))
