"""Which conversation a prompt continues, told by its tokens: stock clients send no id.

A prompt that begins with all of an earlier request's prompt, up to the grain at which
requests can end, is the next turn of its conversation. Answers are left out: clients
rewrite them (stripped reasoning, another tokenisation) more often than prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ChunkKey

_MAX_STEPS = 64
"""Chunks looked back from where a prompt leaves what is stored."""
_MAX_SIDE_BY_SIDE = 8
"""Conversations remembered that end within one and the same chunk after a common prefix."""


@dataclass(frozen=True)
class _Turn:
    end: int
    key: ChunkKey
    """Names all the prompt's tokens up to `end`."""
    conversation: int


class Conversations:
    """Conversations by the end of their last prompt; the newest `capacity` chunks of ends.

    Prompts shorter than a chunk are nobody's continuation. Not thread-safe.
    """

    def __init__(self, chunk_tokens: int, alignment: int, capacity: int = 4096) -> None:
        """`alignment`: tokens at whose multiples a request may end in the store."""
        self._chunk_tokens = chunk_tokens
        self._alignment = alignment
        self._capacity = capacity
        self._turns: OrderedDict[ChunkKey, Sequence[_Turn]] = OrderedDict()
        """By the last full chunk of the prompt, newest turn last."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._turns)

    def of(self, chain: RequestChain, prompt_tokens: int, matched_chunks: int) -> int:
        """The conversation this request goes on with, or a new one. Each is found once.

        `matched_chunks`: leading full chunks of it that are stored: only those are looked at.
        """
        found = self._continued(chain, prompt_tokens, matched_chunks)
        if found is None:
            self._count += 1
            return self._count
        return found

    def note(self, chain: RequestChain, prompt_tokens: int, conversation: int) -> None:
        """The conversation's latest turn has this prompt."""
        full = min(prompt_tokens, chain.num_tokens) // self._chunk_tokens
        if not full:
            return
        end = prompt_tokens - prompt_tokens % self._alignment
        turn = _Turn(end, chain.ending_at(end).key, conversation)
        last = chain.ending_at(full * self._chunk_tokens).key
        others = [t for t in self._turns.pop(last, ()) if t.key != turn.key]
        self._turns[last] = (*others, turn)[-_MAX_SIDE_BY_SIDE:]
        if len(self._turns) > self._capacity:
            self._turns.popitem(last=False)

    def _continued(self, chain: RequestChain, prompt_tokens: int, matched: int) -> int | None:
        for chunks in range(matched, max(0, matched - _MAX_STEPS), -1):
            key = chain.ending_at(chunks * self._chunk_tokens).key
            for turn in reversed(self._turns.get(key, ())):
                if turn.end <= prompt_tokens and chain.ending_at(turn.end).key == turn.key:
                    self._drop(key, turn)
                    return turn.conversation
        return None

    def _drop(self, key: ChunkKey, turn: _Turn) -> None:
        left = tuple(t for t in self._turns[key] if t is not turn)
        if left:
            self._turns[key] = left
        else:
            del self._turns[key]
