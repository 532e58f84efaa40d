"""What an engine asks of the fleet it shares its cache with.

An engine by itself has no fleet and imports nothing of one: `join` alone does, when the key
`directory` says so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from hetero_connector.artifacts.peer_copy import PeerCopy
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.config import HeteroConfig
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from hetero_connector.store.peers.ports import Peers
from hetero_connector.store.peers.sharing import Sharing

_THIS_HOST = (None, "", "localhost", "127.0.0.1", "::1")


class Lookup(Protocol):
    """A question to the fleet's directory."""

    @property
    def done(self) -> bool:
        """Whether there is an answer, or none is waited for any more. Never blocks."""
        ...

    @property
    def found(self) -> Sequence[Mapping[StateType, Sequence[PeerCopy]]]:
        """For each chunk asked for, where peers have it, best first; empty without an answer."""
        ...


class Fleet(Protocol):
    """The engine's part in its fleet. Methods return at once, but `close`."""

    @property
    def peers(self) -> Peers:
        """For the store, to read from them."""
        ...

    @property
    def accepts_claims(self) -> bool:
        """True if the directory takes claims, so that peers will find what is sealed now."""
        ...

    def start(self, store: Sharing) -> None:
        """Join, with this store."""
        ...

    def wake(self) -> None:
        """The store has something to tell."""
        ...

    def find(self, chain: Sequence[ChunkKey]) -> Lookup:
        """Ask what peers hold of these chunks."""
        ...

    def close(self) -> None:
        """Leave. Waits a few seconds at most."""
        ...


def warnings(config: HeteroConfig) -> list[str]:
    """Who may expect to read from this engine and cannot."""
    host = urlsplit(config.directory).hostname
    if host in _THIS_HOST or config.peer_host or "UCX_NET_DEVICES" in os.environ:
        return []
    return [
        f"the directory is on {host}, but peers on other hosts cannot read from this engine: if "
        "there are any, set peer_host to an address in the fleet's network"
    ]


def join(config: HeteroConfig, engine_id: str, recorder: Recorder) -> Fleet | None:
    """The fleet that the configuration names; None for an engine by itself.

    Raises ConfigError for a directory that cannot be.
    """
    if not config.directory:
        return None
    from ownership.member.joining import open_worker

    name = config.worker_name or f"{socket.gethostname()}-{engine_id}"
    return open_worker(config.directory, name, config.lease_s, config.load_deadline_s, recorder)
