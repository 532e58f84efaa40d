"""Reads the KV events of stock workers over ZMQ, as vLLM publishes them, on a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import zmq

from ownership.router.view.event_stream import EventStream, Step

_log = logging.getLogger(__name__)

_POLL_MS = 100
_ANSWER_S = 5.0
"""Seconds within which batches are repeated."""
_CHECK_S = 4.0
"""Seconds between two questions if anything was missed: the last batches, or a restart."""
_MOST_AT_ONCE = 1_000


class EventSource(NamedTuple):
    """One publisher: an engine of a server."""

    endpoint: str
    replay_endpoint: str
    """"" if batches are not repeated."""
    topic: str = ""


def event_sources(answer: object, host: str) -> list[EventSource]:
    """Return the publishers that a server's answer to `/kv_event_sources` names.

    `host`: the server's, in place of "all addresses". Raises ValueError for any other document.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("the answer about KV events names no sources")
    found = []
    for config in answer.values():
        if not isinstance(config, Mapping) or not isinstance(config.get("endpoint"), str):
            raise ValueError("the answer about KV events names no endpoint")
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events", True):
            replay = _reachable(str(config.get("replay_endpoint") or ""), host)
            topic = str(config.get("topic") or "")
            found.append(EventSource(_reachable(config["endpoint"], host), replay, topic))
    return found


def _reachable(endpoint: str, host: str) -> str:
    host = f"[{host}]" if ":" in host else host
    for everywhere in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{everywhere}:", f"tcp://{host}:")
    return endpoint


@dataclass(eq=False)
class _Connection:
    source: EventSource
    stream: EventStream
    events: Any
    replay: Any


class EventReader:
    """Keeps the streams of all servers that it is told to follow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[str, tuple[EventSource, ...]] = {}
        self._streams: dict[str, list[EventStream]] = {}
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="router-kv-events")
        self._thread.start()

    def follow(self, server: str, sources: Iterable[EventSource]) -> None:
        """Read these publishers of a server, and no others."""
        with self._lock:
            self._wanted[server] = tuple(sources)

    def forget(self, server: str) -> None:
        """Read nothing more of a server that has left."""
        with self._lock:
            self._wanted.pop(server, None)

    def streams(self, server: str) -> list[EventStream]:
        """Return the streams of a server that are read, one for each of its engines."""
        with self._lock:
            return list(self._streams.get(server, ()))

    def close(self) -> None:
        """End the thread."""
        self._is_ending.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        poller = zmq.Poller()
        connections: dict[tuple[str, EventSource], _Connection] = {}
        while not self._is_ending.is_set():
            self._connect(context, poller, connections)
            if not connections:  # a poll of nothing does not wait
                self._is_ending.wait(1e-3 * _POLL_MS)
                continue
            ready = dict(poller.poll(_POLL_MS))
            now_s = monotonic()
            for connection in connections.values():
                try:
                    self._read(connection, ready, now_s)
                except Exception:  # a bug: the other engines are read all the same
                    if connection.stream.is_readable:  # else each poll might log it
                        endpoint = connection.source.endpoint
                        _log.exception("KV events of %s are not understood", endpoint)
                    connection.stream.is_readable = False
        context.destroy(linger=0)

    def _read(self, connection: _Connection, ready: Mapping[Any, int], now_s: float) -> None:
        if connection.replay in ready:
            self._read_replay(connection, now_s)
        if connection.events in ready:
            self._read_events(connection, now_s)
        stream = connection.stream
        if stream.has_waited(now_s, _ANSWER_S):
            stream.on_unanswered(now_s)
        elif connection.replay is not None and stream.is_unchecked(now_s, _CHECK_S):
            self._ask(connection, now_s)

    def _connect(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        connections: dict[tuple[str, EventSource], _Connection],
    ) -> None:
        """Open and close connections as wanted."""
        with self._lock:
            wanted = {(name, x) for name, sources in self._wanted.items() for x in sources}
            for key in connections.keys() - wanted:
                connection = connections.pop(key)
                for socket in (connection.events, connection.replay):
                    if socket is not None:
                        poller.unregister(socket)
                        socket.close(linger=0)
                self._streams[key[0]].remove(connection.stream)
            for key in wanted - connections.keys():
                connection = self._open(context, key[1])
                connections[key] = connection
                for socket in (connection.events, connection.replay):
                    if socket is not None:
                        poller.register(socket, zmq.POLLIN)
                self._streams.setdefault(key[0], []).append(connection.stream)
                self._ask(connection, monotonic())

    def _open(self, context: zmq.Context[Any], source: EventSource) -> _Connection:
        events = context.socket(zmq.SUB)
        events.setsockopt(zmq.RCVHWM, 100_000)
        events.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        _connect_socket(events, source.endpoint)
        replay = None
        if source.replay_endpoint:
            replay = context.socket(zmq.DEALER)
            _connect_socket(replay, source.replay_endpoint)
        return _Connection(source, EventStream(monotonic()), events, replay)

    def _ask(self, connection: _Connection, now_s: float) -> None:
        """Ask for the batches that are not known."""
        stream = connection.stream
        start = stream.on_asked(now_s)
        if connection.replay is None:
            stream.on_unanswered(now_s)
        else:
            try:
                connection.replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
            except zmq.Again:  # nothing is there that takes the questions
                stream.on_unanswered(now_s)

    def _read_events(self, connection: _Connection, now_s: float) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                parts = connection.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 3:
                number = int.from_bytes(parts[1], "big")
                if connection.stream.on_batch(number, parts[2], now_s) is Step.REPLAY:
                    self._ask(connection, now_s)

    def _read_replay(self, connection: _Connection, now_s: float) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                parts = connection.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 4:
                continue
            number = int.from_bytes(parts[2], "big", signed=True)
            if number < 0:
                if connection.stream.on_all_repeated(now_s) is Step.REPLAY:
                    self._ask(connection, now_s)
            else:
                connection.stream.on_repeated(number, parts[3], now_s)


def _connect_socket(socket: Any, endpoint: str) -> None:
    """Connect a socket; if the endpoint is not valid, log that, and the socket stays silent.

    Endpoints come from servers' answers. Requests then have the reason `events_silent`.
    """
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        _log.warning("KV events: %s cannot be connected to: %s", endpoint, error)
