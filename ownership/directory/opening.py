"""Open the directory that a URL names."""

from __future__ import annotations

import importlib.util

from hetero_connector.config_values import without_password
from ownership.directory.contract import DEFAULT_DEADLINE_S, Directory
from ownership.directory.memory import MemoryDirectory

MEMORY_URL = "memory://"
_NEEDED = ("redis", "msgpack")


def open_directory(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Directory:
    """Return the directory of `url`: `memory://`, or a Redis URL as `redis.address` describes it.

    `deadline_s`: bounds each wait of a call for Redis. A connection is made by the first call.
    Raises ValueError, with what to change, for a bad URL or if the packages for Redis are missing.
    """
    if url == MEMORY_URL:
        return MemoryDirectory()
    if not url.startswith("redis"):
        shown = without_password(url)
        raise ValueError(f"expected {MEMORY_URL}, redis:// or rediss://, got {shown!r}")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a Redis directory needs {' and '.join(missing)}: pip install 'heterocache[redis]'"
        )
    from ownership.directory.redis import RedisDirectory

    return RedisDirectory(url, deadline_s=deadline_s)
