"""What of an engine's settings its planner goes by; a journal keeps it, for `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero_connector.planner.restore_planner import Mode

ENGINE_SETTINGS = "engine_settings"
"""Key of a journal's description. Journals of earlier releases lack it."""


@dataclass(frozen=True)
class EngineSettings:
    """The defaults stand for an engine that did not say."""

    planner: Mode = "cost"
    step_tokens: int = 0
    """`CostModel.step_tokens`."""
    layerwise: bool = True
    """`EngineLoad.layerwise`."""
    load_deadline_s: float = 10.0

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> EngineSettings | None:
        """What a description says; None if nothing. Raises TypeError where it makes no sense."""
        told = description.get(ENGINE_SETTINGS)
        return None if told is None else cls(**told)

    def described(self) -> dict[str, Any]:
        """For a description."""
        return {ENGINE_SETTINGS: asdict(self)}

    def __str__(self) -> str:
        steps = f"steps of {self.step_tokens} tokens" if self.step_tokens else "one step"
        loads = "layer by layer" if self.layerwise else "between steps"
        return (
            f"planner={self.planner}, {steps}, loads {loads}, "
            f"load_deadline_s={self.load_deadline_s:g}"
        )
