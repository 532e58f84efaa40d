"""`RedisDirectory`: the directory of a fleet in Redis."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.errors import (
    DirectoryError,
    DirectoryRefusedError,
    RecordError,
    StaleEpochError,
)
from ownership.directory.contract import (
    DEFAULT_DEADLINE_S,
    ChainView,
    Claim,
    DirectoryLimits,
    Grant,
    GrantOutcome,
    Lease,
    RetiredEpochError,
    Worker,
)
from ownership.directory.generations import FleetGeneration
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch, Token
from ownership.directory.redis import encoding
from ownership.directory.redis.address import RedisAddress
from ownership.directory.redis.chain_chunks import ChainChunks, WorkerStates
from ownership.directory.redis.connection import (
    Argument,
    RedisConnection,
    ScriptError,
    ServerFullError,
)
from ownership.directory.redis.encoding import pack
from ownership.directory.redis.scripts import SERVER_TIME, run_starts, script_named
from ownership.directory.validation import (
    check_claims,
    check_lease,
    check_name,
    check_ttl,
    check_worker,
)

CLAIMS_PER_SCRIPT = 256
"""A script blocks every other client; this many claims take a few milliseconds."""

_FULL = Grant(GrantOutcome.FULL, NO_EPOCH, NO_TOKEN)

_log = logging.getLogger("vllm.heterocache")


class RedisDirectory:
    """A `Directory` in Redis 7 or later, or Valkey. Thread-safe.

    A method runs one Lua script, which happens as a whole or not at all; many claims, replicas or
    releases are divided among several runs. If Redis does not answer, a call raises
    DirectoryUnavailableError, and at once during the pause after a failure.

    If its memory is full, every claim and replica is answered `FULL`, `add_chain_user` raises
    DirectoryUnavailableError, and everything else works. `sweep` then keeps no orphans.
    """

    def __init__(
        self,
        address: RedisAddress | str,
        limits: DirectoryLimits | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        server_time: str = SERVER_TIME,
    ) -> None:
        """`deadline_s`: see `RedisConnection`. `server_time`: see `scripts.script_named`.

        The first call connects. Raises ValueError for a bad URL.
        """
        parsed = RedisAddress.parse(address) if isinstance(address, str) else address
        self._connection = RedisConnection(parsed, deadline_s)
        self._limits = limits or DirectoryLimits()
        self._server_time = server_time
        self._has_warned = False
        self._is_server_full = False
        """True if the last claims or replicas found the server's memory full."""
        self.num_bad_records = 0
        """Records that could not be decoded."""

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        """Raise DirectoryRefusedError if the fleet runs another version."""
        check_worker(worker)
        check_lease(lease_s)
        fields = (worker.name, worker.storage, worker.peer, lease_s, floor)
        most = self._limits.max_workers
        epoch, memory = self._run("register", encoding.FORMAT_VERSION, *fields, most)
        self._warn_once()
        return Lease(worker.name, Epoch(epoch), lease_s, _text(memory))

    def eviction_policy(self) -> str:
        """Return the server's eviction policy if it can delete a fleet's keys.

        Returns "" if it cannot, or if the server does not tell.
        """
        maxmemory, policy = map(_text, self._run("memory_policy"))
        is_ours = policy.startswith("allkeys-")  # a fleet's keys have no time to live
        return policy if is_ours and maxmemory not in ("", "0") else ""

    def _warn_once(self) -> None:
        if not self._has_warned and (policy := self.eviction_policy()):
            _log.warning(
                "%s: maxmemory-policy %s lets Redis forget the fleet's records when its memory is "
                "full, again and again: set it to noeviction",
                self._connection.address, policy,
            )  # fmt: skip
        self._has_warned = True

    def renew_lease(self, epoch: Epoch) -> str:
        return _text(self._run_as(epoch, "renew_lease"))

    def end_lease(self, epoch: Epoch) -> None:
        self._run("end_lease", epoch)

    def workers(self) -> Mapping[Epoch, Worker]:
        reply = self._run("workers")
        found = {}
        for at in range(0, len(reply), 4):
            epoch, name, storage, peer = reply[at : at + 4]
            found[Epoch(int(epoch))] = Worker(_text(name), peer, _text(storage))
        return found

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        """Decode each record when it is read."""
        (now, epochs, spans, runs), fetched = self._look_up(chain)
        now_s = float(now)
        chunks = ChainChunks(len(chain), spans, runs, fetched, self._on_bad_record)
        return ChainView(chunks, WorkerStates(epochs, now_s), now_s)

    def _look_up(self, chain: Sequence[ChunkKey]) -> tuple[Any, dict[int, bytes | None]]:
        """Return the reply of `lookup.lua`, and the runs that were fetched apart from it."""
        keys = b"".join(chain)
        starts = run_starts(keys)
        if starts and not self._connection.address.cluster:
            names = [chain[i] for i in starts]
            try:
                reply, values = self._run_and_fetch("lookup", (keys, "1"), "runs", names)
            except ServerFullError:  # Redis 7 begins no transaction then
                return self._run("lookup", keys, ""), {}
            return reply, dict(zip(starts, values, strict=True))
        return self._run("lookup", keys, ""), {}

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        """`lookup` finds claims that name their `parent` fastest."""
        check_claims(claims)
        most = self._limits.max_artifacts
        calls = [(epoch, most, encoding.pack_claims(part)) for part in _parts(claims)]
        return self._grants(epoch, "claim_owner", calls, len(claims))

    def release(self, epoch: Epoch, owned: Mapping[ArtifactId, Token]) -> None:
        calls = []
        for part in _parts(list(owned.items())):
            flat = [x for (chunk, kind), token in part for x in (chunk, kind.position, token)]
            calls.append((epoch, pack(flat)))
        self._run_each_as(epoch, "release", calls)

    def replicate_readonly(
        self, epoch: Epoch, copies: Sequence[Claim], ttl_s: float
    ) -> list[Grant]:
        check_claims(copies)
        check_ttl(ttl_s)
        most = self._limits.max_replicas
        calls = [(epoch, ttl_s, most, encoding.pack_copies(part)) for part in _parts(copies)]
        return self._grants(epoch, "replicate_readonly", calls, len(copies))

    def add_chain_user(self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]) -> None:
        check_name("user", user)
        most = self._limits.max_users
        self._run_as(epoch, "add_chain_user", user, most, pack(list(chunks)))

    def remove_chain_user(
        self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]
    ) -> list[ChunkKey]:
        is_unused = self._run_as(epoch, "remove_chain_user", user, pack(list(chunks)))
        return [chunk for chunk, unused in zip(chunks, is_unused, strict=True) if unused]

    def count_users(self, chunks: Sequence[ChunkKey]) -> list[int]:
        return list(self._run("count_users", pack(list(chunks))))

    def reset_generation(self) -> int:
        return encoding.generation(self._run("reset_generation"))

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        return encoding.generation(self._run_as(epoch, "report_generation", adopted, floor))

    def generation(self) -> FleetGeneration:
        number, *workers = self._run("generation")
        of = encoding.generation
        adopted = zip(workers[::2], workers[1::2], strict=True)
        return FleetGeneration(of(number), {_text(name): of(n) for name, n in adopted})

    def sweep(self, limit: int) -> int:
        most = 0 if self._is_server_full else self._limits.max_artifacts
        return int(self._run("sweep", limit, self._limits.orphan_ttl_s, most))

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _grants(
        self, epoch: Epoch, script: str, calls: Sequence[Sequence[Argument]], count: int
    ) -> list[Grant]:
        """A server whose memory is full is a full directory.

        All of several calls are `FULL` then. Some may have been granted: if repeated, they say so.
        """
        try:
            replies = self._run_each_as(epoch, script, calls)
        except ServerFullError:
            self._is_server_full = True
            return [_FULL] * count
        self._is_server_full = False
        return [grant for reply in replies for grant in encoding.grants(reply)]

    def _on_bad_record(self, error: RecordError) -> None:
        if not self.num_bad_records:
            _log.warning("%s: a record that cannot be decoded: %s", self._connection.address, error)
        self.num_bad_records += 1

    def _run_as(self, epoch: Epoch, script: str, *arguments: Argument) -> Any:
        return self._run_each_as(epoch, script, [(epoch, *arguments)])[0]

    def _run_each_as(
        self, epoch: Epoch, script: str, calls: Sequence[Sequence[Argument]]
    ) -> list[Any]:
        """Raises StaleEpochError, also if `calls` change nothing."""
        try:
            return self._connection.run_each(self._named(script), calls)
        except ScriptError as error:
            if error.code == "STALE_EPOCH":
                raise StaleEpochError(epoch, error.detail) from error
            if error.code == "RETIRED_EPOCH":
                raise RetiredEpochError(epoch, error.detail) from error
            raise self._explain(error) from error

    def _run(self, script: str, *arguments: Argument) -> Any:
        try:
            return self._connection.run(self._named(script), *arguments)
        except ScriptError as error:
            raise self._explain(error) from error

    def _run_and_fetch(
        self, script: str, arguments: Sequence[Argument], name: str, fields: Sequence[bytes]
    ) -> tuple[Any, list[bytes | None]]:
        try:
            return self._connection.run_and_fetch(self._named(script), arguments, name, fields)
        except ScriptError as error:
            raise self._explain(error) from error

    def _named(self, script: str) -> Any:
        return script_named(script, self._server_time)

    def _explain(self, error: ScriptError) -> DirectoryError:
        address = self._connection.address
        if error.code == "FORMAT":
            return DirectoryRefusedError(
                f"{address}: fleet {address.fleet!r} is of directory format {error.detail}, this "
                f"version writes {encoding.FORMAT_VERSION}: upgrade all its workers together, or "
                "name another fleet with ?fleet=NAME"
            )
        if error.code == "WORKERS":
            return DirectoryError(f"fleet {address.fleet!r} has max_workers live: {error.detail}")
        return RecordError(f"{address}: the data stored there is not a directory's: {error}")


def _parts(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Return at least one part, so that a call without items still finds a stale epoch."""
    starts = range(0, max(len(items), 1), CLAIMS_PER_SCRIPT)
    return [items[at : at + CLAIMS_PER_SCRIPT] for at in starts]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
