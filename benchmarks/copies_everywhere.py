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

_ANY_TOKEN = 1


class CopiesEverywhere(HeteroConnector):
    """Replicas are nobody else's."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self._scheduler is None:
            return
        sharing = self._scheduler._store.sharing
        assert sharing is not None, "the benchmark's servers share a cache"
        judged = sharing.judged

        def all_ours(
            owned: Mapping[ArtifactId, int], held: Iterable[ArtifactId]
        ) -> list[ArtifactId]:
            return judged({**dict.fromkeys(held, _ANY_TOKEN), **owned}, ())

        sharing.judged = all_ours  # type: ignore[method-assign]
