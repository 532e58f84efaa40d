"""A process with a store, an SSD and a fleet's member: an engine without the model.

Everything is real: NIXL, Redis, the directory's thread, the journal. A *turn* does what an engine
does with a request: match, look up, restore, and compute the rest, whose bytes are known here.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import (
    ROOT,
    ArtifactId,
    ChunkKey,
    ChunkRange,
    StoredChunk,
    Tier,
)
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.peers.reader import PeerReadBatch
from ownership.directory import Directory, GrantOutcome
from ownership.member import joining
from ownership.member.fleet_worker import FleetWorker
from ownership.member.held_lease import lease_clock
from tests.ownership.history import Event, Granted, Served
from tests.store.under_way import snapshot
from tests.waiting import until

CHUNK = 256
SIZES = {StateType.DENSE_KV: 300_001, StateType.WINDOW_SWA: 50_000}
CHUNK_BYTES = 303_104 + 53_248
FINGERPRINT = b"w" * 16
LEASE_S = 2.0
PEER_DEADLINE_S = 1.0
LOAD_DEADLINE_S = 10.0
LOOKUP_S = 1.0
"""The machine may be busy."""
TURN_S = 3 * LOAD_DEADLINE_S
"""A turn that takes longer hangs: several deadlines on a busy machine."""
_ATTEMPTS = 4

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["ownership.member.joining", "hetero_connector.store.artifact_store"]
)


def prompt(name: str, chunks: int, shared: int = 2) -> list[ChunkRange]:
    """A chain whose first chunks all prompts have in common."""
    made: list[ChunkRange] = []
    key = ROOT
    for i in range(chunks):
        label = f"{'trunk' if i < shared else name}/{i}".encode()
        child = ChunkKey(hashlib.blake2b(label + key, digest_size=16).digest())
        made.append(ChunkRange(child, key, i * CHUNK, (i + 1) * CHUNK))
        key = child
    return made


def right(artifact: ArtifactId) -> npt.NDArray[np.uint8]:
    """The bytes of an artifact."""
    seed = int.from_bytes(artifact.chunk, "little") + artifact.state_type.position
    return np.random.default_rng(seed).integers(0, 256, SIZES[artifact.state_type], dtype=np.uint8)


@dataclass
class Turn:
    """A worker's report of a turn."""

    restored: int = 0
    """Chunks that were not computed."""
    wrong: list[ArtifactId] = field(default_factory=list)
    """Artifacts that were restored with wrong bytes."""
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True)
class State:
    """A worker's artifacts: for each the token under which it owns it; 0 for a replica."""

    epoch: int
    tokens: Mapping[ArtifactId, int]
    replicas: frozenset[ArtifactId]
    counters: Mapping[str, float]


Timed = tuple[float, Event]
"""An event, and the time by the leases' clock before which it did not happen."""


class _RecordingDirectory:
    """A directory whose grants are recorded."""

    def __init__(self, directory: Directory, events: list[Timed]) -> None:
        self._directory = directory
        self._events = events

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._directory, name)
        if name != "claim_owner":
            return call

        def noted(epoch: int, claims: Sequence[Any]) -> Any:
            asked_s = lease_clock()
            grants = call(epoch, claims)
            for claim, grant in zip(claims, grants, strict=True):
                if grant.outcome is GrantOutcome.OWNED:
                    granted = Granted(claim.artifact, grant.owner, grant.token)
                    self._events.append((asked_s, granted))
            return grants

        return noted


class _Worker:
    """Runs in the process."""

    def __init__(self, url: str, name: str, root: Path, chunks: int, lease_s: float) -> None:
        self._name = name
        self._recorder = Recorder()
        self._counters: Counter[str] = Counter()
        self._events: list[Timed] = []
        self._fleet = self._join(url, lease_s)
        self._store = ArtifactStore.open(
            SIZES,
            StoreConfig(
                chunks * CHUNK_BYTES,
                root,
                64 * (CHUNK_BYTES + 8_192),
                peer_deadline_s=PEER_DEADLINE_S,
                adopt_from=root.parent,
                load_deadline_s=LOAD_DEADLINE_S,
                spill_delay_s=0.0,
            ),
            self._recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
            peers=PeerAccess(self._fleet.peers, changed=self._fleet.wake),
        )
        assert self._store.sharing is not None
        self._fleet.start(self._store.sharing)

    def _join(self, url: str, lease_s: float) -> FleetWorker:
        opened = joining.open_directory

        def open_recorded(*args: Any, **kwargs: Any) -> Any:
            return _RecordingDirectory(opened(*args, **kwargs), self._events)

        with patch.object(joining, "open_directory", open_recorded):
            return joining.open_worker(url, self._name, lease_s, 100 * LOOKUP_S, self._recorder)

    def turn(self, chunks: Sequence[ChunkRange]) -> Turn:
        """Restore what is stored, check it, compute the rest."""
        started_s, turn = time.monotonic(), Turn()
        for _ in range(_ATTEMPTS):
            found, copies = self._find(chunks)
            if not found:
                break
            failed = self._restore(found, copies, turn)
            if not failed:
                turn.restored = len(found)
                break
        self._compute(chunks)
        turn.seconds = time.monotonic() - started_s
        return turn

    def read_without_end(self, chunks: Sequence[ChunkRange]) -> int:
        """Begin a restore whose reads from peers never end; return the number of reads under way.

        Kill the worker then.
        """
        patch.object(PeerReadBatch, "poll", return_value=False).start()
        found, copies = self._find(chunks)
        self._store.begin_restore([Wanted(kind, found) for kind in SIZES], copies)
        while (now := snapshot(self._store.catalog)).loads_queued:
            time.sleep(1e-3)
        return now.loads

    def state(self) -> State:
        self._store.check_integrity()
        for key, number in (self._recorder.drain() or {}).get(COUNTERS, {}).items():
            self._counters[key] += number  # type: ignore[assignment]
        with self._store.catalog.locked():
            sealed = [a for a in self._store.catalog.tiers.index.artifacts() if a.sealed]
            tokens = {a.id: a.token for a in sealed if not a.replica}
            replicas = frozenset(a.id for a in sealed if a.replica)
        lease = self._fleet._keeper.lease
        epoch = lease.epoch if lease is not None and lease.is_valid else 0
        return State(epoch, tokens, replicas, dict(self._counters))

    def history(self) -> list[Timed]:
        """Return the events of this worker: grants, and copies that it used."""
        return list(self._events)

    def forget_dram(self) -> None:
        """Keep what is on SSD."""
        self._store.leave_to_ssd()

    def flush(self) -> bool:
        return self._store.flush(20.0)

    def close(self) -> None:
        self._fleet.close()
        self._store.close()

    def _find(
        self, chunks: Sequence[ChunkRange]
    ) -> tuple[list[StoredChunk], dict[ArtifactId, PeerCopy]]:
        """Whole chunks here, and after them at others or here after a gap."""
        whole = [x for x in self._store.holdings(chunks) if x.tiers.keys() == SIZES.keys()]
        own = {stored.chunk: stored for stored in whole}
        found = [own[chunk] for chunk in takewhile(own.__contains__, chunks)]
        rest = chunks[len(found) :]
        lookup = self._fleet.find([c.key for c in rest])
        if rest:
            until(lookup.poll)
        copies: dict[ArtifactId, PeerCopy] = {}
        for chunk, held in zip(rest, lookup.found, strict=False):
            if chunk in own:
                found.append(own[chunk])
                continue
            if held.keys() != SIZES.keys():
                break
            found.append(StoredChunk(chunk, dict.fromkeys(SIZES, Tier.PEER)))
            copies |= {ArtifactId(chunk.key, t): best[0] for t, best in held.items()}
        for artifact, copy in copies.items():
            if not copy.storage:
                granted = Granted(artifact, copy.holder, copy.token)
                self._events.append((copy.asked_s, granted))
        return found, copies

    def _restore(
        self, found: Sequence[StoredChunk], copies: Mapping[ArtifactId, PeerCopy], turn: Turn
    ) -> bool:
        """Return True if anything failed. Present bytes are checked in any case."""
        restore = self._store.begin_restore([Wanted(kind, found) for kind in SIZES], copies)
        until(restore.poll)
        for artifact, at in restore.offsets.items():
            data = self._store.arena.view[at : at + SIZES[artifact.state_type]]
            if not np.array_equal(data, right(artifact)):
                turn.wrong.append(artifact)
            copy = copies.get(artifact)
            if copy is not None and not copy.storage:
                served = Served(artifact, copy.holder, copy.token, copy.asked_s, self._name)
                self._events.append((lease_clock(), served))
        turn.failures.update(cause.value for cause in restore.failed.values())
        failed = bool(restore.failed)
        restore.release()
        return failed

    def _compute(self, chunks: Sequence[ChunkRange]) -> None:
        for chunk in chunks:
            kinds = self._store.missing(chunk, list(SIZES))
            save = self._store.begin_save(chunk, {k: SIZES[k] for k in kinds}) if kinds else None
            if save is not None:
                for kind, at in save.offsets.items():
                    self._store.arena.view[at : at + SIZES[kind]] = right(
                        ArtifactId(chunk.key, kind)
                    )
                self._store.complete_save(save)


def serve(pipe: Connection, url: str, name: str, root: Path, chunks: int, lease_s: float) -> None:
    """Carry out the test's commands until `close`."""
    worker = _Worker(url, name, root, chunks, lease_s)
    pipe.send(None)
    while True:
        what, arguments = pipe.recv()
        pipe.send(getattr(worker, what)(*arguments))
        if what == "close":
            return


class WorkerProcess:
    """The test's handle of one process. A killed one can be started again on its SSD."""

    def __init__(
        self, url: str, name: str, folder: Path, chunks: int = 24, lease_s: float = LEASE_S
    ) -> None:
        """`chunks`: capacity of its DRAM."""
        self.name = name
        self.root = folder / name
        self._arguments = (url, name, self.root, chunks, lease_s)
        self._pipe: Connection
        self._process: Any = None

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def ssd(self) -> Path:
        """The SSD directory of its model."""
        return self.root / FINGERPRINT.hex()[:16]

    def launch(self) -> WorkerProcess:
        """Start it. `ready` waits until it runs."""
        self._pipe, theirs = context.Pipe()
        self._process = self._start(theirs, self._arguments)
        theirs.close()
        return self

    def _start(self, theirs: Connection, arguments: tuple[str, str, Path, int, float]) -> Any:
        process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        process.start()
        return process

    def ready(self) -> WorkerProcess:
        self.answer()
        return self

    def ask(self, what: str, *arguments: Any) -> None:
        """Send a command. `answer` waits for its end."""
        self._pipe.send((what, arguments))

    def answer(self, timeout_s: float = TURN_S) -> Any:
        """Return the answer. Raises EOFError if the process died."""
        assert self._pipe.poll(timeout_s), f"{self.name} hangs"
        return self._pipe.recv()

    def turn(self, chunks: Sequence[ChunkRange]) -> Turn:
        self.ask("turn", chunks)
        turn = self.answer()
        assert isinstance(turn, Turn)
        assert turn.wrong == [], f"{self.name} took wrong bytes"
        return turn

    def state(self) -> State:
        self.ask("state")
        state = self.answer()
        assert isinstance(state, State)
        return state

    def do(self, what: str) -> Any:
        self.ask(what)
        return self.answer()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._wait(self._process)
            self._pipe.close()
            self._process = None

    def _wait(self, process: Any) -> None:
        process.join()

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)
