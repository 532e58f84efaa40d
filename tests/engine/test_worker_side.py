"""What a worker holds of the store's memory, without an engine."""

from __future__ import annotations

import pytest

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.devices import HostDevice
from hetero_connector.engine.messages import StepMetadata
from hetero_connector.engine.worker_side import WorkerSide
from hetero_connector.errors import StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.store.arena import Arena
from tests.engine.fakes import DENSE


def test_a_worker_that_ends_lets_go_of_the_arena() -> None:
    """Else an engine in this process would keep its whole DRAM tier after its end."""
    arena = Arena.create(1 << 20, shared=False)
    worker = WorkerSide(ArtifactLayout(DENSE, 64), 0, 8, "auto", Recorder())
    worker._device = HostDevice()
    assert worker._arena_view(StepMetadata(arena=arena.handle)).nbytes == 1 << 20
    arena.close()
    assert arena.view.nbytes == 1 << 20, "the worker has it"
    worker.close()
    with pytest.raises(StoreError, match="closed"):
        _ = arena.view
    worker.close()
