"""The Lua scripts in `lua`, assembled as their headers say.

A script's header names its `KEYS`, which local variables of those names hold, and the files of
`lua/lib` that it `USES`. All keys of a fleet carry one hash tag, so they lie in one slot of a Redis
Cluster.
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
_ALLOW_OOM = "#!lua flags=allow-oom"
"""Lets a script write when the server's memory is full. The server refuses all others then, also
those that free memory, or write only the directory's time."""
_GROWING = frozenset({"add_chain_user", "claim_owner", "replicate_readonly"})
"""Scripts that a server refuses when its memory is full. What the others add is bounded,
as by `max_workers`."""
SERVER_TIME = (files("ownership.directory.redis") / "lua" / "lib" / "server_time.lua").read_text()
"""Lua that reads the directory's clock from the Redis server. Tests pass their own."""


@dataclass(frozen=True)
class Script:
    """A complete script."""

    name: str
    body: str
    sha: str
    keys: tuple[str, ...]
    """Names of the fleet's keys that it takes, in order."""


@cache
def script_named(name: str, server_time: str = SERVER_TIME) -> Script:
    """Return the script `lua/<name>.lua` with the libraries it uses.

    `server_time`: Lua that defines `server_s()`, which returns seconds.
    """
    folder = files("ownership.directory.redis") / "lua"
    text = (folder / f"{name}.lua").read_text()
    keys = tuple(_header(_KEYS, text, name))
    libraries = [(folder / "lib" / f"{x}.lua").read_text() for x in _header(_USES, text, name)]
    values = ", ".join(f"KEYS[{i + 1}]" for i in range(len(keys)))
    flags = [] if name in _GROWING else [_ALLOW_OOM]
    lines = [*flags, f"local {', '.join(keys)} = {values}", server_time, *libraries, text]
    body = "\n".join(lines)
    return Script(name, body, hashlib.sha1(body.encode()).hexdigest(), keys)


def run_starts(chain: bytes) -> list[int]:
    """Return the indices at which runs certainly begin in a chain of 16-byte keys.

    A run begins at the start of a chain that is not empty, and at each key for which `begins_run`
    (`lua/lib/runs.lua`) holds.
    """
    first_bytes = np.frombuffer(chain, dtype=np.uint8)[::KEY_BYTES]
    starts: list[int] = np.flatnonzero(first_bytes % _CHUNKS_PER_RUN == 0).tolist()
    return starts if starts[:1] == [0] or not chain else [0, *starts]


def fleet_key(fleet: str, name: str) -> str:
    """Return the Redis key that holds `name` for a fleet."""
    return f"{{heterocache:{fleet}}}:{name}"


def _header(pattern: re.Pattern[str], text: str, name: str) -> list[str]:
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"lua/{name}.lua lacks its {pattern.pattern[4:8]} line")
    return found[1].split()
