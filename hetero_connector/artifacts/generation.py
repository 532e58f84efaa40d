"""The generation in the root of every chain: what a reset changes, so that nothing before it is
found again.

An engine's own reset gives it a *private* generation, random and so shared with nobody: its
weights may be others than its peers' from now on. A fleet's reset raises one number; an engine
that adopts it gives up its private generation, and all are together again. A counter of each
engine's own would not do: two that were reset once, for different reasons, would meet.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace

PRIVATE_BYTES = 16
_FLEET = struct.Struct("<Q")


@dataclass(frozen=True)
class Generation:
    """The resets that stored state has seen. A value."""

    fleet: int = 0
    """The greatest number of its fleet's that the engine knows of."""
    private: bytes = b""
    """`PRIVATE_BYTES` random bytes since the engine's own reset; b"": it is in the fleet's."""
    knows_fleet: bool = True
    """False from an engine's own reset until it has learned the fleet's number of that moment: a
    reset of the fleet that came before its own must not undo it."""

    @property
    def tag(self) -> bytes:
        """The bytes that chains are rooted in: engines whose tags differ share nothing."""
        return self.private or _FLEET.pack(self.fleet)

    def after_own_reset(self) -> Generation:
        """The generation after the engine's own reset."""
        return Generation(self.fleet, secrets.token_bytes(PRIVATE_BYTES), knows_fleet=False)

    def with_fleet(self, fleet: int) -> Generation:
        """The generation once the fleet's number is known to be `fleet`."""
        if not self.knows_fleet:
            return replace(self, fleet=max(fleet, self.fleet), knows_fleet=True)
        return Generation(fleet) if fleet > self.fleet else self

    @property
    def adopted(self) -> int:
        """The fleet's number whose state the engine shares; 0 while it is by itself."""
        return 0 if self.private else self.fleet


FIRST = Generation()
"""Before any reset."""
