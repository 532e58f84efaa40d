"""A router's view of one engine: the blocks by medium, as its events say.

`Consumer` follows the rules that Dynamo and llm-d have in common. `Subscriber` reads the events of
a running engine over ZMQ, as they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

Event = Mapping[str, Any]


class Consumer:
    """The blocks of one engine. AssertionError for an event that a router would misunderstand."""

    def __init__(self, kind: str = "full_attention") -> None:
        self._kind = kind
        self.blocks: dict[str, dict[int, tuple[int, ...]]] = {}
        """The tokens of each block, by medium and hash."""
        self.parents: dict[int, int | None] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in the order they were published; other kinds of groups are ignored."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                self._remove(event)
            elif event["kv_cache_spec_kind"] == self._kind:
                self._store(event)

    def matched(self, hashes: Sequence[int], medium: str) -> int:
        """Return how many leading blocks of a prompt are in the medium."""
        held = self.blocks.get(medium, {})
        return next((i for i, block in enumerate(hashes) if block not in held), len(hashes))

    def of(self, medium: str) -> set[int]:
        """Return the hashes of all blocks in the medium."""
        return set(self.blocks.get(medium, {}))

    def _store(self, event: Event) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert hashes
        assert len(tokens) == len(hashes) * size
        held, before = self.blocks.setdefault(event["medium"], {}), event["parent_block_hash"]
        assert before is None or before in self.parents, "its parent was never stored"
        for index, block in enumerate(hashes):
            if event["medium"] != "GPU":
                assert block not in held, "stored twice: one removal would not remove it"
            held[block] = tuple(tokens[index * size : (index + 1) * size])
            assert self.parents.setdefault(block, before) == before, "two parents"
            before = block

    def _remove(self, event: Event) -> None:
        held = self.blocks.get(event["medium"], {})
        for block in event["block_hashes"]:
            if event["medium"] != "GPU":
                assert block in held, "removed, but it was not stored"
            held.pop(block, None)


class Subscriber:
    """Reads the events that an engine publishes at `endpoint`, and asks for them again."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, "")
        self._events.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def read(self, within_ms: int = 300) -> list[dict[str, Any]]:
        """Return the events that arrive until none has for so long."""
        events: list[dict[str, Any]] = []
        while self._events.poll(within_ms):
            events += _events_of(self._events.recv_multipart()[2])
        return events

    def replay(self, within_ms: int = 5000) -> list[dict[str, Any]]:
        """Return every event since the engine has started."""
        self._replay.send_multipart([b"", (0).to_bytes(8, "big")])
        events: list[dict[str, Any]] = []
        while self._replay.poll(within_ms):
            frames = self._replay.recv_multipart()
            if not frames[-1]:
                return events
            events += _events_of(frames[-1])
        raise TimeoutError("the replay has no end")

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy(linger=0)


def _events_of(payload: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events
