"""A disk over real files that fails on purpose and, without power, keeps only what was synced."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

SECTOR_BYTES = 512
"""A power cut keeps or loses so much at once."""


class Fate(StrEnum):
    """The fate of one operation."""

    WORKS = "works"
    FAILS = "fails"
    FULL = "full"
    SHORT = "short"
    """Half of it is done, then it fails."""
    LIES = "lies"
    """One bit is wrong, and it says that it went well. Slabs only: SQLite has no checksums."""
    HANGS = "hangs"
    """It goes on when the faults end."""
    NEVER_ENDS = "never_ends"


class Cut(StrEnum):
    """The ways in which a machine stops."""

    KILL = "kill"
    """The process is gone; what it wrote is there."""
    POWER = "power"
    """Each sector that was not synced may be there or not."""
    POWER_LOSES_ALL = "power_loses_all"
    """Nothing that was not synced is there."""


@dataclass(frozen=True)
class Weather:
    """The odds of the fates of an operation, by the start of its name (`slab.`, `journal.sync`)."""

    odds: Mapping[str, Mapping[Fate, float]] = field(default_factory=dict)

    def of(self, operation: str) -> Mapping[Fate, float]:
        """The odds of one operation."""
        return next((x for name, x in self.odds.items() if operation.startswith(name)), {})


CALM = Weather()
Read = Callable[[int, int], bytes]
"""A file's bytes now, by offset and size."""


class DiskError(OSError):
    """The error of an operation on a faulty disk."""


class Disk:
    """Decides the fate of every operation, and remembers what was not synced.

    An operation's fate depends on the seed, its name and how many of that name came before, not on
    what other threads do.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.weather = CALM
        self.faults: deque[str] = deque(maxlen=200)
        """The latest operations that did not just work: for the report of a round."""
        self.injected: Counter[str] = Counter()
        """Faults so far, as `operation:fate`."""
        self.operations = 0
        self.cut_at: tuple[int, Cut] | None = None
        """Stop the machine just before the operation of this number."""
        self.may_block: Callable[[], bool] = lambda: True
        """True if the calling thread may hang inside an operation."""
        self.landing: list[Callable[[random.Random], None]] = []
        """Called at a cut: what was under way lands, wholly or not at all."""
        self.hanging = 0
        """Threads that wait inside an operation."""
        self.hanging_for_ever = 0
        """The threads that no healing releases."""
        self._lock = threading.Condition(threading.RLock())
        self._counts: Counter[str] = Counter()
        self._unsynced: dict[str, dict[int, _Sector]] = {}
        self._releases = 0
        self._root: Path | None = None
        self._image: Path | None = None

    @property
    def is_off(self) -> bool:
        """True once the machine was stopped; nothing that is done afterwards changes a file."""
        return self._image is not None

    @property
    def image(self) -> Path:
        """The directory as it was found after the cut."""
        assert self._image is not None, "the machine was not stopped"
        return self._image

    def mount(self, root: Path) -> None:
        """The directory from which a cut makes an image."""
        self._root = root

    def owns(self, path: str) -> bool:
        """Return whether a file lies on it."""
        return self._root is not None and Path(path).is_relative_to(self._root)

    def fate(self, operation: str, blocks: bool = True) -> Fate:
        """Draw the fate of the next operation of this name. Raises DiskError on a stopped machine.

        `blocks`: True if a thread waits in it, and so hangs with it.
        """
        with self._lock:
            self.operations += 1
            if self.cut_at is not None and self.operations >= self.cut_at[0] and not self.is_off:
                self.cut(self.cut_at[1])
            self.require_power()
            self._counts[operation] += 1
            odds = self.weather.of(operation)
            if not odds:
                return Fate.WORKS
            chance = random.Random(f"{self.seed}/{operation}/{self._counts[operation]}").random()
            for fate, share in odds.items():
                if (chance := chance - share) < 0:
                    if fate in (Fate.HANGS, Fate.NEVER_ENDS) and blocks and not self.may_block():
                        return Fate.WORKS
                    self.injected[f"{operation}:{fate}"] += 1
                    self.faults.append(f"{operation} {self._counts[operation]} {fate}")
                    return fate
            return Fate.WORKS

    def require_power(self) -> None:
        """DiskError if the machine was stopped."""
        if self.is_off:
            raise DiskError(errno.EIO, "the machine was stopped")

    def suffer(self, fate: Fate) -> bool:
        """Raise or wait as the fate has it; whether only half is to be done before `fail`."""
        if fate is Fate.FAILS:
            raise DiskError(errno.EIO, os.strerror(errno.EIO))
        if fate is Fate.FULL:
            raise DiskError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fate in (Fate.HANGS, Fate.NEVER_ENDS):
            with self._lock:
                goes_on = self.goes_on(fate)
                self.hanging += 1
                self.hanging_for_ever += fate is Fate.NEVER_ENDS
                while not (self.is_off or goes_on()):
                    self._lock.wait()
                self.hanging -= 1
                self.hanging_for_ever -= fate is Fate.NEVER_ENDS
                self._lock.notify_all()
                self.require_power()
        return fate is Fate.SHORT

    def goes_on(self, fate: Fate) -> Callable[[], bool]:
        """Asked later: whether what hangs from now has been released."""
        if fate is Fate.NEVER_ENDS:
            return lambda: False
        before = self._releases
        return lambda: self._releases > before

    def heal(self) -> None:
        """End all faults: what hangs goes on, but for what never ends."""
        with self._lock:
            self.weather, self.cut_at = CALM, None
            self._releases += 1
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.hanging == self.hanging_for_ever)

    def writes(
        self,
        path: str,
        offset: int,
        data: bytes,
        file_bytes: int,
        read: Callable[[int, int], bytes],
    ) -> None:
        """Remember what is about to be overwritten, until it is synced."""
        with self._lock:
            self.require_power()
            unsynced = self._unsynced.setdefault(path, {})
            last = (offset + len(data) - 1) // SECTOR_BYTES
            for number in range(offset // SECTOR_BYTES, last + 1):
                start = number * SECTOR_BYTES
                old = read(start, min(SECTOR_BYTES, max(0, file_bytes - start)))
                sector = unsynced.setdefault(number, _Sector([old]))
                new = bytearray(old)
                begin, end = max(offset, start), min(offset + len(data), start + SECTOR_BYTES)
                new.extend(bytes(max(0, end - start - len(new))))
                new[begin - start : end - start] = data[begin - offset : end - offset]
                sector.versions.append(bytes(new))
                sector.believed_synced = False

    def truncates(self, path: str, size: int, file_bytes: int, read: Read) -> None:
        """Do as `writes` does, for the end of a file that is about to be cut off."""
        with self._lock:
            self.require_power()
            unsynced = self._unsynced.setdefault(path, {})
            for start in range(size // SECTOR_BYTES * SECTOR_BYTES, file_bytes, SECTOR_BYTES):
                old = read(start, min(SECTOR_BYTES, file_bytes - start))
                sector = unsynced.setdefault(start // SECTOR_BYTES, _Sector([old]))
                sector.versions.append(old[: max(0, size - start)])
                sector.believed_synced = False

    def begins_sync(self, path: str) -> Callable[[bool], None]:
        """Note what a sync covers; call the answer with whether it went well.

        After one that failed the system takes what it covered for clean: the next sync does not
        write it again.
        """
        with self._lock:
            self.require_power()
            covered = {n: len(s.versions) for n, s in self._unsynced.get(path, {}).items()}

        def ended(ok: bool) -> None:
            with self._lock:
                self.require_power()
                sectors = self._unsynced.get(path, {})
                for number, count in covered.items():
                    sector = sectors.get(number)
                    if sector is None or sector.believed_synced:
                        continue
                    if not ok:
                        sector.believed_synced = len(sector.versions) == count
                    elif len(sector.versions) == count:
                        del sectors[number]
                    else:
                        del sector.versions[: count - 1]

        return ended

    def forgets(self, path: str) -> None:
        """The file was deleted."""
        with self._lock:
            self._unsynced.pop(path, None)

    def cut(self, how: Cut) -> None:
        """Stop the machine: make the image, and let everything fail from now."""
        with self._lock:
            if self.is_off:
                return
            assert self._root is not None
            rng = random.Random(f"{self.seed}/cut/{self.operations}")
            for land in self.landing:
                land(rng)
            image = self._root.with_name(f"{self._root.name}+")
            shutil.copytree(self._root, image, ignore=shutil.ignore_patterns("*-shm"))
            if how is not Cut.KILL:
                for name, sectors in self._unsynced.items():
                    path = image / Path(name).relative_to(self._root)
                    if path.exists():
                        _lose(path, sectors, rng if how is Cut.POWER else None)
            self._image = image
            self.faults.append(f"{how} at operation {self.operations}")
            self.injected[f"cut:{how}"] += 1
            self._lock.notify_all()


@dataclass
class _Sector:
    versions: list[bytes]
    """First what is surely on the disk, last what the process reads."""
    believed_synced: bool = False
    """A sync of the last version failed, which the next one does not repeat."""


def _lose(path: Path, sectors: Mapping[int, _Sector], rng: random.Random | None) -> None:
    """Put some version of each sector into a file; the oldest without `rng`."""
    content = bytearray(path.read_bytes())
    for number, sector in sorted(sectors.items()):
        kept = sector.versions[0] if rng is None else rng.choice(sector.versions)
        start = number * SECTOR_BYTES
        if len(kept) < SECTOR_BYTES and start + SECTOR_BYTES >= len(content):
            del content[start + len(kept) :]  # the file ended here
        content.extend(bytes(max(0, start + len(kept) - len(content))))
        content[start : start + len(kept)] = kept
    path.write_bytes(content)
