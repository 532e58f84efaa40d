"""Fair shares of a full map that the clients of several tenants fill.

A tenant is a cache salt: requests with the same salt share their state, and no others do. A full
map drops the oldest key of a tenant that has more than its share, so a client that makes up many
keys drives out its own. With one tenant that is the oldest key of all. The key that was added last
always stays: where each tenant has one key, that of the tenant that joined first leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class FairShares:
    """Keys by tenant, each in the order it was added last. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.tenants: dict[Hashable, bytes] = {}
        """The tenant of each key."""
        self._keys: dict[bytes, OrderedDict[Hashable, None]] = {}

    def __len__(self) -> int:
        return len(self.tenants)

    def add(self, key: Hashable, tenant: bytes) -> Hashable | None:
        """Add a key, or make it the newest; return the key to drop, if there are too many.

        That one is removed already. O(1) for a tenant that has its share, else O(tenants).
        """
        self.remove(key)
        self.tenants[key] = tenant
        own = self._keys.setdefault(tenant, OrderedDict())
        own[key] = None
        if len(self.tenants) <= self._capacity:
            return None
        is_over = len(own) > 1 and len(own) * len(self._keys) > self._capacity
        most = own if is_over else self._keys[max(self._keys, key=lambda t: len(self._keys[t]))]
        victim = next(iter(most))
        self.remove(victim)
        return victim

    def remove(self, key: Hashable) -> None:
        """No effect on one that is not there."""
        tenant = self.tenants.pop(key, None)
        if tenant is not None:
            del self._keys[tenant][key]
            if not self._keys[tenant]:
                del self._keys[tenant]

    def clear(self) -> None:
        """Remove all keys."""
        self.tenants.clear()
        self._keys.clear()
