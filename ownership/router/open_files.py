"""Open files of a process: each request needs two, the connections to its client and its worker."""

from __future__ import annotations

import resource
from contextlib import suppress

MAX_EXTRA = 128
"""Connections of clients beyond the limit that are answered; more are closed at once."""
_RESERVED = MAX_EXTRA + 128
"""Files that are no requests': extra connections, probes, KV events, Redis, the decisions."""
_MOST = 1 << 20
"""More is not used, even where a process may have more."""


def raise_limit() -> None:
    """Take as many files as the system lets this process have. Its children inherit that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_at_most(hard), hard))


def default_connections() -> int:
    """Return the number of connections for which this process may have files now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (_at_most(soft) - _RESERVED) // 2)


def problem_of(connections: int) -> str:
    """Return why the system does not let a process have so many; "" if it does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + _RESERVED
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return ""
    return (
        f"{connections} need {needed} open files, and a process may have {hard} here: raise that "
        "(`ulimit -Hn`, LimitNOFILE), or set a smaller number"
    )


def _at_most(limit: int) -> int:
    return _MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST)
