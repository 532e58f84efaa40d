"""A slow network between processes of one host: an address to which traffic has a limited rate.

Linux sends what goes to an address of its own over the loopback device, at memory speed. Here a
private address gets a class of its own there (`tc`, root), so that a peer's state comes as slowly
as over a real link, while all other traffic of the host is as before.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

ADDRESS = "198.18.0.1"
"""RFC 2544 keeps its block for benchmarks."""
_DEVICE = "hc-slow"
_BURST_BYTES = 256 * 1024
"""The loopback device has packets of 64 KiB."""


@dataclass(frozen=True)
class SlowNetwork:
    """An engine with this configuration is read by its peers over the slow network."""

    address: str

    @property
    def extra(self) -> Mapping[str, Any]:
        """Configuration of HeteroConnector."""
        return {"peer_host": self.address}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of the server: processes of one host would share memory otherwise."""
        return {"UCX_TLS": "tcp"}


@contextmanager
def slow_network(mbit: float) -> Iterator[SlowNetwork]:
    """Make the network, of so many megabits per second. Raises RuntimeError if it cannot."""
    if _DEVICE in (name for _, name in socket.if_nameindex()):  # of a run that was killed
        _remove()
    with ExitStack() as stack:
        _ip("link", "add", _DEVICE, "type", "veth", "peer", "name", f"{_DEVICE}-end")
        stack.callback(_remove)
        _ip("address", "add", f"{ADDRESS}/32", "dev", _DEVICE)
        for end in (_DEVICE, f"{_DEVICE}-end"):
            _ip("link", "set", end, "up")
        _tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "r2q", "1000")
        kind = ("dev", "lo", "parent", "1:")
        rate = ("htb", "rate", f"{mbit}mbit", "burst", str(_BURST_BYTES))
        _tc("class", "add", *kind, "classid", "1:1", *rate)
        match = ("u32", "match", "ip", "dst", f"{ADDRESS}/32", "flowid", "1:1")
        _tc("filter", "add", *kind, "protocol", "ip", *match)
        yield SlowNetwork(ADDRESS)


def _remove() -> None:
    _ip("link", "delete", _DEVICE)
    shown = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, check=False)
    if b"htb 1:" in shown.stdout:
        _tc("qdisc", "delete", "dev", "lo", "root")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _tc(*arguments: str) -> None:
    _run("tc", *arguments)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"no `{command[0]}` here: install iproute2") from error
    if done.returncode:
        hint = "; run as root, or leave this part out" if "not permitted" in done.stderr else ""
        raise RuntimeError(f"`{' '.join(command)}`: {done.stderr.strip()}{hint}")
