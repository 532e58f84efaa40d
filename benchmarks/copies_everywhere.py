"""A fleet without owners, for `benchmarks.xpyd`: all keep what they read as their own.

A connector for one benchmark's servers, named to them by `kv_connector_module_path`. It differs
from `HeteroConnector` in one answer: of what another server owns its store is told that it is
the store's own. So it is written to this server's SSD too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.connector import HeteroConnector
from hetero_connector.store.peers.sharing import Sharing

_ANY_TOKEN = 1


class _AllOurs(Sharing):
    """What others own is the store's own."""

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], held: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        return super().resolve_claims({**dict.fromkeys(held, _ANY_TOKEN), **owned}, ())


class CopiesEverywhere(HeteroConnector):
    """Replicas are nobody else's."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self._scheduler is None:
            return
        sharing = self._scheduler.store.sharing
        assert sharing is not None, "the benchmark's servers share a cache"
        sharing.__class__ = _AllOurs  # the fleet's thread has this very object
