"""One seeded life of a small fleet: stores with faulty disks, peers and a directory that fail."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk
from hetero_connector.errors import DirectoryUnavailableError, HeteroCacheError
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, Save, StoreConfig, Wanted
from hetero_connector.store.catalog.loads import Load, Loads, Source
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.peers.ports import PeerAccess
from ownership.directory import Claim, Directory, Grant
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from tests.faults.disk import CALM, Cut, Disk
from tests.faults.journals import connector
from tests.faults.life import MEMORY, WEATHERS, Verdict, quiet
from tests.faults.oracle import contents
from tests.faults.slabs import FaultyFiles, faulty_files
from tests.ownership.history import Cleared, Ended, Event, Served, faults, granted
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, chain
from tests.store.under_way import snapshot
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers

DEPTH = 3
ACTIONS = 100
LEASE_S = 0.8
CALL_S = 0.02
LISTING_S = 0.3
SETTLING_S = 30.0
"""Many leases: in that time all must be in order again, however busy the machine is."""
MOST_FAULTS = 5
"""A round reports so many faults of its history."""
_NAMES = "abcd"


class ForgetfulDirectory(MemoryDirectory):
    """A directory that loses records while the epochs of its workers live on.

    What it grants, and whose epoch ends, is noted in `history`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Event] = []
        self._run = 0
        self._seen: set[Epoch] = set()

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        """See `OwnershipDirectory`."""
        with self._lock:
            grants = super().claim_owner(epoch, claims)
            self.history += granted([claim.artifact for claim in claims], grants)
            return grants

    def note_ends(self) -> None:
        """Return the workers whose epoch has ended since the last call."""
        with self._lock:
            live = set(self.workers())
            self.history += [Ended(epoch, time.monotonic()) for epoch in self._seen - live]
            self._seen = live

    def renew_lease(self, epoch: Any) -> str:
        """Tell the run, too, as a server that has forgotten something would."""
        super().renew_lease(epoch)
        return str(self._run)

    def lose(self, rng: random.Random) -> None:
        """Forget some records, as a replica that lagged behind its primary does."""
        with self._lock:
            self._run += 1
            for key in list(self._chunks):
                if rng.random() < 0.7:
                    self._num_artifacts -= len(self._chunks.pop(key))


class Wire:
    """One worker's connection to the directory, which may be cut, or lose the answers."""

    def __init__(self, directory: Directory) -> None:
        self.is_down = False
        self.loses_answers = False
        self.hangs = False
        self._directory = directory

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A call of the directory's."""
        call = getattr(self._directory, name)

        def through(*args: Any, **kwargs: Any) -> Any:
            if self.hangs:
                time.sleep(CALL_S)
            if self.hangs or self.is_down:
                raise DirectoryUnavailableError("it is not reached")
            answer = call(*args, **kwargs)
            if self.loses_answers:
                raise DirectoryUnavailableError("the answer was lost")
            return answer

        return through

    def close(self) -> None:
        """Forget the connection; never fails."""

    def mend(self) -> None:
        """Let everything through."""
        self.is_down = self.loses_answers = self.hangs = False


class Member:
    """An engine's store and its worker, on a disk of its own."""

    def __init__(self, name: str, top: Path, fleet: FleetRound) -> None:
        self.name = name
        self.root = top / name
        self.fleet = fleet
        self.boots = 0
        self.banned: set[bytes] = set()
        """Generations from before a reset that was heard of."""
        self.saves: list[Save] = []
        self.restores: list[Restore] = []
        self.told: dict[ArtifactId, PeerCopy] = {}
        """The answers of lookups so far, many of them outdated."""
        self._new_disk()
        self.start()

    def _new_disk(self) -> None:
        self.disk = Disk(zlib.crc32(f"{self.fleet.seed}/{self.name}/{self.boots}".encode()))

    def start(self) -> None:
        """Open the store and join."""
        fleet, disk = self.fleet, self.disk
        disk.mount(self.root)
        disk.may_block = partial(_is_not, threading.current_thread())
        self.files = ExitStack()
        self.files.enter_context(faulty_files(disk))
        self.recorder = Recorder()
        self.wire = Wire(fleet.directory)
        self.worker = FleetWorker(
            cast(Directory, self.wire),
            self.name,
            MemberTimes(LEASE_S, call_s=CALL_S, lookup_s=0.2, listing_ttl_s=LISTING_S),
            self.recorder,
        )
        access = PeerAccess(
            self.worker.peers, partial(MemoryPeers, fleet.network), self.worker.wake
        )
        self.store = ArtifactStore.open(
            SIZES,
            StoreConfig(
                6 * CHUNK_BYTES,
                self.root,
                16 * (CHUNK_BYTES + 1024),
                spill_delay_s=0.0,
                load_deadline_s=1.0,
                peer_deadline_s=0.1,
                replica_ttl_s=0.5,
                adopt_from=self.root.parent,
            ),
            self.recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            open_transfer=partial(FaultyFiles, disk),
            connect=connector(disk),
            peers=access,
        )
        assert self.store.sharing is not None
        self.sharing = self.store.sharing
        self.worker.start(self.sharing)
        self.check_generation()

    def check_generation(self) -> bytes:
        """The generation's tag, once what it ended is forgotten."""
        tag = self.store.catch_up().tag
        if tag in self.banned:
            self.fleet.wrong(f"{self.name} serves again what was stored before a reset")
        return tag

    def trunk(self, name: str) -> list[ChunkRange]:
        """A chain in the generation that the engine is in now."""
        return chain(f"{self.check_generation().hex()}{name}", DEPTH)

    def save(self, name: str, rng: random.Random) -> None:
        """Compute the next chunks of a chain."""
        trunk = self.trunk(name)
        for chunk in trunk[len(self.store.match(trunk)) :][: rng.randint(1, DEPTH)]:
            missing = self.store.missing(chunk, list(SIZES))
            save = self.store.begin_save(chunk, {t: SIZES[t] for t in missing}) if missing else None
            if save is None:
                return
            for kind, offset in save.offsets.items():
                content = contents(ArtifactId(chunk.key, kind), 0)
                self.store.arena.view[offset : offset + len(content)] = content
            self.store.complete_save(save)

    def restore(self, name: str, rng: random.Random) -> None:
        """Take a chain from wherever it is: here, a peer, or what a dead engine left.

        Sometimes a peer is asked for what it had when somebody looked for it last.
        """
        is_late = rng.random() < 0.3
        trunk = self.trunk(name)
        lookup = self.worker.find([chunk.key for chunk in trunk])
        self.fleet.wait_for("a lookup", lambda: lookup.poll())
        peers: list[Any] = [*lookup.found, *([{}] * len(trunk))][: len(trunk)]
        here = {x.chunk.key: x for x in self.store.holdings(trunk)}
        copies: dict[ArtifactId, PeerCopy] = {}
        wanted: dict[StateType, list[StoredChunk]] = {}
        for chunk, found in zip(trunk, peers, strict=True):
            stored = here.get(chunk.key, StoredChunk(chunk, {}))
            for kind in SIZES:
                if kind not in stored.tiers:
                    artifact = ArtifactId(chunk.key, kind)
                    before = self.told.get(artifact)
                    if found.get(kind):
                        self.told[artifact] = found[kind][0]
                    copy = before if is_late and before else self.told.get(artifact)
                    if copy is None or not (is_late or found.get(kind)):
                        continue
                    copies[artifact] = copy
                wanted.setdefault(kind, []).append(stored)
        if wanted:
            columns = [Wanted(kind, chunks) for kind, chunks in wanted.items()]
            self.restores.append(self.store.begin_restore(columns, copies))
        while len(self.restores) > 2:
            self.end_restore()

    def end_restore(self) -> None:
        """Wait for the oldest restore, and judge it."""
        if self.restores:
            restore = self.restores.pop(0)
            self.fleet.wait_for("a restore", lambda: restore.poll())
            self.judge(restore)
            restore.release()

    def judge(self, restore: Restore) -> None:
        """Compare what it hands out with what was computed."""
        for artifact, at in restore.offsets.items():
            found = self.store.arena.view[at : at + SIZES[artifact.state_type]]
            if not np.array_equal(found, contents(artifact, 0)):
                self.fleet.wrong(f"{self.name}: {artifact.chunk.hex()[:8]} has other bytes")

    def reset(self) -> None:
        """Forget everything, for this engine alone."""
        before, lease = self.store.generation.tag, self.worker._keeper.lease
        is_kept = self.store.reset()
        if lease is not None:
            self.fleet.directory.history.append(Cleared(time.monotonic(), lease.epoch))
        if is_kept and not self.disk.is_off:
            self.banned.add(before)

    def stop(self, how: Cut) -> None:
        """The machine stops: nobody hears of it."""
        self.disk.cut(how)
        self.wire.is_down = True
        for restore in self.restores:
            self.judge(restore)
            restore.release()
        self.restores.clear()
        self.worker.close()
        self.store.close(0.2)
        self.files.close()

    def restart(self) -> None:
        """Start again from what the disk kept."""
        self.fleet.verdict.injected += self.disk.injected
        shutil.rmtree(self.root)
        self.disk.image.rename(self.root)
        self.boots += 1
        self._new_disk()
        self.start()

    def unsettled(self) -> list[str]:
        """Say what is not in order between the store, its disk and the directory."""
        catalog, tiers = self.store.catalog, self.store.catalog.tiers
        with catalog.locked():
            now = snapshot(catalog)
            artifacts = [a for a in tiers.index.artifacts() if a.sealed]
            queues = {
                "loads": now.loads,
                "writes queued": now.writes_queued,
                "writes under way": now.writing,
                "waiting for the fleet's word": now.pending_claims,
                "rows to forget": len(tiers.forgotten),
            }
            unsummed = sum(a.checksum is None for a in artifacts)
            unjudged = sum(not (a.token or a.replica) for a in artifacts)
        found = [f"{self.name}: {n} {what}" for what, n in queues.items() if n]
        if unsummed:
            found.append(f"{self.name}: {unsummed} without a checksum")
        if unjudged:
            found.append(f"{self.name}: {unjudged} of which nobody knows whose they are")
        lease = self.worker._keeper.lease
        if lease is None:
            return [*found, f"{self.name} has no lease"]
        view = MemoryDirectory.lookup(self.fleet.directory, [a.node.key for a in artifacts])
        for artifact, chunk in zip(artifacts, view.chunks, strict=True):
            record = chunk.get(artifact.state_type)
            is_owner = record is not None and record.owner == lease.epoch
            if record is None:
                found.append(f"{self.name}: an artifact that the directory does not list")
            elif is_owner == artifact.replica:
                found.append(f"{self.name}: the directory names another owner than the store")
        return sorted(set(found))


class FleetRound:
    """Saves, restores, resets, kills and outages among three members, chosen by the seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.verdict = Verdict(seed)
        self.rng = random.Random(f"fleet {seed}")
        self.network = MemoryNetwork()
        self.directory = ForgetfulDirectory()
        self.members: list[Member] = []
        self._unheard: list[tuple[int, int]] = []
        """Resets of the fleet that some member has not heard of: place in the history, number."""

    def run(self) -> Verdict:
        """Play the round."""
        top = Path(tempfile.mkdtemp(prefix="fault-round-", dir=MEMORY))
        with ExitStack() as undo:
            undo.callback(partial(shutil.rmtree, top, ignore_errors=True))
            undo.enter_context(patch("hetero_connector.store.artifact_store._KEEP_S", 0.05))
            undo.enter_context(patch.object(Loads, "finish_fetch", self._noting_reads()))
            undo.enter_context(quiet())
            try:
                for name in ("ann", "bob", "cleo"):
                    self.members.append(Member(name, top, self))
                self._live()
            except Exception as e:
                logging.getLogger(__name__).debug("fleet %d", self.seed, exc_info=True)
                self.verdict.engine_deaths.append(f"{type(e).__name__}: {e}")
            finally:
                self._mend()
                for member in self.members:
                    member.stop(Cut.KILL)
                    self.verdict.injected += member.disk.injected
        for fault in islice(faults(self.directory.history), MOST_FAULTS):
            self.wrong(fault)
        return self.verdict

    def wrong(self, what: str) -> None:
        """Note a wrong answer."""
        if what not in self.verdict.wrong_answers:
            self.verdict.wrong_answers.append(what)

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait; what does not come is stuck."""
        until_s = time.monotonic() + SETTLING_S
        while not is_so():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what} has not ended")
            time.sleep(0.001)

    def _live(self) -> None:
        actions: Sequence[tuple[Callable[[Member], None], int]] = [
            (self._save, 12),
            (self._restore, 12),
            (self._leave_dram, 3),
            (self._pause, 6),
            (self._reset, 1),
            (self._reset_fleet, 1),
            (self._change_disk, 2),
            (self._change_wire, 3),
            (self._lose_records, 1),
            (self._change_network, 2),
            (self._stop, 1),
        ]
        calls, weights = zip(*actions, strict=True)
        for _ in range(ACTIONS):
            action = self.rng.choices(calls, weights)[0]
            member = self.rng.choice(self.members)
            self.verdict.story.append(f"{member.name} {action.__name__.strip('_')}")
            action(member)
            member.store.check_integrity()
            self._note()
            if member.disk.is_off:
                self._reboot(member, Cut.KILL)
        self._mend()
        if self.rng.random() < 0.5:
            self.directory.lose(self.rng)
        self._settle()
        for member in self.members:
            self._restore(member)
            while member.restores:
                member.end_restore()

    def _save(self, member: Member) -> None:
        member.save(self.rng.choice(_NAMES), self.rng)

    def _restore(self, member: Member) -> None:
        member.restore(self.rng.choice(_NAMES), self.rng)

    def _leave_dram(self, member: Member) -> None:
        member.store.leave_to_ssd()

    def _pause(self, member: Member) -> None:
        time.sleep(self.rng.choice((0.001, 0.01, 0.05, LEASE_S / 2)))

    def _reset(self, member: Member) -> None:
        member.reset()

    def _reset_fleet(self, member: Member) -> None:
        """Raise the fleet's number; each follows within a lease."""
        with self.directory._lock:
            place = len(self.directory.history)
            self.directory.history.append(Cleared(float("inf")))
            self._unheard.append((place, self.directory.reset_generation()))

    def _note(self) -> None:
        """Note for the history whose epoch has ended, and which resets all have heard of."""
        self.directory.note_ends()
        heard = min(member.store.generation.fleet for member in self.members)
        for place, number in self._unheard:
            if number <= heard:
                self.directory.history[place] = Cleared(time.monotonic())
        self._unheard = [(place, number) for place, number in self._unheard if number > heard]

    def _noting_reads(self) -> Callable[..., bool]:
        """Stand for `Loads.finish_fetch`: what a peer has sent is served from now on."""
        settle, history = Loads.finish_fetch, self.directory.history

        def finish_fetch(loads: Loads, load: Load, failure: Failure | None) -> bool:
            is_here = settle(loads, load, failure)
            copy = load.copy
            if is_here and copy is not None and load.source is Source.PEER:
                served = Served(load.artifact.id, copy.holder, copy.token, copy.asked_s, id(loads))
                history.append(served)
            return is_here

        return finish_fetch

    def _change_disk(self, member: Member) -> None:
        name = self.rng.choice(("calm", "errors", "full", "short", "lying", "hanging"))
        self.verdict.story.append(name)
        member.disk.heal()
        member.disk.weather = WEATHERS[name]

    def _change_wire(self, member: Member) -> None:
        """The directory is reached, or not, by this member alone."""
        wire = member.wire
        wire.mend()
        setattr(wire, self.rng.choice(("is_down", "loses_answers", "hangs", "_calm")), True)

    def _lose_records(self, member: Member) -> None:
        self.directory.lose(self.rng)

    def _change_network(self, member: Member) -> None:
        """A member's memory is read by its peers, or not, whatever the directory says."""
        metadata = self.rng.choice([m.metadata for m in self._transfers()])
        self.network.stopped ^= {metadata}

    def _transfers(self) -> list[MemoryPeers]:
        found = []
        for member in self.members:
            io_thread = member.store.io_thread
            assert io_thread is not None
            assert io_thread.fleet is not None
            found.append(cast(MemoryPeers, io_thread.fleet.peer_device._transfers))
        return found

    def _stop(self, member: Member) -> None:
        self._reboot(member, self.rng.choice(list(Cut)))

    def _reboot(self, member: Member, how: Cut) -> None:
        member.stop(how)
        time.sleep(self.rng.choice((0.0, LEASE_S * 1.5)))
        try:
            member.restart()
        except HeteroCacheError as e:
            if member.disk.weather is CALM:
                raise
            self.verdict.story.append(f"it does not start: {e}")
            member.disk.heal()
            member.start()

    def _mend(self) -> None:
        """End all faults."""
        self.network.stopped.clear()
        for member in self.members:
            member.disk.heal()
            member.wire.mend()

    def _settle(self) -> None:
        until_s = time.monotonic() + SETTLING_S
        left: list[str] = []
        while time.monotonic() < until_s:
            for member in self.members:
                member.check_generation()
            left = [what for member in self.members for what in member.unsettled()]
            if not left:
                return
            time.sleep(0.02)
        self.verdict.stuck += left


def _is_not(thread: threading.Thread) -> bool:
    return threading.current_thread() is not thread
