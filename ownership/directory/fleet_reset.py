"""One reset for a whole fleet, and waiting until every engine of it has adopted it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory.contract import Directory

_POLL_S = 0.1


@dataclass(frozen=True)
class FleetReset:
    """A fleet's new generation, and the registered engines by whether they are in it."""

    number: int
    adopted: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if there are engines and none of them shares state from before."""
        return bool(self.adopted) and not self.missing


def reset_fleet(
    directory: Directory,
    wait_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FleetReset:
    """Begin a new generation, and wait at most `wait_s` until all live engines have adopted it.

    Raises DirectoryError; once the generation has begun only if the directory cannot say before
    the time is over who has adopted it.
    """
    number = directory.reset_generation()
    until_s = clock() + wait_s
    while True:
        try:
            reset = _adoption(directory, number)
            if reset.is_complete or clock() >= until_s:
                return reset
        except DirectoryUnavailableError:
            if clock() >= until_s:
                raise
        sleep(_POLL_S)


def _adoption(directory: Directory, number: int) -> FleetReset:
    """A greater number was adopted after ours: what was before ours is gone all the same."""
    engines = sorted(directory.generation().adopted.items())
    return FleetReset(
        number,
        tuple(name for name, adopted in engines if adopted >= number),
        tuple(name for name, adopted in engines if adopted < number),
    )
