"""Engines on hosts that are apart: a link that is slow, loses or is one way.

Namespaces need root (`tests/network.py`); where the test is not, these situations are skipped, and
two processes on one host remain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.network import Network, why_not_apart
from tests.store.peer_engine import BIG, CHUNKS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ALL = len(CHUNKS) * len(BIG)


DELAY_S = {"calm": 0.0, "slow": 0.05, "lossy": 0.005, "deaf owner": 0.0, "deaf reader": 0.0}
OWNER_TO_READER, READER_TO_OWNER = ("owner", "reader"), ("reader", "owner")
LOSS = {
    "calm": {},
    "slow": {},
    "lossy": {OWNER_TO_READER: 0.02, READER_TO_OWNER: 0.02},
    "deaf owner": {READER_TO_OWNER: 1.0},
    "deaf reader": {OWNER_TO_READER: 1.0},
}
"""The shares of packets that are lost."""
WHY_NOT = why_not_apart()
APART = [
    pytest.param(state, marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)) for state in LOSS
]
"""The states of the link between two hosts."""


class Program:
    """`host_apart` in its role on a host of its own, or on this host."""

    def __init__(self, role: str, link: Network | None) -> None:
        enter = [] if link is None else link.command(role)
        device = "lo" if link is None else link.devices[role]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "UCX_TLS": "tcp",  # on one machine it would read the other's memory
            "UCX_NET_DEVICES": device,
        }
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.store.host_apart", role],
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
def two_engines(link: Network | None) -> Iterator[tuple[Any, Program]]:
    with ExitStack() as undo:
        if link is not None:
            undo.enter_context(link.up())
        owner, reader = Program("owner", link), Program("reader", link)
        undo.callback(owner.end)
        undo.callback(reader.end)
        places = owner.hear()
        assert reader.hear() == {"ready": True}
        yield places, reader


@pytest.mark.parametrize("situation", ["one host", *APART])
def test_what_arrives_is_exact_and_what_does_not_is_given_up(situation: str) -> None:
    link = None if situation == "one host" else Network("owner", "reader")
    with two_engines(link) as (places, reader):
        assert reader.tell(places)["arrived"] == ALL
        if link is not None:
            link.delay_s[OWNER_TO_READER] = DELAY_S[situation]
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
            link.heal()
        for _ in range(10):  # what was lost is sent again later and later
            found = reader.tell(places)
            assert found["is_done"]
            assert found["is_exact"]
            if found["arrived"] == ALL:
                return
        raise AssertionError(f"nothing arrives although the link is whole again: {found}")
