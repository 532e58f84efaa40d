"""The price of a copy follows how full caches are.

In a full cache a copy evicts other state. That is a loss only if the state would have been used
again, and a cache that has run for an hour is full of what ended sessions left. So what counts is
the state of the sessions under way and expected back, over the cache's size. A router knows the
first by its own ledger, at once, and asks for the second once.
"""

from __future__ import annotations

import numpy as np

from ownership.scheduling.fleet import Floats, WorkerTable

_FULL = 0.5
"""The share of a cache, needed by such sessions, at which a copy costs what it does where the size
is unknown. It is not 1, because eviction does not know what is needed."""
_LEAST, _MOST = 1.0 / 6.0, 3.0
"""Bounds of the factor. Copies that are free made agents move for nothing."""


def copy_factors(table: WorkerTable, token_bytes: float) -> Floats:
    """Return the factor of each worker's price of a copy, `[workers]`; 1 if its size is unknown.

    `token_bytes`: a token's state, all ranks together.
    """
    is_known = table.cache_bytes > 0.0
    factors: Floats = table.context_tokens + table.returning_tokens
    factors *= token_bytes / _FULL
    factors /= np.maximum(table.cache_bytes, 1.0)
    np.minimum(factors, _MOST, out=factors)
    np.maximum(factors, _LEAST, out=factors)
    return factors if is_known.all() else np.where(is_known, factors, 1.0)
