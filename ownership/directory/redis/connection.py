"""Calls to Redis: the only file that imports `redis`.

Half the deadline bounds every wait for bytes of the server, no call is retried without the caller's
knowledge, and errors say what to change. A circuit breaker decides when a server that failed is
asked again.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from hetero_connector.errors import (
    DirectoryError,
    DirectoryRefusedError,
    DirectoryUnavailableError,
)
from ownership.directory.breaker import CircuitBreaker
from ownership.directory.redis.address import RedisAddress
from ownership.directory.redis.scripts import Script, fleet_key

Argument = str | bytes | int | float
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)
_LATER = (ReadOnlyError, MasterDownError, TryAgainError, ClusterDownError)
_LATER_CODES = ("BUSY", "NOREPLICAS", "MISCONF", "UNKILLABLE")
"""Errors of a server that may succeed at another time."""
_ANNOTATION = " of pipeline caused error: "
"""redis-py names the command before it, if the server refused that in a transaction."""


class RedisConnection:
    """Runs scripts on a fleet's Redis. Thread-safe; connects when first used."""

    def __init__(self, address: RedisAddress, deadline_s: float) -> None:
        """`deadline_s`: twice the longest wait for the next bytes of the server.

        A call needs one answer; if the server does not know the script, two. One that has to
        connect needs up to five more: the connection, the password, two about the client's
        library, and the database. No call waits on after a wait that was in vain. Nothing bounds
        the sum: an answer that comes in pieces may take longer than the deadline, as may the
        system's resolver, which has its own timeout for a host name.
        """
        self.address = address
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._client: Any = None

    def run(self, script: Script, *arguments: Argument) -> Any:
        """Return the script's reply, in one round trip. Raises as `run_each` does."""
        return self._call(lambda client: self._run(client, script, arguments))

    def run_each(self, script: Script, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Return the replies of several runs, sent together. A Cluster takes a round trip for each.

        Raises DirectoryUnavailableError, ServerFullError among them; DirectoryRefusedError for what
        cannot work until the configuration changes; ScriptError for an error that the script itself
        returned.
        """
        if len(calls) == 1 or self.address.cluster:
            return [self.run(script, *arguments) for arguments in calls]
        replies: list[Any] = self._call(lambda x: self._run_each(x, script, calls))
        return replies

    def run_and_fetch(
        self, script: Script, arguments: Sequence[Argument], name: str, fields: Sequence[bytes]
    ) -> tuple[Any, list[bytes | None]]:
        """Return the script's reply, and fields of the fleet's hash `name` at the same moment.

        One transaction in one round trip. The client of a Cluster cannot do that. Raises as
        `run_each` does.
        """
        answers: tuple[Any, list[bytes | None]] = self._call(
            lambda client: self._run_and_fetch(client, script, arguments, name, fields)
        )
        return answers

    def close(self) -> None:
        """Close the connections. Idempotent; a later call connects again."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, call: Callable[[Any], Any]) -> Any:
        pause_s = self._breaker.admit()
        if pause_s:
            raise DirectoryUnavailableError(
                f"{self.address} did not answer; it is asked again in {pause_s:.1f} s"
            )
        began_s = time.monotonic()
        try:
            answer = call(self._connect())
        except (RedisError, RedisClusterException, OSError, ValueError) as error:
            raise self._translate(error, began_s) from error
        self._breaker.on_success()
        return answer

    def _run(self, client: Any, script: Script, arguments: Sequence[Argument]) -> Any:
        keys = [fleet_key(self.address.fleet, name) for name in script.keys]
        try:
            return client.evalsha(script.sha, len(keys), *keys, *arguments)
        except NoScriptError:  # the server does not have it yet, or was restarted
            return client.eval(script.body, len(keys), *keys, *arguments)

    def _run_each(
        self, client: Any, script: Script, calls: Sequence[Sequence[Argument]]
    ) -> list[Any]:
        keys = [fleet_key(self.address.fleet, name) for name in script.keys]
        pipeline = client.pipeline(transaction=False)
        for arguments in calls:
            pipeline.evalsha(script.sha, len(keys), *keys, *arguments)
        answers = list(pipeline.execute(raise_on_error=False))
        for index, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[index] = self._run(client, script, calls[index])
            elif isinstance(answer, Exception):
                raise answer
        return answers

    def _run_and_fetch(
        self,
        client: Any,
        script: Script,
        arguments: Sequence[Argument],
        name: str,
        fields: Sequence[bytes],
    ) -> tuple[Any, Any]:
        keys = [fleet_key(self.address.fleet, key) for key in script.keys]
        for command, code in (("EVALSHA", script.sha), ("EVAL", script.body)):
            pipeline = client.pipeline(transaction=True)
            pipeline.execute_command(command, code, len(keys), *keys, *arguments)
            pipeline.hmget(fleet_key(self.address.fleet, name), fields)
            reply, values = pipeline.execute(raise_on_error=False)
            if not isinstance(reply, NoScriptError):
                break
        for answer in (reply, values):
            if isinstance(answer, Exception):
                raise answer
        return reply, values

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = _open_client(self.address, self._deadline_s / 2)
            return self._client

    def _translate(self, error: Exception, began_s: float) -> DirectoryError:
        """Return the error to raise, and report to the breaker whether the server answered.

        `began_s`: when the call was made.
        """
        refusal = _refusal(error, self.address)
        if refusal is not None:
            self._breaker.on_failure(began_s)
            return DirectoryRefusedError(refusal)
        if isinstance(error, OutOfMemoryError):
            self._breaker.on_success()
            return ServerFullError(f"{self.address}: {error}")
        is_answer = isinstance(error, ResponseError) and not isinstance(error, _LATER)
        text = str(error).rpartition(_ANNOTATION)[2]
        if is_answer and not text.startswith(_LATER_CODES):
            self._breaker.on_success()
            return ScriptError(text)
        self._breaker.on_failure(began_s)
        # redis-py goes on with its objects for the Sentinels that it has asked.
        return DirectoryUnavailableError(f"{self.address}: {str(error).partition(' : <')[0]}")


class ServerFullError(DirectoryUnavailableError):
    """The server's memory is full, so it refused a script that adds to it, or a transaction."""


class ScriptError(DirectoryError):
    """An error that a script returned: `code`, then `detail`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code, _, self.detail = message.partition(" ")


def _open_client(address: RedisAddress, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "socket_read_size": 1 << 18,  # the answer for a long chain is a megabyte
    }
    if address.tls:
        tls = {"ssl_ca_certs": address.tls_ca, "ssl_certfile": address.tls_cert}
        options |= {"ssl": True, **tls, "ssl_keyfile": address.tls_key}
    if address.cluster:
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        return RedisCluster(startup_nodes=nodes, **options)
    options["db"] = address.db
    if address.sentinel_service:
        share_s = timeout_s / len(address.nodes)  # they are asked one after another
        own: dict[str, Any] = {"username": None, "password": address.sentinel_password, "db": 0}
        own |= {"socket_timeout": share_s, "socket_connect_timeout": share_s}
        sentinel = Sentinel(address.nodes, sentinel_kwargs=options | own, **options)
        return sentinel.master_for(address.sentinel_service)
    host, port = address.nodes[0]
    return redis.Redis(host=host, port=port, **options)


def _refusal(error: Exception, address: RedisAddress) -> str | None:
    """Return what to change if asking again cannot help; None if it may help."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"{address}: the server's certificate is not valid: {cause.verify_message}; name "
                "the right authority with tls_ca=FILE and the host as the certificate does"
            )
        if isinstance(cause, ssl.SSLError):
            return (
                f"{address}: no TLS connection: {cause.reason or cause}; does the server speak TLS "
                "on that port (else redis://), and want a client's certificate (tls_cert, tls_key)?"
            )
    if isinstance(error, NoPermissionError):
        return f"{address}: the user may not run scripts on this fleet's keys: {error}"
    if isinstance(error, _REFUSED) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return f"{address}: wrong user or password: {error}"
    if isinstance(error, RedisClusterException) and "Cluster mode is not enabled" in str(error):
        return f"{address}: the server is no Cluster: use redis:// instead of redis+cluster://"
    if isinstance(error, MovedError) and not address.cluster:
        return f"{address}: the server is part of a Cluster: use redis+cluster://"
    if isinstance(error, ResponseError) and "unknown command" in str(error).lower():
        return f"{address}: the server does not run Lua scripts: {error}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
