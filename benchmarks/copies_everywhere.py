"""A fleet without owners, for `benchmarks.xpyd`: every server keeps what it reads as its own.

A connector for the servers of one benchmark, selected by `kv_connector_module_path`. It differs
from `HeteroConnector` in one point: claims of artifacts that another server owns are answered as
owned. So they are written to this server's SSD too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.connector import HeteroConnector
from hetero_connector.store.peers.sharing import Sharing

_ANY_TOKEN = 1


class _AllOurs(Sharing):
    """Resolves every claim as owned."""

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], foreign: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        return super().resolve_claims({**dict.fromkeys(foreign, _ANY_TOKEN), **owned}, ())


class CopiesEverywhere(HeteroConnector):
    """A connector whose replicas are all its own."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self._scheduler is None:
            return
        sharing = self._scheduler.store.sharing
        assert sharing is not None, "the benchmark's servers share a cache"
        sharing.__class__ = _AllOurs  # the fleet's thread uses the same object
