"""The directory's contract for resets of a whole fleet: a number that only grows.

What an engine does with it is in `hetero_connector/artifacts/generation.py`: engines that have not
adopted the number find nothing of those that have, and the reverse.
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
    """By live worker, the generation it shares state in; 0 for one that is by itself."""


class GenerationDirectory(Protocol):
    """The fleet's generation, and who has adopted which."""

    def reset_generation(self) -> int:
        """Begin a new generation; its number is greater than any before, whatever was lost.

        Workers adopt it as they `report_generation`.
        """
        ...

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        """Say which generation the worker shares state in (0: none); returns the fleet's.

        `floor`: the greatest that the worker has ever heard of. A directory that has none any more
        takes it over. One that has a lesser one has lost its memory and was reset since, or went
        back: it goes on to a new generation, for nobody knows what that reset was for. Raises
        StaleEpochError.
        """
        ...

    def generation(self) -> FleetGeneration:
        """Return the latest reset and who has adopted it. Changes nothing."""
        ...
