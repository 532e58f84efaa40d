"""Names the chunks of texts as the workers do, and remembers what it has named.

A text is marked about every `_STEP` characters, at a cut (`cuts`). A mark is known by a hash of the
text before it, so the longest known beginning of any text is found without a session, also after a
fork or an edit. What follows it is tokenised and hashed; the tokens before it are not needed again,
except those of the chunk that is not full yet.

The hash decides only which chain is looked up: two texts with one hash would cost time, no wrong
answer. It is seeded at random, so that no client can make such texts.

Caches of one seed can tell each other what they have named (`NamedPart`).
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import KEY_BYTES, ChunkHasher
from hetero_connector.artifacts.extra_keys import text_keys
from hetero_connector.artifacts.record import ROOT, ChunkKey
from ownership.router.identity.cuts import Cuts
from ownership.router.identity.tokenizer import ModelTokenizer

_STEP = 2_048
"""Characters between marks: 400 to 600 tokens, which a turn tokenises again in half a
millisecond."""
_NEWEST = 8
"""Marks that are all kept at the end of a text; before them, one of so many."""
_PART_MARKS = 8
"""Marks of one `NamedPart`: their chunks' keys have some kilobytes."""
_LINEAGE_BYTES = 400
_MARK_BYTES = 300
"""Measured sizes of what is kept, without keys and tokens."""


@dataclass(frozen=True)
class ChainNaming:
    """Everything besides the tokens that the keys of a prompt depend on."""

    root: bytes
    """The key that the worker's chains begin with."""
    chunk_tokens: int
    salt: str | None = None
    adapter_name: str = ""
    """The name under which a LoRA adapter is served; "" for none."""
    adapter: bytes = b""
    """Its digest."""
    salt_clearings: int = 0
    """The number of times that everything under the salt was cleared."""
    model_clearings: int = 0
    """The same of the adapter's state, or that of the model without one."""

    @cached_property
    def hasher(self) -> ChunkHasher:
        """The hasher of the worker's chains."""
        return ChunkHasher(self.root, self.chunk_tokens)

    @cached_property
    def extras(self) -> tuple[bytes, bytes]:
        """The extra keys of the first chunk, and of each later one."""
        keys = text_keys(self.salt, self, self.adapter_name, self.adapter)
        return keys(0, self.chunk_tokens), keys(self.chunk_tokens, 2 * self.chunk_tokens)

    def of_salt(self, salt: str) -> int:
        """Return how often everything under the salt was cleared."""
        return self.salt_clearings

    def of_model(self, model: str) -> int:
        """Return how often the adapter's state was cleared."""
        return self.model_clearings

    @cached_property
    def identity(self) -> bytes:
        """Bytes that no other naming has."""
        return encode([self.root, self.chunk_tokens, *self.extras])


@dataclass(frozen=True)
class PromptChain:
    """The full chunks of one prompt."""

    keys: Sequence[ChunkKey]
    chunk_tokens: int
    num_tokens: int
    tokenized: int
    """Tokens that were made for it; the others were known."""

    @property
    def ends(self) -> range:
        """The end of each chunk, in tokens."""
        size = self.chunk_tokens
        return range(size, size * (len(self.keys) + 1), size)


class _Mark(NamedTuple):
    """The state at one cut of a text."""

    digest: bytes
    cut: int
    num_tokens: int
    rest: bytes
    """The tokens after the last full chunk, uint32."""


class NamedPart(msgspec.Struct):
    """A part of a text that a cache has named, for other caches of the same seed."""

    after: bytes
    """The digest of the mark at which the part begins; empty at the beginning of the text."""
    first_chunk: int
    """The number of full chunks before the part."""
    keys: bytes
    """The keys of its full chunks."""
    marks: list[_Mark]
    chunk_tokens: int


@dataclass(eq=False)
class _Lineage:
    """The marks of one text, which grows. Its first ones may be another's."""

    keys: bytearray
    """The keys of the full chunks before the last mark."""
    marks: list[_Mark] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        rests = sum(len(mark.rest) for mark in self.marks)
        return _LINEAGE_BYTES + len(self.keys) + _MARK_BYTES * len(self.marks) + rests


class _Known(NamedTuple):
    """A mark, and what is known there."""

    lineage: _Lineage
    mark: _Mark
    keys: bytes
    """The keys of the full chunks before it."""


class _Chunks:
    """Hashes tokens as they come."""

    def __init__(self, naming: ChainNaming, keys: bytes, num_tokens: int, rest: bytes) -> None:
        self.naming = naming
        self.keys = bytearray(keys)
        self.num_tokens = num_tokens
        self.rest = array("I", rest)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises ValueError for one that is no uint32."""
        try:
            self.rest.extend(array("I", tokens))
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error
        self.num_tokens += len(tokens)
        size, hasher = self.naming.chunk_tokens, self.naming.hasher
        first, later = self.naming.extras
        done = 0
        while done + size <= len(self.rest):
            parent = ChunkKey(bytes(self.keys[-KEY_BYTES:])) if self.keys else ROOT
            chunk = self.rest[done : done + size]
            self.keys += hasher.key(parent, chunk, later if self.keys else first)
            done += size
        del self.rest[:done]

    def chain(self, tokenized: int) -> PromptChain:
        """Return the chunks so far."""
        whole = bytes(self.keys)
        keys = [ChunkKey(whole[at : at + KEY_BYTES]) for at in range(0, len(whole), KEY_BYTES)]
        return PromptChain(keys, self.naming.chunk_tokens, self.num_tokens, tokenized)


class ChainCache:
    """Names prompts, with bounded memory. Thread-safe."""

    def __init__(
        self,
        max_bytes: int = 256 << 20,
        seed: int | None = None,
        on_named: Callable[[NamedPart], None] | None = None,
    ) -> None:
        """`max_bytes`: memory for what is known. A session of 100,000 tokens takes about 25 KiB.
        `seed`: that of the caches whose parts are taken in; None: a random one. `on_named`: called
        on any thread with each part that this cache has named.
        """
        self._max_bytes = max_bytes
        self._seed = secrets.randbits(63) if seed is None else seed
        self._on_named = on_named
        self._lock = threading.Lock()
        self._index: dict[bytes, tuple[_Lineage, int]] = {}
        """By a mark's digest: its text, and the number of full chunks before it."""
        self._lineages: OrderedDict[int, _Lineage] = OrderedDict()
        """By id, the one used longest ago first."""
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is known."""
        return self._size_bytes

    def of_tokens(self, tokens: Sequence[int], naming: ChainNaming) -> PromptChain:
        """Return the chunks of a prompt of token ids. Raises ValueError as `_Chunks.extend`."""
        chunks = _Chunks(naming, b"", 0, b"")
        chunks.extend(tokens)
        return chunks.chain(0)

    def of_text(
        self,
        tokenizer: ModelTokenizer,
        text: str,
        naming: ChainNaming,
        *,
        is_wrapped: bool,
        until_s: float = math.inf,
    ) -> PromptChain:
        """Return the chunks of a text.

        `is_wrapped`: the tokenizer's special tokens stand around it. `until_s`: monotonic time from
        which no further mark is named. What was named by then is remembered, at least one mark of
        it, so a later call goes on from there.

        Raises ValueError for a text that is not Unicode, TimeoutError if it was not whole in time.
        """
        digest = xxhash.xxh3_128(
            encode([naming.identity, is_wrapped, tokenizer.digest]), seed=self._seed
        )
        marks = list(_marks(tokenizer.cuts, text, digest))
        at, known = self._last_known([name for _, name in marks])
        if known is None:
            begin, num_known, chunks = 0, 0, _Chunks(naming, b"", 0, b"")
            if is_wrapped:
                chunks.extend(tokenizer.before)
        else:
            _, begin, num_known, rest = known.mark
            chunks = _Chunks(naming, known.keys, num_known, rest)
        new, is_late = list[_Mark](), False
        for cut, name in marks[at:]:
            chunks.extend(tokenizer.tokens(text[begin:cut]))
            new.append(_Mark(name, cut, chunks.num_tokens, chunks.rest.tobytes()))
            begin = cut
            if is_late := time.monotonic() >= until_s:
                break
        if new:
            keys = bytes(chunks.keys)
            kept = self._record(known, new, keys, naming.chunk_tokens)
            if self._on_named is not None:
                for part in _parts(known, kept, keys, naming.chunk_tokens):
                    self._on_named(part)
        if is_late:
            raise TimeoutError("the text is not named yet")
        if begin < len(text):
            chunks.extend(tokenizer.tokens(text[begin:]))
        if is_wrapped:
            chunks.extend(tokenizer.after)
        return chunks.chain(chunks.num_tokens - num_known)

    def take_in(self, part: NamedPart) -> None:
        """Remember what another cache has named, unless what it goes on from is not known here."""
        at, known = self._last_known([part.after, *(mark.digest for mark in part.marks)])
        if known is None and part.after:
            return
        keys = b"" if known is None else known.keys
        keys += part.keys[len(keys) - part.first_chunk * KEY_BYTES :]
        new = part.marks[max(at - 1, 0) :]
        if new:
            self._record(known, new, keys, part.chunk_tokens)

    def _last_known(self, digests: Sequence[bytes]) -> tuple[int, _Known | None]:
        """Return the number of digests up to the last one of a known mark, and that mark."""
        with self._lock:
            for at in range(len(digests), 0, -1):
                digest = digests[at - 1]
                found = self._index.get(digest)
                if found is None:
                    continue
                lineage, num_chunks = found
                self._lineages.move_to_end(id(lineage))
                mark = next(x for x in reversed(lineage.marks) if x.digest == digest)
                return at, _Known(lineage, mark, bytes(lineage.keys[: num_chunks * KEY_BYTES]))
        return 0, None

    def _record(
        self, last: _Known | None, new: Sequence[_Mark], keys: bytes, chunk_tokens: int
    ) -> list[_Mark]:
        """Add marks after `last`: to its text if that has not gone on otherwise, else to a new one.
        Return those that are kept.

        `keys`: those of all full chunks before the last new mark.
        """
        with self._lock:
            lineage = None if last is None else last.lineage
            is_at_end = last is not None and last.lineage.marks[-1:] == [last.mark]
            if lineage is None or not is_at_end or id(lineage) not in self._lineages:
                lineage = _Lineage(bytearray())
                self._lineages[id(lineage)] = lineage
            else:
                self._size_bytes -= lineage.size_bytes
            lineage.keys += keys[len(lineage.keys) :]
            lineage.marks += new
            for mark in new:
                self._index[mark.digest] = lineage, mark.num_tokens // chunk_tokens
            self._thin_out(lineage)
            kept = [mark for mark in lineage.marks if mark.cut >= new[0].cut]
            self._size_bytes += lineage.size_bytes
            while self._size_bytes > self._max_bytes and self._lineages:
                _, oldest = self._lineages.popitem(last=False)
                self._size_bytes -= oldest.size_bytes
                self._forget(oldest, oldest.marks)
        return kept

    def _thin_out(self, lineage: _Lineage) -> None:
        old = lineage.marks[:-_NEWEST]
        dropped = [mark for mark in old if mark.cut // _STEP % _NEWEST]
        if dropped:
            self._forget(lineage, dropped)
            gone = {mark.digest for mark in dropped}
            lineage.marks = [mark for mark in lineage.marks if mark.digest not in gone]

    def _forget(self, lineage: _Lineage, marks: Iterable[_Mark]) -> None:
        for mark in marks:
            found = self._index.get(mark.digest)
            if found is not None and found[0] is lineage:
                del self._index[mark.digest]


def _marks(cuts: Cuts, text: str, digest: xxhash.xxh3_128) -> Iterable[tuple[int, bytes]]:
    """Yield the first cut after each multiple of `_STEP`, with the hash of the text before it."""
    if not cuts.exist:
        return
    before = 0
    for start in range(_STEP, len(text), _STEP):
        cut = cuts.first(text, start)
        if cut is None or not before < cut < start + _STEP:
            continue
        digest.update(text[before:cut].encode("utf-8", "surrogatepass"))
        before = cut
        yield cut, digest.digest()


def _parts(
    known: _Known | None, marks: Sequence[_Mark], keys: bytes, chunk_tokens: int
) -> Iterator[NamedPart]:
    """Yield the parts of a text up to these marks, which come after a known one."""
    after, begin = (b"", 0) if known is None else (known.mark.digest, len(known.keys))
    for at in range(0, len(marks), _PART_MARKS):
        some = list(marks[at : at + _PART_MARKS])
        end = some[-1].num_tokens // chunk_tokens * KEY_BYTES
        yield NamedPart(after, begin // KEY_BYTES, keys[begin:end], some, chunk_tokens)
        after, begin = some[-1].digest, end
