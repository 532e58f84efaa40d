"""From the URL in the configuration to a directory."""

from __future__ import annotations

import importlib.util

from ownership.directory.contract import Directory, DirectoryLimits
from ownership.directory.memory import MemoryDirectory

MEMORY_URL = "memory://"
DEFAULT_DEADLINE_S = 1.0
_NEEDED = ("redis", "msgpack")


def open_directory(
    url: str, limits: DirectoryLimits | None = None, deadline_s: float = DEFAULT_DEADLINE_S
) -> Directory:
    """`memory://`, or a Redis as `redis_directory.address` has it. Connects when first used.

    `deadline_s`: of one call. Raises ValueError, saying what to change, for a bad URL and where
    the packages for Redis are not installed.
    """
    if url == MEMORY_URL:
        return MemoryDirectory(limits=limits)
    if not url.startswith("redis"):
        raise ValueError(
            f"expected {MEMORY_URL}, redis:// or rediss://, got {url.split('@')[-1]!r}"
        )
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a Redis directory needs {' and '.join(missing)}: pip install 'heterocache[redis]'"
        )
    from ownership.directory.redis import RedisDirectory

    return RedisDirectory(url, limits, deadline_s)
