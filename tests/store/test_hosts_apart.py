"""Engines on hosts that are apart: network namespaces, a link that is slow, loses or is one way.

The test carries each packet between two TUN devices, for which it must be root; where it is not,
these situations are left out by name, and two processes on one host remain.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from peer_engine import BIG, CHUNKS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ALL = len(CHUNKS) * len(BIG)
_numbers = itertools.count()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def why_not_apart() -> str:
    """Why no hosts can be kept apart here; empty if they can."""
    if shutil.which("ip") is None:
        return "ip not found (iproute2)"
    try:
        with Link().up():
            return ""
    except subprocess.CalledProcessError as e:
        return str(e.stderr.decode().strip())
    except OSError as e:
        return str(e)


DELAY_S = {"calm": 0.0, "slow": 0.05, "lossy": 0.005, "deaf owner": 0.0, "deaf reader": 0.0}
LOSS = {
    "calm": {},
    "slow": {},
    "lossy": {"a": 0.02, "b": 0.02},
    "deaf owner": {"b": 1.0},
    "deaf reader": {"a": 1.0},
}
"""Of packets, by the side that sends: the owner is `a`."""
APART = list(LOSS)
"""How the link between two hosts is."""


def situations() -> list[str]:
    why = why_not_apart()
    if why:
        print(f"{', '.join(APART)}: left out, {why}")
    return ["one host", *([] if why else APART)]


class Link:
    """Two namespaces, `a` and `b`, and a wire between them: this process carries its packets."""

    def __init__(self) -> None:
        number = f"{os.getpid() % 10_000}x{next(_numbers)}"
        self.spaces = {side: f"fault-{number}{side}" for side in "ab"}
        self.devices = {side: f"f{number}{side}" for side in "ab"}
        self.delay_s = dict.fromkeys("ab", 0.0)
        """By the side that sends."""
        self.loss = dict.fromkeys("ab", 0.0)
        self._rng = random.Random(7)
        self._ends = threading.Event()

    @contextmanager
    def up(self) -> Iterator[None]:
        with ExitStack() as undo:
            fds = {}
            for number, side in enumerate("ab", start=1):
                space, device = self.spaces[side], self.devices[side]
                fds[side] = _tunnel(device)
                undo.callback(os.close, fds[side])
                run("ip", "netns", "add", space)
                undo.callback(run, "ip", "netns", "del", space)
                run("ip", "link", "set", device, "netns", space)
                self._in(side, "ip", "addr", "add", f"10.213.7.{number}/24", "dev", device)
                self._in(side, "ip", "link", "set", device, "up")
                self._in(side, "ip", "link", "set", "lo", "up")
            carrier = threading.Thread(target=self._carry, args=(fds,), daemon=True)
            carrier.start()
            undo.callback(carrier.join)
            undo.callback(self._ends.set)
            yield

    def whole(self) -> None:
        """Let all packets through at once."""
        self.delay_s, self.loss = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)

    def _in(self, side: str, *command: str) -> None:
        run("ip", "netns", "exec", self.spaces[side], *command)

    def _carry(self, fds: dict[str, int]) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        other = {"a": fds["b"], "b": fds["a"]}
        while not self._ends.is_set():
            wait_s = min(0.05, under_way[0][0] - time.monotonic()) if under_way else 0.05
            for fd in select.select(list(fds.values()), [], [], max(0.0, wait_s))[0]:
                side = "a" if fd == fds["a"] else "b"
                packet = os.read(fd, 65_536)
                if self._rng.random() >= self.loss[side]:
                    due_s = time.monotonic() + self.delay_s[side]
                    heapq.heappush(under_way, (due_s, next(order), other[side], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(under_way)
                os.write(fd, packet)


def _tunnel(device: str) -> int:
    """A descriptor whose packets are the device's. OSError if this process may not."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    try:
        is_tun, no_header, set_interface = 0x0001, 0x1000, 0x400454CA
        fcntl.ioctl(fd, set_interface, struct.pack("16sH", device.encode(), is_tun | no_header))
    except OSError:
        os.close(fd)
        raise
    return fd


class Program:
    """`host_apart` on one side of a link, or on this host."""

    def __init__(self, role: str, link: Link | None, side: str) -> None:
        enter = [] if link is None else ["ip", "netns", "exec", link.spaces[side]]
        device = "lo" if link is None else link.devices[side]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/store'}",
            "UCX_TLS": "tcp",  # on one machine it would read the other's memory
            "UCX_NET_DEVICES": device,
        }
        self._process = subprocess.Popen(
            [*enter, sys.executable, str(Path(__file__).with_name("host_apart.py")), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def tell(self, what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()


@contextmanager
def two_engines(link: Link | None) -> Iterator[tuple[Any, Program]]:
    with ExitStack() as undo:
        if link is not None:
            undo.enter_context(link.up())
        owner, reader = Program("owner", link, "a"), Program("reader", link, "b")
        undo.callback(owner.end)
        undo.callback(reader.end)
        places = owner.hear()
        assert reader.hear() == {"ready": True}
        yield places, reader


@pytest.mark.parametrize("situation", situations())
def test_what_arrives_is_exact_and_what_does_not_is_given_up(situation: str) -> None:
    link = None if situation == "one host" else Link()
    with two_engines(link) as (places, reader):
        assert reader.tell(places)["arrived"] == ALL
        if link is not None:
            link.delay_s["a"] = DELAY_S[situation]
            link.loss.update(LOSS[situation])
        found = reader.tell(places)
        assert found["is_done"], "a restore hangs"
        assert found["is_exact"]
        if "deaf" in situation:
            assert found["arrived"] == 0
            assert set(found["failed"]) <= {"deadline", "unreachable", "io_error"}
        elif situation != "lossy":
            assert found["arrived"] == ALL
        if link is not None:
            link.whole()
        for _ in range(10):  # what was lost is sent again later and later
            found = reader.tell(places)
            assert found["is_done"]
            assert found["is_exact"]
            if found["arrived"] == ALL:
                return
        raise AssertionError(f"nothing arrives although the link is whole again: {found}")
