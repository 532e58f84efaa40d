"""The price of a copy follows how full caches are.

In a full cache a copy evicts other state. That is a loss only if the state would have been used
again, and a cache that has run for an hour is full of what ended sessions left. So what counts is
the state of the sessions under way and expected back, over the cache's size. A router knows the
first by its own ledger, at once, and asks for the second once.
"""

from __future__ import annotations

_FULL = 0.5
"""The share of a cache, needed by such sessions, at which a copy costs what it does where the size
is unknown. It is not 1, because eviction does not know what is needed."""
_LEAST, _MOST = 1.0 / 6.0, 3.0
"""Bounds of the factor. Copies that are free made agents move for nothing."""


def copy_factor(needed_tokens: float, cache_bytes: float, token_bytes: float) -> float:
    """Return the factor of a worker's price of a copy; 1 if the size of its cache is unknown.

    `needed_tokens`: of the sessions under way and expected back. `token_bytes`: a token's state,
    all ranks together.
    """
    if cache_bytes <= 0.0:
        return 1.0
    factor = needed_tokens * (token_bytes / _FULL) / max(cache_bytes, 1.0)
    return max(_LEAST, min(_MOST, factor))
