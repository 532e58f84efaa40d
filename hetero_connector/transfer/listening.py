"""List where a process can be connected to over TCP, as the kernel tells it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


def listening_addresses(process_id: int, proc: Path = _PROC) -> list[str]:
    """`address:port` of each listening TCP socket of a process of this user; sorted.

    OSError if the process is not there or another user's.
    """
    process = proc / str(process_id)
    inodes, found = set(), []
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(fd).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.append(_parse(fields[1]))
    return sorted(f"[{a}]:{port}" if a.version == 6 else f"{a}:{port}" for a, port in found)


def only_this_host(addresses: Iterable[str]) -> bool:
    """Return whether nobody on another host can reach any of them."""
    hosts = (address.rpartition(":")[0].strip("[]") for address in addresses)
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _parse(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """`0100007F:1F90`, 32-bit words in the machine's order (little-endian), as an address."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return ipaddress.ip_address(b"".join(words)), int(port, 16)
