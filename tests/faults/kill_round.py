"""Processes that kill themselves with -9 at a moment of an artifact's life, and what is left.

The files, SQLite and the store's I/O thread are the real ones. A life is played by this module as
a program: it tells on stdout which generations were ended by a reset that answered.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.transfer.pread_files import PreadFiles
from tests.faults.failpoints import MOMENTS, Failpoints
from tests.faults.life import MEMORY, Verdict, quiet
from tests.faults.oracle import contents
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, begin, chain, ids_of, wait

DEPTH = 4
LIVES = 4
ACTIONS = 300
DEADLINE_S = 60.0
_NAMES = "abcde"


def open_store(root: Path) -> ArtifactStore:
    """A store of six chunks in DRAM and eight on disk."""
    return ArtifactStore.open(
        SIZES,
        StoreConfig(
            6 * CHUNK_BYTES, root, (8 * (CHUNK_BYTES + 1024)) * 16 // 15, spill_delay_s=0.0
        ),
        Recorder(),
        chunk_tokens=CHUNK,
        fingerprint=FINGERPRINT,
        description={"model": "test"},
        open_transfer=_pread,
    )


def _pread(memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> PreadFiles:
    return PreadFiles(memory, directory.files)


def trunks(store: ArtifactStore) -> Iterator[list[ChunkRange]]:
    """The chains of the store's generation."""
    return (chain(f"{store.generation.tag.hex()}{name}", DEPTH) for name in _NAMES)


class KillRound:
    """A few lives in one directory; after each, another process looks at what it finds."""

    def __init__(self, seed: int) -> None:
        self.verdict = Verdict(seed)
        self._rng = random.Random(f"kill {seed}")
        self._ended: set[bytes] = set()
        """Generations of before a reset that answered."""

    def run(self) -> Verdict:
        """Play the round."""
        top = Path(tempfile.mkdtemp(prefix="fault-round-", dir=MEMORY))
        try:
            with quiet():
                for life in range(LIVES):
                    self._live(top / "ssd", life)
                    self._look(top / "ssd")
        finally:
            shutil.rmtree(top, ignore_errors=True)
        return self.verdict

    def _live(self, root: Path, life: int) -> None:
        """Play one life in a process of its own, until it kills itself."""
        moment, ahead = self._rng.choice(MOMENTS), self._rng.choice((0, 1, 3, 8, 21))
        self.verdict.story.append(f"killed {moment}, {ahead}")
        seed = f"{self.verdict.seed}/{life}"
        command = [sys.executable, "-m", __name__, str(root), seed, moment, str(ahead)]
        played = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        self._ended.update(bytes.fromhex(line) for line in played.stdout.split())
        if played.returncode == -signal.SIGKILL:
            self.verdict.injected[f"kill -9:{moment}"] += 1
        elif played.returncode != 0:
            self.verdict.engine_deaths.append(played.stderr.strip().rpartition("\n")[2])

    def _look(self, root: Path) -> None:
        """Restore all there is, and compare it with what was computed."""
        store = open_store(root)
        try:
            if store.generation.tag in self._ended:
                self.verdict.wrong_answers.append("what was stored before a reset is there again")
            for trunk in trunks(store):
                for found in store.match(trunk):
                    restore = wait(begin(store, ids_of([found.chunk], found.tiers)))
                    for artifact, at in restore.offsets.items():
                        size = SIZES[artifact.state_type]
                        if not np.array_equal(
                            store.arena.view[at : at + size], contents(artifact, 0)
                        ):
                            self.verdict.wrong_answers.append(f"{artifact} has other bytes")
                    if restore.failed:
                        self.verdict.stuck.append(f"a row whose bytes are not there: {found}")
                    restore.release()
            store.check_integrity()
        finally:
            store.close()


def live(root: Path, seed: str, moment: str, ahead: int) -> None:
    """Save, restore and reset until the moment comes."""
    rng, points = random.Random(seed), Failpoints()
    points.choose(moment, ahead, partial(os.kill, os.getpid(), signal.SIGKILL))
    with points.installed():
        store = open_store(root)
        for _ in range(ACTIONS):
            trunk = rng.choice(list(trunks(store)))
            action = rng.random()
            if action < 0.5:
                _save(store, trunk, rng)
            elif action < 0.8:
                wanted = [i for x in store.match(trunk) for i in ids_of([x.chunk], x.tiers)]
                wait(begin(store, wanted)).release()
            elif action < 0.9:
                store.leave_to_ssd()
            elif action < 0.97:
                store.flush(5.0)
            else:
                before = store.generation.tag
                if store.reset():
                    print(before.hex(), flush=True)
        store.close()


def _save(store: ArtifactStore, trunk: list[ChunkRange], rng: random.Random) -> None:
    for chunk in trunk[len(store.match(trunk)) :][: rng.randint(1, 3)]:
        missing = store.missing(chunk, list(SIZES))
        save = store.begin_save(chunk, {t: SIZES[t] for t in missing}) if missing else None
        if save is None:
            return
        for kind, offset in save.offsets.items():
            content = contents(ArtifactId(chunk.key, kind), 0)
            store.arena.view[offset : offset + len(content)] = content
        store.complete_save(save)


if __name__ == "__main__":
    live(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
