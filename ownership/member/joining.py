"""Makes an engine's part in a fleet from its configuration."""

from __future__ import annotations

from hetero_connector.errors import ConfigError
from hetero_connector.metrics import Recorder
from ownership.directory import Directory, MemoryDirectory
from ownership.directory.contract import DEFAULT_DEADLINE_S
from ownership.directory.opening import MEMORY_URL, open_directory
from ownership.member.fencing import HORIZON_S
from ownership.member.fleet_worker import FleetWorker, MemberTimes

_CALLS_PER_LEASE = 10
_LOOKUPS_PER_LOAD = 100
"""A lookup may take this fraction of a restore's deadline: 0.1 s by default."""
_LOOKUPS_PER_CALL = 2
"""The answer may take half of a call's time: at least a lookup's, if the lease is long enough."""

_LISTING_LEASES = 30
"""Leases for which a replica is listed. The end of its holder's lease ends the listing, too."""

_in_this_process = MemoryDirectory()
"""The directory `memory://`, shared by the engines of one process."""


def open_worker(
    directory: str, name: str, lease_s: float, load_deadline_s: float, recorder: Recorder
) -> FleetWorker:
    """Return a worker that joins when it is started. Raises ConfigError naming the key."""
    lookup_s = load_deadline_s / _LOOKUPS_PER_LOAD
    longest_s = max(DEFAULT_DEADLINE_S, _LOOKUPS_PER_CALL * lookup_s)
    call_s = min(longest_s, lease_s / _CALLS_PER_LEASE)
    times = MemberTimes(
        lease_s,
        call_s=call_s,
        lookup_s=lookup_s,
        listing_ttl_s=_LISTING_LEASES * lease_s,
        horizon_s=max(HORIZON_S, 2 * load_deadline_s),
    )
    return FleetWorker(_open(directory, call_s), name, times, recorder)


def _open(directory: str, call_s: float) -> Directory:
    if directory == MEMORY_URL:
        return _in_this_process
    try:
        return open_directory(directory, deadline_s=call_s)
    except ValueError as error:
        raise ConfigError("directory", str(error)) from error
