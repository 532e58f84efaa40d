"""The commands that a running engine takes at its socket.

Each runs on a thread of its client's and waits for what it asked for, within a limit. What belongs
to the scheduler's thread is done there, at the end of a step; the rest under the catalog's lock.
Arguments come from clients: every one is checked, and an unknown one is refused.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.extra_keys import text_keys
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.engine.scheduler.chain_root import ChainRoot, Cleared
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.session_book import (
    MIN_DIGEST,
    PromptName,
    SessionBook,
    SessionRecord,
    session_name,
)
from hetero_connector.engine.scheduler.step_calls import NOT_DONE, StepCalls
from hetero_connector.errors import CommandError, MalformedCommandError
from hetero_connector.session_ids import session_key, tenant_of
from hetero_connector.spec.state_types import Family
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import PinRefusal
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.units import MIB

Arguments = Mapping[str, Any]
Result = dict[str, Any]

_STEP_S = 20.0
"""Longest wait of a command for steps of the engine. With `_JOURNAL_S` it is less than the 30 s
that clients wait."""
_JOURNAL_S = 5.0
"""Longest wait for the journal to forget a session."""
_MAX_SECONDS = 86_400.0
_MAX_TEXT = 4_096
_POLL_S = 0.02


class Engine(Protocol):
    """The scheduler side, as commands use it. Belongs to the scheduler's thread."""

    root: ChainRoot
    """Any thread may read its hasher."""
    is_stopped: bool
    """True once nothing is restored or saved any more. Any thread may read it."""

    def reset(self) -> bool:
        """Forget everything stored."""
        ...

    def reset_pages(self) -> bool:
        """Empty vLLM's own prefix cache; False while requests hold its pages."""
        ...

    def on_cleared(self, what: Cleared) -> None:
        """Name the chains of these running requests anew."""
        ...


class Commands:
    """Carries out commands. Its public methods are called by threads of the socket."""

    def __init__(
        self,
        engine: Engine,
        store: ArtifactStore,
        book: SessionBook,
        request_step: Callable[[], None],
        awaits_copies: Callable[[], bool],
    ) -> None:
        """`request_step`: as for `StepCalls`. Raises StoreError; see `Clearings`.

        `awaits_copies` says, on any thread, whether workers still copy what is to be stored.
        """
        self._engine = engine
        self._awaits_copies = awaits_copies
        self._store = store
        self._book = book
        self.steps = StepCalls(request_step)
        self.clearings = Clearings.in_folder(store.folder)
        self.model_names = frozenset[str]()
        """The names of the model itself; others are adapters'."""
        self.is_draining = False
        """True if nothing new is to be stored. Read by the scheduler's thread."""

    def by_name(self) -> dict[str, Callable[[Arguments], Result]]:
        """Return every command by the name that clients use."""
        return {
            "clear": self.clear,
            "warm": self.warm,
            "drain": self.drain,
            "scrub": self.scrub,
            "pin": self.pin,
            "unpin": self.unpin,
        }

    def clear(self, arguments: Arguments) -> Result:
        """Forget everything, everything under `salt`, of `model`, or one `session` (of `salt`)."""
        take = Taker(arguments, "session", "salt", "model", "all")
        session, salt, model = take.text("session"), take.text("salt"), take.text("model")
        is_all = take.flag("all")
        if [session is not None or salt is not None, model is not None, is_all].count(True) != 1:
            raise MalformedCommandError(
                "say what to clear: session (with its salt, if it has one), salt, model, or all, "
                "and nothing else"
            )
        if model is not None:
            return self._clear_model(model)
        if session is not None:
            return self._clear_session(session, salt)
        if salt is not None:
            return self._clear_salt(salt)
        return self.steps.call(self._clear_all, _STEP_S)

    def warm(self, arguments: Arguments) -> Result:
        """Stage what is stored of a prompt in DRAM, wait for it, and let it leave late."""
        take = Taker(arguments, "tokens", "salt", "keep_s", "wait_s")
        tokens, salt = take.tokens("tokens"), take.text("salt")
        keep_s = take.seconds("keep_s", 600.0)
        wait_s = take.seconds("wait_s", 20.0)
        self._check_restores()
        chain = self._new_chain(salt)
        chain.extend(tokens)
        leaves = _leaves(self._store, chain)
        if not leaves:
            return {"tokens": len(tokens), "stored_tokens": 0, "dram_tokens": 0}
        now_s, name, tenant = self._store.catalog.clock(), PromptName(leaves[0]), tenant_of(salt)
        until_s = now_s + keep_s
        self._store.retention.protect_chain(name, leaves, until_s, tenant)
        self._store.expect(
            ExpectedReturn(name, leaves, now_s, until_s, 1.0, tenant, is_ordered=True)
        )
        deadline = time.monotonic() + wait_s
        while True:
            found = _stored(self._store, chain)
            in_dram = [x for x in found if _is_in_dram(x, is_last=x is found[-1])]
            if len(in_dram) == len(found) or time.monotonic() >= deadline:
                return {
                    "tokens": len(tokens),
                    "stored_tokens": found[-1].chunk.end if found else 0,
                    "dram_tokens": sum(x.chunk.end - x.chunk.start for x in in_dram),
                }
            time.sleep(_POLL_S)

    def drain(self, arguments: Arguments) -> Result:
        """Store nothing new, and write what is in DRAM to SSD; `resume`: store again.

        What workers copy at the moment is waited for and written, too. `unwritten`: the artifacts
        that the SSD or the write budget had no room for.
        """
        take = Taker(arguments, "resume", "wait_s")
        resumes, wait_s = take.flag("resume"), take.seconds("wait_s", 60.0)
        if self._store.catalog.config.ssd_dir is None:
            raise CommandError(
                "this engine has no ssd_dir to write to: what is in DRAM ends with the engine"
            )
        self.is_draining = not resumes
        if resumes:
            return {"draining": False}
        deadline = time.monotonic() + wait_s
        while self._awaits_copies() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        is_written = self._store.flush(max(0.0, deadline - time.monotonic()))
        is_written = is_written and not self._awaits_copies()
        answer: Result = {"draining": True, "written": is_written}
        health = self._store.health()
        if not is_written:
            if not (health.ssd_writable and health.io_alive):
                answer["reason"] = "the SSD cannot be written: the engine's log says why"
        elif unwritten := self._store.num_unwritten():
            reason = (
                f"{unwritten:,} artifacts are in DRAM alone and end with the engine: the SSD has "
                "no room for them (ssd_gib), or the day's writes are spent (ssd_write_gib_per_day)"
            )
            answer |= {"written": False, "unwritten": unwritten, "reason": reason}
        return answer

    def scrub(self, arguments: Arguments) -> Result:
        """Begin to check all that is stored, at `mib_per_s`; `stop`: end that."""
        take = Taker(arguments, "mib_per_s", "stop")
        mib_per_s, stops = take.number("mib_per_s", 64.0, 1e6, "MiB per second"), take.flag("stop")
        scrubber = self._store.scrubber
        if stops:
            scrubber.stop()
        elif self._store.io_thread is None:
            raise CommandError(
                "nothing can be checked: without ssd_dir or a directory this engine makes no "
                "checksums, unless it has verify: all"
            )
        elif not scrubber.start(mib_per_s * MIB):
            raise CommandError("a scrub is running already: see its progress in the status")
        return {"scrub": asdict(scrubber.progress) if scrubber.progress else None}

    def activity(self) -> Result:
        """Return what commands have begun, for the status."""
        progress = self._store.scrubber.progress
        return {
            "draining": self.is_draining,
            "scrub": None if progress is None else asdict(progress),
        }

    def pin(self, arguments: Arguments) -> Result:
        """Evict nothing of a `session` (of `salt`), or of a prompt of `tokens`, for `seconds`.

        Beyond the share of one salt, but not beyond that of all pins. A session's pin covers what
        its later turns add.
        """
        take = Taker(arguments, "session", "tokens", "salt", "seconds")
        seconds = take.seconds("seconds", 3_600.0)
        self._check_restores()
        name, leaves, tenant = self._pinned_chain(take)
        pinned = self._store.retention.pin_chain(name, leaves, seconds, tenant, is_bounded=False)
        if isinstance(pinned, PinRefusal):
            raise CommandError(f"not pinned: {pinned.value}")
        return {"pinned_tokens": pinned.end, "bytes": pinned.size_bytes, "seconds": seconds}

    def unpin(self, arguments: Arguments) -> Result:
        """End the pin of a `session` (of `salt`), or of the prompt of `tokens` that was pinned."""
        name, _, _ = self._pinned_chain(Taker(arguments, "session", "tokens", "salt"))
        return {"unpinned_tokens": self._store.retention.unpin_chain(name)}

    def _pinned_chain(self, take: Taker) -> tuple[Hashable, Sequence[ChunkKey], bytes]:
        """Return the name, the ends and the tenant of the chain that the arguments name."""
        session, salt = take.text("session"), take.text("salt")
        if (session is None) != take.has("tokens"):
            raise MalformedCommandError(
                "say what to pin: session (with its salt, if it has one), or tokens"
            )
        if session is not None:
            key, record = self._find_session(session, salt)
            return key, record.leaves, record.tenant
        chain = self._new_chain(salt)
        chain.extend(take.tokens("tokens"))
        name = PromptName(chain.ending_at(chain.num_tokens).key)
        return name, _leaves(self._store, chain), tenant_of(salt)

    def _check_restores(self) -> None:
        if self._engine.is_stopped:
            raise CommandError("this engine restores nothing since a load has failed: restart it")

    def _new_chain(self, salt: str | None) -> RequestChain:
        """Return the empty chain of a prompt that is token ids alone, under today's root."""
        return RequestChain(self._engine.root.hasher, text_keys(salt, self.clearings))

    def _clear_all(self) -> Result:
        self._book.clear()
        is_kept = self._engine.reset()
        return {"cleared": "all", "kept": is_kept, "pages": self._engine.reset_pages()}

    def _clear_salt(self, salt: str) -> Result:
        tenant = tenant_of(salt)
        problem = self.clearings.count_salt(salt)  # from now on nothing from before is found
        try:
            pages = self._rename(Cleared(salt=salt), problem)
        finally:
            self._store.retention.release(lambda _, owner: owner == tenant)
            chunks = self._forget_all(lambda record: record.tenant == tenant)
        return {"cleared": "salt", "chunks": chunks, "pages": pages, **_kept(problem)}

    def _clear_model(self, name: str) -> Result:
        """Forget what requests of this model stored: an adapter's, or the model's without one."""
        model = "" if name in self.model_names else name
        is_known = not model or self.clearings.of_model(model) > 0
        is_known |= any(model in record.models for _, record in self._book.newest())
        problem = self.clearings.count_model(model)
        try:
            pages = self._rename(Cleared(model=model), problem)
        finally:
            if not model:
                self._store.retention.release(lambda user, _: isinstance(user, PromptName))
            chunks = self._forget_all(lambda record: record.models == {model})
        answer = {"cleared": "model", "chunks": chunks, "pages": pages, "known": is_known}
        return {**answer, **_kept(problem)}

    def _rename(self, what: Cleared, problem: str | None) -> bool:
        """Name the chains of these requests anew; return whether vLLM's own cache is empty.

        CommandError if the engine does not step: its next step does it. `problem`: why the clearing
        is not kept; None: it is.
        """

        def rename() -> bool:
            self._engine.on_cleared(what)
            return self._engine.reset_pages()

        try:
            return self.steps.call(rename, _STEP_S)
        except CommandError as error:
            self.steps.leave(rename)
            kept = "" if problem is None else f", but a later engine would find it: {problem}"
            raise CommandError(
                f"half carried out: nothing that was stored is found any more{kept}. Requests that "
                "run, and vLLM's own prefix cache, follow at the engine's next step: "
                + str(error).removeprefix(NOT_DONE)
            ) from error

    def _forget_all(self, is_meant: Callable[[SessionRecord], bool]) -> int:
        """Forget the sessions with such records; return the number of their chunks."""
        return sum(
            self._forget(session, record.leaves)
            for session, record in self._book.newest()
            if is_meant(record)
        )

    def _clear_session(self, session: str, salt: str | None) -> Result:
        def begin() -> tuple[Hashable, SessionRecord]:
            """No turn begins or ends meanwhile. A later one is of a session of its own."""
            known, record = self._find_session(session, salt)
            if record.ended is None:
                raise CommandError("a turn of the session is running: clear it afterwards")
            self._book.forget(known)
            return known, record

        deadline_s = time.monotonic() + _STEP_S
        known, record = self.steps.call(begin, _STEP_S)
        chunks = self._store.forget_session(known, record.leaves)
        pages = False
        try:  # after the store has forgotten: a turn would restore what it has
            left_s = max(0.0, deadline_s - time.monotonic())
            pages = self.steps.call(self._engine.reset_pages, left_s)
        except CommandError:
            self.steps.leave(self._engine.reset_pages)
        problem = None
        if not self._store.wait_forgotten(_JOURNAL_S):
            problem = f"the journal of {self._store.folder} could not be changed: see the log"
        return {"cleared": "session", "chunks": chunks, "pages": pages, **_kept(problem)}

    def _find_session(self, session: str, salt: str | None) -> tuple[Hashable, SessionRecord]:
        """Return the session with this id under the salt, or with this name."""
        key, known = session_key(salt, session), self._book.newest()
        if (record := self._book.find(key)) is not None:
            return key, record
        named = [x for x in known if session_name(x[0]) == session]
        if len(session) >= MIN_DIGEST and not named:
            named = [x for x in known if session_name(x[0]).startswith(session)]
        if len(named) != 1:
            raise CommandError(
                "no such session is known: name it by its id, with its salt if its requests have "
                "one, or as reports, `heterocache top` and `GET /v1/heterocache/sessions` do, by "
                f"at least {MIN_DIGEST} characters of its digest. "
                "This engine knows the newest few thousand"
            )
        return named[0]

    def _forget(self, session: object, leaves: Sequence[ChunkKey]) -> int:
        self._book.forget(session)
        return self._store.forget_session(session, leaves)


class Taker:
    """Takes a command's arguments. Raises MalformedCommandError for an unknown or wrong one."""

    def __init__(self, arguments: Arguments, *names: str) -> None:
        self._arguments = arguments
        if unknown := sorted(str(name) for name in arguments if name not in names):
            raise MalformedCommandError(
                f"unknown argument {', '.join(unknown)[:_MAX_TEXT]}: known are {', '.join(names)}"
            )

    def has(self, name: str) -> bool:
        """Return whether the argument is given."""
        return self._arguments.get(name) is not None

    def text(self, name: str) -> str | None:
        """Return a text that is not empty; None if it is not given."""
        value = self._arguments.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
            raise MalformedCommandError(f"{name} must be a text of 1 to {_MAX_TEXT} characters")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is not given."""
        value = self._arguments.get(name, False)
        if not isinstance(value, bool):
            raise MalformedCommandError(f"{name} must be true or false")
        return value

    def seconds(self, name: str, default: float) -> float:
        """Return a number of seconds."""
        return self.number(name, default, _MAX_SECONDS, "seconds")

    def number(self, name: str, default: float, most: float, unit: str) -> float:
        """Return a number above 0."""
        value = self._arguments.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most:
            raise MalformedCommandError(
                f"{name} must be a number of {unit}, above 0, at most {most:.0f}"
            )
        return float(value)

    def tokens(self, name: str) -> array[int]:
        """Return a prompt's token ids, which `pack_tokens` has packed."""
        value = self._arguments.get(name)
        try:
            if isinstance(value, str):
                tokens = array("I", base64.b64decode(value, validate=True))
                if tokens:
                    return tokens
        except ValueError:
            pass
        raise MalformedCommandError(
            f"{name} must be a prompt's token ids, 32 bits each, in base64, and not empty"
        )


def _kept(problem: str | None) -> Result:
    """Return whether a clearing will be known to the next process; `problem`: why not."""
    return {"kept": True} if problem is None else {"kept": False, "reason": problem}


def pack_tokens(tokens: Sequence[int]) -> str:
    """Return token ids as `Taker.tokens` takes them. Raises ValueError for others than ids."""
    try:
        return base64.b64encode(array("I", tokens).tobytes()).decode()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error


def _leaves(store: ArtifactStore, chain: RequestChain) -> tuple[ChunkKey, ...]:
    """Return the chain's last stored chunks, the deepest first."""
    found = store.match(chain.chunks())
    short = tuple(tail.key for tail in _short_ends(store, chain, found))
    return (*short, found[-1].chunk.key) if found else short


def _stored(store: ArtifactStore, chain: RequestChain) -> list[StoredChunk]:
    """Return what is stored of the chain, up to the longest short chunk at its end."""
    found = store.match(chain.chunks())
    full = [x.chunk for x in found]
    for tail in _short_ends(store, chain, found):
        if len(longer := store.match([*full, tail])) > len(found):
            return longer
    return found


def _short_ends(
    store: ArtifactStore, chain: RequestChain, found: Sequence[StoredChunk]
) -> list[ChunkRange]:
    """Return the short chunks of the chain that may be stored after `found`, the longest first."""
    last, end = (found[-1].chunk.key, found[-1].chunk.end) if found else (ROOT, 0)
    lengths = sorted((n for n in store.tails(last) if end + n <= chain.num_tokens), reverse=True)
    return [chain.tail(end + length) for length in lengths]


def _is_in_dram(stored: StoredChunk, *, is_last: bool) -> bool:
    """Return whether a restore finds in DRAM what it needs of the chunk."""
    return all(
        tier is Tier.DRAM
        for kind, tier in stored.tiers.items()
        if is_last or kind.family is Family.PREFIX
    )
