"""An engine of two pipeline stages on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TWO_STAGES: Mapping[str, Any] = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_cls": "tests.engine.stage_worker.StageWorker",
}
"""Engine arguments."""
