"""The Lua scripts in `lua`, put together from their headers.

A script's comments name its `KEYS` (local variables of those names hold the fleet's keys) and
the files of `lua/lib` it `USES`; all keys of a fleet carry one hash tag, so they lie in one
slot of a Redis Cluster.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from hetero_connector.artifacts.chain import KEY_BYTES

_KEYS = re.compile(r"^-- KEYS: (.+)$", re.MULTILINE)
_USES = re.compile(r"^-- USES: (.+)$", re.MULTILINE)
_CHUNKS_PER_RUN = 64
SERVER_TIME = (files("ownership.directory.redis") / "lua" / "lib" / "server_time.lua").read_text()
"""Where directory time comes from: the Redis server. A test may put its own in this place."""


@dataclass(frozen=True)
class Script:
    """A script as Redis runs it."""

    name: str
    body: str
    sha: str
    keys: tuple[str, ...]
    """Names of the fleet's keys it takes, in order."""


@cache
def script_named(name: str, server_time: str = SERVER_TIME) -> Script:
    """The script `lua/<name>.lua` with what it uses.

    `server_time`: Lua that defines `server_s()`, seconds.
    """
    folder = files("ownership.directory.redis") / "lua"
    text = (folder / f"{name}.lua").read_text()
    keys = tuple(_header(_KEYS, text, name))
    libraries = [(folder / "lib" / f"{x}.lua").read_text() for x in _header(_USES, text, name)]
    values = ", ".join(f"KEYS[{i + 1}]" for i in range(len(keys)))
    body = "\n".join([f"local {', '.join(keys)} = {values}", server_time, *libraries, text])
    return Script(name, body, hashlib.sha1(body.encode()).hexdigest(), keys)


def run_starts(chain: bytes) -> list[int]:
    """Where runs are sure to begin in a chain of 16-byte keys: at its start, if it is not empty,
    and where the key says so (`begins_run` in `lua/lib/runs.lua`)."""
    first_bytes = np.frombuffer(chain, dtype=np.uint8)[::KEY_BYTES]
    starts: list[int] = np.flatnonzero(first_bytes % _CHUNKS_PER_RUN == 0).tolist()
    return starts if starts[:1] == [0] or not chain else [0, *starts]


def fleet_key(fleet: str, name: str) -> str:
    """The Redis key that holds `name` for a fleet."""
    return f"{{heterocache:{fleet}}}:{name}"


def _header(pattern: re.Pattern[str], text: str, name: str) -> list[str]:
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"lua/{name}.lua lacks its {pattern.pattern[4:8]} line")
    return found[1].split()
