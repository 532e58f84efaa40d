"""A save under way, as the store knows it."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_connector.artifacts.nodes import Artifact
from hetero_connector.store.base import Save


@dataclass(frozen=True)
class ReservedSave(Save):
    """A save with the artifacts that wait for its bytes."""

    artifacts: list[Artifact]
    """Each pinned once; emptied when the save ends."""


def taken(save: Save) -> list[Artifact]:
    """End a running save and return its artifacts. ValueError if it has ended before."""
    assert isinstance(save, ReservedSave), "a save that this store did not begin"
    if not save.artifacts:
        raise ValueError(f"the save of {save.chunk} has ended before")
    artifacts = list(save.artifacts)
    save.artifacts.clear()
    return artifacts
