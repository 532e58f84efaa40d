"""The generation in the root of every chain. A reset changes it, so that nothing older is found.

An engine's own reset gives it a random *private* generation, shared with no other engine: from
then on its weights may differ from its peers'. A fleet's reset raises one number; an engine that
adopts it drops its private generation, and all share state again. A counter per engine would not
work: two engines that were each reset once, for different reasons, would share state.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace

PRIVATE_BYTES = 16
_FLEET = struct.Struct("<Q")


@dataclass(frozen=True)
class Generation:
    """An engine's generation. An immutable value."""

    fleet: int = 0
    """The greatest fleet number that the engine knows."""
    private: bytes = b""
    """`PRIVATE_BYTES` random bytes since the engine's own reset; b"" while it shares the fleet's
    generation."""
    knows_fleet: bool = True
    """False from an engine's own reset until it has learned the fleet's number of that moment: an
    earlier reset of the fleet must not undo its own."""

    @property
    def tag(self) -> bytes:
        """The bytes in the root of chains: engines with different tags share nothing."""
        return self.private or _FLEET.pack(self.fleet)

    def after_own_reset(self) -> Generation:
        """Return the generation after the engine's own reset."""
        return Generation(self.fleet, secrets.token_bytes(PRIVATE_BYTES), knows_fleet=False)

    def with_fleet(self, fleet: int) -> Generation:
        """Return the generation after learning that the fleet's number is `fleet`."""
        if not self.knows_fleet:
            return replace(self, fleet=max(fleet, self.fleet), knows_fleet=True)
        return Generation(fleet) if fleet > self.fleet else self

    @property
    def adopted(self) -> int:
        """The fleet number whose state the engine shares; 0 with a private generation."""
        return 0 if self.private else self.fleet


FIRST = Generation()
"""The generation before any reset."""
