"""Keeps a worker registered: the heartbeat, and a new epoch when the old one has ended."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from hetero_connector.errors import DirectoryError, DirectoryRefusedError, StaleEpochError
from hetero_connector.metrics import Recorder
from ownership.directory import OwnershipDirectory, RetiredEpochError, Worker
from ownership.directory.identifiers import LAST_NUMBER, Epoch
from ownership.member.held_lease import HeldLease

_RETRIES_PER_LEASE = 10
_LONGEST_RETRY_S = 1.0

_log = logging.getLogger("vllm.heterocache")


class LeaseKeeper:
    """One worker's registration. One thread calls `run_due`; any thread may call the rest.

    No method raises because the directory does not answer. The lease then runs out, as `lease`
    shows, and the worker has only its own cache until it is registered again.
    """

    def __init__(
        self,
        directory: OwnershipDirectory,
        worker: Callable[[], Worker],
        lease_s: float,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker`: returns the worker to register. If it returns another one than before, the
        epoch is ended and that one is registered. `clock`: monotonic seconds.
        """
        self._directory = directory
        self._worker = worker
        self._lease_s = lease_s
        self._recorder = recorder
        self._clock = clock
        self._lease: HeldLease | None = None
        self._registered: Worker | None = None
        self._is_stale = False
        self._replaced_s = -math.inf
        """The clock when another registration of the name last took the lease's place."""
        self._to_end: Epoch | None = None
        self._memory = ""
        """The name of the directory's memory at the last call."""
        self._whole_s = 0.0
        """The clock when it was last found to have kept its name."""
        self._lost_after_s: float | None = None
        self._floor = 0
        self._retry_at_s = clock()
        self._last_cause = ""

    @property
    def lease(self) -> HeldLease | None:
        """The latest registration, valid or not; None before the first."""
        return self._lease

    def note_number(self, number: int) -> None:
        """Record an epoch or token that was seen: later registrations get greater ones.

        Ignores numbers that no directory hands out.
        """
        if number < LAST_NUMBER:
            self._floor = max(self._floor, number)

    def take_loss(self) -> float | None:
        """Return, once per loss of records, the latest clock at which none were lost yet.

        None if none were lost. It may be long ago: a busy machine hears of a loss late.
        """
        lost_after_s, self._lost_after_s = self._lost_after_s, None
        return lost_after_s

    def on_stale(self, error: StaleEpochError) -> None:
        """Give up the epoch that the directory has refused. `run_due` registers again."""
        lease = self._lease
        if lease is None or lease.epoch != error.epoch or self._is_stale:
            return
        lease.invalidate()
        self._is_stale = True
        if isinstance(error, RetiredEpochError):
            self._on_replaced(lease.lease.worker)

    def _on_replaced(self, name: str) -> None:
        """Wait one lease if another engine has taken this one's place twice within a lease.

        Once may be this worker's own doing: a registration that was not answered may arrive late.
        """
        now_s = self._clock()
        if now_s < self._replaced_s + self._lease_s:
            self._retry_at_s = now_s + self._lease_s
            self._recorder.set("heterocache_directory_joined", 0.0)
            _log.error(
                "another engine has the worker_name %r, too, and they take each other's place: "
                "give each engine of the fleet its own worker_name; this one uses only its local "
                "cache for %.0f s",
                name, self._lease_s,
            )  # fmt: skip
        self._replaced_s = now_s

    def start_over(self) -> None:
        """Give up the epoch, because the directory's records of it can no longer be corrected.

        `run_due` ends it and registers again.
        """
        if self._lease is not None and not self._is_stale:
            self._lease.invalidate()
            self._is_stale = True
            self._to_end = self._lease.epoch

    def run_due(self) -> Epoch | None:
        """Register or renew, if that is due. Return the epoch if it is a new one, else None."""
        if self._clock() < self._retry_at_s:
            return None
        lease = self._lease
        try:
            if self._to_end is not None:
                self._directory.end_lease(self._to_end)
                self._to_end = None
            elif lease is None or self._is_stale:
                return self._register()
            elif self._worker() != self._registered:
                # If it only registered again, its own artifacts would be foreign for up to a lease.
                # Serving ends before the epoch does, in the next call.
                self.start_over()
            elif lease.renew_in_s == 0.0:
                self._renew(lease)
        except DirectoryError as error:
            self._on_failure(error)
        return None

    def wait_s(self) -> float:
        """Return the seconds until `run_due` has something to do."""
        retry_in_s = max(0.0, self._retry_at_s - self._clock())
        lease = self._lease
        if lease is None or self._is_stale:
            return retry_in_s
        return max(retry_in_s, lease.renew_in_s)

    def leave(self) -> None:
        """End the lease: the worker stops serving. Without an answer the lease runs out."""
        lease = self._lease
        if lease is None:
            return
        lease.invalidate()
        self._recorder.set("heterocache_directory_joined", 0.0)
        try:
            self._directory.end_lease(lease.epoch)
        except DirectoryError as error:
            _log.info("the lease runs out by itself: %s", error)

    def _register(self) -> Epoch:
        asked_s, worker = self._clock(), self._worker()
        lease = self._directory.register(worker, self._lease_s, self._floor)
        self._registered = worker
        self.note_number(lease.epoch)
        self._lease = HeldLease(lease, asked_s, self._clock)
        self._is_stale, self._lost_after_s = False, None
        self._memory, self._whole_s = lease.memory, asked_s
        self._on_success()
        _log.info("worker %r is registered as epoch %d", lease.worker, lease.epoch)
        return lease.epoch

    def _renew(self, lease: HeldLease) -> None:
        asked_s = self._clock()
        try:
            memory = self._directory.renew_lease(lease.epoch)
        except StaleEpochError as error:
            # The directory lost its memory, or this worker was silent for too long.
            self.on_stale(error)
            self._recorder.set("heterocache_directory_joined", 0.0)
            _log.warning("%s", error)
            return
        lease.on_renewed(asked_s)
        if memory != self._memory:
            self._memory = memory
            if self._lost_after_s is None:
                self._lost_after_s = self._whole_s
            self._recorder.add("heterocache_directory_failures", cause="lost_records")
            _log.warning("the directory may have lost records: this worker repairs its own")
        self._whole_s = asked_s
        self._on_success()

    def _on_success(self) -> None:
        if self._last_cause:
            _log.info("the directory answers again")
        self._last_cause = ""
        self._recorder.set("heterocache_directory_joined", 1.0)

    def _on_failure(self, error: DirectoryError) -> None:
        """Schedule another attempt. Logs when the cause changes, not at every attempt."""
        pause_s = min(_LONGEST_RETRY_S, self._lease_s / _RETRIES_PER_LEASE)
        self._retry_at_s = self._clock() + pause_s
        cause = type(error).__name__
        if cause != self._last_cause:
            level = logging.ERROR if isinstance(error, DirectoryRefusedError) else logging.WARNING
            _log.log(level, "only the local cache is used for now: %s", error)
        self._last_cause = cause
        if self._lease is None or not self._lease.is_valid:
            self._recorder.set("heterocache_directory_joined", 0.0)
