"""The directory's contract for resets of a whole fleet: a number that only grows.

`hetero_connector/artifacts/generation.py` says what an engine does with it: engines that have
adopted the number and engines that have not find nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ownership.directory.identifiers import Epoch


class FleetGeneration(NamedTuple):
    """The fleet's latest reset, and the workers that have adopted it."""

    number: int
    """The fleet's generation; 0 before any reset."""
    adopted: Mapping[str, int]
    """For each live worker, the generation in which it shares state; 0 if it shares none."""


class GenerationDirectory(Protocol):
    """The fleet's generation, and the workers that have adopted it."""

    def reset_generation(self) -> int:
        """Begin a new generation; its number is greater than any before, whatever was lost.

        Workers adopt it when they call `report_generation`.
        """
        ...

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        """Report the generation in which the worker shares state (0: none); return the fleet's.

        `floor`: the greatest generation the worker has ever seen. A directory that has none takes
        it over. A directory that has a lesser one has lost records, or went back, and was reset
        since; because the reason for that reset is unknown, it begins a new generation. Raises
        StaleEpochError.
        """
        ...

    def generation(self) -> FleetGeneration:
        """Return the latest reset and the workers that have adopted it. Changes nothing."""
        ...
