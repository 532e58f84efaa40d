"""Reset a whole fleet, and wait until every registered engine has adopted the reset."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory.contract import Directory

_POLL_S = 0.1


@dataclass(frozen=True)
class FleetReset:
    """A fleet's new generation, and the engines that have and have not adopted it."""

    number: int
    adopted: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if engines were registered at that moment, and all of them have adopted the reset.

        Says nothing of an engine that was out of the fleet then, as between two registrations. It
        adopts the reset once it is registered again; until then it uses what it has.
        """
        return bool(self.adopted) and not self.missing


def reset_fleet(
    directory: Directory,
    wait_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> FleetReset:
    """Begin a new generation, and wait at most `wait_s` for all registered engines to adopt it.

    Raises DirectoryError if the generation cannot begin, or if the directory does not answer
    within `wait_s` which engines have adopted it.
    """
    number = directory.reset_generation()
    until_s = time.monotonic() + wait_s
    while True:
        try:
            reset = _adoption(directory, number)
            if reset.is_complete or time.monotonic() >= until_s:
                return reset
        except DirectoryUnavailableError:
            if time.monotonic() >= until_s:
                raise
        sleep(_POLL_S)


def _adoption(directory: Directory, number: int) -> FleetReset:
    # An engine with a greater number has followed a later reset, so it has adopted this one, too.
    engines = sorted(directory.generation().adopted.items())
    return FleetReset(
        number,
        tuple(name for name, adopted in engines if adopted >= number),
        tuple(name for name, adopted in engines if adopted < number),
    )
