"""HeteroCache: typed KV-state caching for one vLLM engine.

`HeteroConnector` is what vLLM loads; importing it imports vLLM, so it, the store and the
planner are resolved on first use and everything else works without an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_connector.config import HeteroConfig
from hetero_connector.errors import HeteroCacheError
from hetero_connector.spec import LayerSpec, ModelSpec, StateType

if TYPE_CHECKING:
    from hetero_connector.connector import HeteroConnector
    from hetero_connector.planner.planner import RestorePlanner
    from hetero_connector.store.artifact_store import ArtifactStore

__all__ = [
    "ArtifactStore",
    "HeteroCacheError",
    "HeteroConfig",
    "HeteroConnector",
    "LayerSpec",
    "ModelSpec",
    "RestorePlanner",
    "StateType",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "HeteroConnector":
        from hetero_connector.connector import HeteroConnector

        return HeteroConnector
    if name == "ArtifactStore":
        from hetero_connector.store.artifact_store import ArtifactStore

        return ArtifactStore
    if name == "RestorePlanner":
        from hetero_connector.planner.planner import RestorePlanner

        return RestorePlanner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
