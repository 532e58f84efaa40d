"""Hosts that are apart: network namespaces, and between them wires that are slow, lose or are cut.

This process carries each packet between the hosts' TUN devices, for which it must be root. Nothing
of the kernel's but namespaces and TUN is needed, and each direction has faults of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def run(*command: str) -> None:
    """Run a command. CalledProcessError has what it said."""
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """Hosts by name, each in a namespace. Faults are by (sender, receiver)."""

    def __init__(self, *names: str) -> None:
        number = f"{os.getpid() % 10_000}x{next(_numbers)}"
        self._numbers = {name: at for at, name in enumerate(names, start=1)}
        self.spaces = {name: f"fault-{number}{at}" for name, at in self._numbers.items()}
        self.devices = {name: f"f{number}{at}" for name, at in self._numbers.items()}
        self.addresses = {name: f"10.213.7.{at}" for name, at in self._numbers.items()}
        self.delay_s: dict[tuple[str, str], float] = defaultdict(float)
        self.loss: dict[tuple[str, str], float] = defaultdict(float)
        """Share of the packets; 1.0: cut."""
        self._rng = random.Random(7)
        self._ends = threading.Event()

    @contextmanager
    def up(self) -> Iterator[Network]:
        """Make the hosts. OSError or CalledProcessError if this process may not."""
        with ExitStack() as undo:
            fds = {}
            for name, space in self.spaces.items():
                device = self.devices[name]
                fds[name] = _tunnel(device)
                undo.callback(os.close, fds[name])
                run("ip", "netns", "add", space)
                undo.callback(run, "ip", "netns", "del", space)
                run("ip", "link", "set", device, "netns", space)
                self._in(name, "ip", "addr", "add", f"{self.addresses[name]}/24", "dev", device)
                self._in(name, "ip", "link", "set", device, "up")
                self._in(name, "ip", "link", "set", "lo", "up")
            carrier = threading.Thread(target=self._carry, args=(fds,), daemon=True)
            carrier.start()
            undo.callback(carrier.join)
            undo.callback(self._ends.set)
            yield self

    def cut(self, *wires: tuple[str, str]) -> None:
        """From now on nothing sent that way arrives."""
        self.loss.update(dict.fromkeys(wires, 1.0))

    def part(self, one: str, other: str) -> None:
        """Cut both ways between two hosts."""
        self.cut((one, other), (other, one))

    def disturb(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """All wires are slow, or lose packets."""
        for wire in itertools.permutations(self.spaces, 2):
            self.delay_s[wire], self.loss[wire] = delay_s, loss

    def heal(self) -> None:
        """Let all packets through at once."""
        self.disturb()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Put this thread on that host: what it starts and connects meanwhile is there."""
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            space = os.open(f"/run/netns/{self.spaces[name]}", os.O_RDONLY)
            try:
                _enter(space)
            finally:
                os.close(space)
            try:
                yield
            finally:
                _enter(outside)
        finally:
            os.close(outside)

    def command(self, name: str) -> list[str]:
        """Run what follows on that host."""
        return ["ip", "netns", "exec", self.spaces[name]]

    def _in(self, name: str, *command: str) -> None:
        run(*self.command(name), *command)

    def _carry(self, fds: dict[str, int]) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        senders = {fd: name for name, fd in fds.items()}
        by_address = {socket.inet_aton(self.addresses[name]): name for name in fds}
        while not self._ends.is_set():
            wait_s = min(0.05, under_way[0][0] - time.monotonic()) if under_way else 0.05
            for fd in select.select(list(senders), [], [], max(0.0, wait_s))[0]:
                packet = os.read(fd, 65_536)
                receiver = by_address.get(packet[16:20])  # nothing else than IPv4 is answered
                if receiver is None:
                    continue
                wire = senders[fd], receiver
                if self._rng.random() >= self.loss[wire]:
                    due_s = time.monotonic() + self.delay_s[wire]
                    heapq.heappush(under_way, (due_s, next(order), fds[receiver], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(under_way)
                os.write(fd, packet)


def why_not_apart() -> str:
    """Return why no hosts can be kept apart here; empty if they can."""
    if shutil.which("ip") is None:
        return "ip not found (iproute2)"
    try:
        with Network("a", "b").up():
            return ""
    except subprocess.CalledProcessError as e:
        return str(e.stderr.decode().strip())
    except OSError as e:
        return str(e)


def _tunnel(device: str) -> int:
    """Return a descriptor whose packets are the device's. OSError if this process may not."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    try:
        is_tun, no_header, set_interface = 0x0001, 0x1000, 0x400454CA
        fcntl.ioctl(fd, set_interface, struct.pack("16sH", device.encode(), is_tun | no_header))
    except OSError:
        os.close(fd)
        raise
    return fd


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
