"""Peers of a store that a benchmark or a test sets by hand."""

from __future__ import annotations

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId


class KnownPeers:
    """Implements `Peers` from what its caller sets."""

    def __init__(self) -> None:
        self.cards: dict[int, bytes] = {}
        """By epoch; take one out and its lease has ended."""
        self.fenced: set[ArtifactId] = set()
        """Artifacts that another worker took over."""

    def card(self, holder: int) -> bytes | None:
        """See `Peers`."""
        return self.cards.get(holder)

    def may_use(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """See `Peers`."""
        return copy.holder in self.cards and artifact not in self.fenced

    def may_adopt(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """See `Peers`."""
        return copy.holder not in self.cards and artifact not in self.fenced
