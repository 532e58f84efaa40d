"""Counts the clearings of each salt and each model, so that nothing from before is found again.

A chunk's key does not tell its salt or its adapter, and after a restart it is unknown which of the
stored chunks belong to one. So a clearing gives new names to the chains that it is about: the
number of clearings goes into their keys. The numbers are kept next to the store, and nothing else
of a salt or of an adapter's name is but a digest.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

from hetero_connector.errors import CommandError, StoreError
from hetero_connector.session_ids import model_digest, tenant_of
from hetero_connector.store.ssd.private_files import read_private, replace_private, sync_folder

logger = logging.getLogger("vllm.heterocache")

CLEARED_NAME = "cleared-salts.json"
_MAX_CLEARED = 10_000
_MAX_BYTES = 64 * _MAX_CLEARED
_UNKEPT_BITS = 40


class Clearings:
    """Counts clearings. The `of_…` may be asked by any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, which may not exist; None: nothing is stored beyond this process.

        Raises StoreError for a file that is damaged: it is unknown what was cleared.
        """
        self._path = path
        self._lock = threading.Lock()
        self._counts = {} if path is None else _read(path)

    @classmethod
    def in_folder(cls, folder: Path | None) -> Clearings:
        """Return those of the store in this folder; None: of a store without an SSD."""
        return cls(None if folder is None else folder / CLEARED_NAME)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return all counts, by the digest of the salt or the model."""
        return self._counts

    def of_salt(self, salt: str) -> int:
        """Return how often everything under `salt` was cleared."""
        return self._counts.get(tenant_of(salt).hex(), 0) if self._counts else 0

    def of_model(self, model: str) -> int:
        """Return how often an adapter's state was cleared; "": that of the model without one."""
        return self._counts.get(model_digest(model).hex(), 0) if self._counts else 0

    def count_salt(self, salt: str) -> str | None:
        """Count a clearing of `salt`; return the reason if it could not be kept, else None.

        In this process nothing from before is found from now on, whatever the disk does. A clearing
        that is kept survives a power cut. Raises CommandError, and changes nothing, if too many
        salts and models were cleared.
        """
        return self._count(tenant_of(salt))

    def count_model(self, model: str) -> str | None:
        """Count a clearing of `model`, as `count_salt` does."""
        return self._count(model_digest(model))

    def raise_to(self, counts: Mapping[str, int]) -> None:
        """Count at least so many clearings of each: those of a store whose state comes here.

        Survives a power cut once this returns. Raises StoreError if it could not be kept.
        """
        with self._lock:
            raised = {k: max(n, self._counts.get(k, 0)) for k, n in counts.items()}
            merged = {**self._counts, **raised}
            if merged == self._counts:
                return
            if len(merged) > _MAX_CLEARED:
                raise StoreError(f"more than {_MAX_CLEARED} salts and models were cleared")
            try:
                self._keep(merged)
            except OSError as error:
                raise StoreError(f"{self._path} cannot be written: {error}") from error

    def _count(self, digest: bytes) -> str | None:
        with self._lock:
            name = digest.hex()
            kept = {**self._counts, name: self._counts.get(name, 0) + 1}
            if len(kept) > _MAX_CLEARED:
                raise CommandError(
                    f"{_MAX_CLEARED} salts and models were cleared: clear everything instead"
                )
            # A number that no later process counts up to, should this clearing not be kept.
            self._counts = {**kept, name: kept[name] + secrets.randbits(_UNKEPT_BITS)}
            try:
                self._keep(kept)
            except OSError as error:
                logger.warning(
                    "a clearing is not kept: %s cannot be written: %s", self._path, error
                )
                return f"{self._path} cannot be written: {error}"
            return None

    def _keep(self, counts: dict[str, int]) -> None:
        if self._path is not None:
            replace_private(self._path, json.dumps(counts).encode())
            sync_folder(self._path.parent)
        self._counts = counts


def _read(path: Path) -> dict[str, int]:
    try:
        counts = json.loads(read_private(path, _MAX_BYTES))
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
