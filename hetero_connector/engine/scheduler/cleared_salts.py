"""Salts of which everything stored was cleared, so that nothing from before is found again.

A chunk's key does not tell its salt, and after a restart it is unknown which of the stored chunks
belong to a salt. So clearing a salt gives it another name in the keys of its chains: the salt with
the number of times it was cleared. The numbers are kept next to the store, and nothing else of the
salt is but a digest.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from hetero_connector.engine.scheduler.session_book import tenant_of
from hetero_connector.errors import CommandError, StoreError

logger = logging.getLogger("vllm.heterocache")

CLEARED_NAME = "cleared-salts.json"
_MAX_SALTS = 10_000


class ClearedSalts:
    """Counts how often each salt was cleared. `count` may be asked by any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, which may not exist; None: nothing is stored beyond this process.

        Raises StoreError for a file that is damaged: it is unknown what was cleared.
        """
        self._path = path
        self._lock = threading.Lock()
        self._counts = {} if path is None else _read(path)

    @classmethod
    def in_folder(cls, folder: Path | None) -> ClearedSalts:
        """Return those of the store in this folder; None: of a store without an SSD."""
        return cls(None if folder is None else folder / CLEARED_NAME)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how often each salt was cleared, by the digest that stands for it."""
        return self._counts

    def raise_to(self, counts: Mapping[str, int]) -> None:
        """Count at least so many clearings of each salt: those of a store whose state comes here.

        Survives a power cut once this returns. Raises StoreError if it could not be kept.
        """
        with self._lock:
            raised = {k: max(n, self._counts.get(k, 0)) for k, n in counts.items()}
            merged = {**self._counts, **raised}
            if merged == self._counts:
                return
            if len(merged) > _MAX_SALTS:
                raise StoreError(f"more than {_MAX_SALTS} salts were cleared here and there")
            if self._path is not None:
                try:
                    _write(self._path, merged)
                except OSError as error:
                    raise StoreError(f"{self._path} cannot be written: {error}") from error
            self._counts = merged

    def count(self, salt: str) -> int:
        """Return how often everything under `salt` was cleared."""
        return self._counts.get(tenant_of(salt).hex(), 0) if self._counts else 0

    def raise_count(self, salt: str) -> None:
        """Count a clearing of `salt`. It survives a power cut once this returns.

        Raises CommandError if it could not be kept; then nothing was changed.
        """
        with self._lock:
            name = tenant_of(salt).hex()
            counts = {**self._counts, name: self._counts.get(name, 0) + 1}
            if len(counts) > _MAX_SALTS:
                raise CommandError(
                    f"{_MAX_SALTS} salts were cleared already: clear everything instead"
                )
            if self._path is not None:
                try:
                    _write(self._path, counts)
                except OSError as error:
                    raise CommandError(
                        f"not cleared: {self._path} cannot be written: {error}"
                    ) from error
            self._counts = counts


def _read(path: Path) -> dict[str, int]:
    try:
        counts = json.loads(path.read_bytes())
        if all(isinstance(n, int) and n > 0 and bytes.fromhex(k) for k, n in counts.items()):
            return dict(counts)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise StoreError(
        f"{path} is damaged, so it is unknown which salts were cleared: remove the folder "
        f"{path.parent}, or the file alone if state under cleared salts may be found again"
    )


def _write(path: Path, counts: dict[str, int]) -> None:
    partial = path.with_suffix(".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(counts, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
