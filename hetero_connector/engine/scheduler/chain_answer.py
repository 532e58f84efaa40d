"""Tell a router how this engine names chains, so that it finds what is stored in the directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.scheduler.chain_root import ChainRoot
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.request_identifier import RequestIdentifier

CHAIN_FORMAT = 1


class ChainAnswer:
    """Answers the question `chain`. Any thread may call it."""

    def __init__(
        self,
        about: Mapping[str, Any],
        layout: ArtifactLayout,
        root: ChainRoot,
        clearings: Clearings,
        identifier: RequestIdentifier,
    ) -> None:
        """`about`: as for `EngineStatus`."""
        self._about = about
        self._layout = layout
        self._root = root
        self._clearings = clearings
        self._identifier = identifier
        self._model = layout.model.as_plain()

    def __call__(self) -> dict[str, Any]:
        """Return what may change with time, such as the root, and what may not."""
        return {
            "format": CHAIN_FORMAT,
            "now": time.time(),
            "engine": self._about,
            "root": self._root.hasher.root.hex(),
            "chunk_tokens": self._layout.chunk_tokens,
            "is_shared": self._root.is_shared,
            "clearings": dict(self._clearings.counts),
            "adapters": {name: digest.hex() for name, digest in self._identifier.adapters.items()},
            "model_spec": self._model,
        }
