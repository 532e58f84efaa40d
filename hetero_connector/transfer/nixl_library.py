"""Importing NIXL without its chatter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_nixl() -> Any:
    """nixl's API. By default it prints lines for every agent and for every failed I/O.

    Those failures reach the caller as TransferErrors. The level is read once, at import; a
    user's own NIXL_LOG_LEVEL, or an import by somebody else before this one, wins.
    """
    if "nixl" in sys.modules:
        import nixl._api as nixl
    else:
        with default_environment("NIXL_LOG_LEVEL", "FATAL"):
            import nixl._api as nixl
    return nixl


@contextmanager
def default_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
