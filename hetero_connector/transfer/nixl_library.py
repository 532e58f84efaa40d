"""Imports NIXL with its logging reduced."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_nixl() -> Any:
    """Import nixl's API, without its lines for every agent and every failed I/O.

    Such failures reach the caller as TransferErrors. NIXL reads its log level once, at import, so
    a user's own NIXL_LOG_LEVEL and any earlier import take precedence.
    """
    if "nixl" in sys.modules:
        import nixl._api as nixl
    else:
        with default_environment("NIXL_LOG_LEVEL", "FATAL"):
            import nixl._api as nixl
    return nixl


@contextmanager
def default_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the duration of the context, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
