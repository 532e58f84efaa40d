"""Looks prompts up in the ownership directory: one call for a request, within a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from hetero_connector.errors import DirectoryError
from ownership.directory import ChainView, Directory, EpochStatus, WorkerState
from ownership.directory.breaker import CircuitBreaker
from ownership.router.identity import ChainNaming, Prompt, PromptChain, PromptIdentity
from ownership.router.view.certainty import Certainty, Reason, certainty
from ownership.router.view.published import PublishedChain
from ownership.router.view.stock import StockWorkers
from ownership.router.view.trust import Kind, Trust
from ownership.scheduling.prefixes import worker_prefixes
from ownership.scheduling.step import WorkerPrefix

_log = logging.getLogger(__name__)

_THREADS = 4
_LIVE_S = 1.0
"""A lease that has ended may be noticed so many seconds later."""
_LACKING_S = 0.1
"""While the directory lacks an engine, its coming may be noticed so many seconds later."""


@dataclass(frozen=True)
class PromptView:
    """One prompt of a request, and the servers that have state of it."""

    prompt_tokens: int
    """0 if it is not known. A guess for what follows the first image, whose own are not counted,
    and for the request's other prompts."""
    prefixes: Mapping[str, WorkerPrefix]
    """The part from which each server can resume, by its name; servers with nothing are left
    out."""
    certainty: Certainty
    reasons: tuple[str, ...] = ()
    """Why it is not exact: `Doubt` and `Reason`."""
    chains: Mapping[ChainNaming, PromptChain] = field(default_factory=dict)
    """The chain by each naming that servers of this fleet have."""
    kind: Kind = Kind.TEXT
    other_tokens: int = 0
    """Tokens of the request's other prompts, counted in `prompt_tokens`."""

    def with_doubts(self, doubts: Collection[str]) -> PromptView:
        """Return the view, made less certain by further reasons."""
        if not doubts:
            return self
        knows_anything = self.certainty is not Certainty.BLIND
        reasons = tuple(sorted({*self.reasons, *doubts}))
        sure = certainty(reasons, knows_anything=knows_anything)
        return replace(self, certainty=sure, reasons=reasons)


class _Engine(NamedTuple):
    server: str
    published: PublishedChain


class EngineGroup(NamedTuple):
    """Engines that name chains alike."""

    published: PublishedChain
    """The naming of all of them; without a worker and an instance."""
    members: list[tuple[str, str]]
    """Each one's server, and its name in the directory."""


class _Named(NamedTuple):
    """A prompt whose chains are named."""

    prompt: Prompt | None
    chains: dict[ChainNaming, PromptChain]
    groups: dict[ChainNaming, list[EngineGroup]]
    """The engines in a directory, by how they name it."""
    by_events: dict[str, WorkerPrefix]
    """The prefixes of servers that publish events."""
    doubts: set[str]


class _Found(NamedTuple):
    """The directory's answer about a prompt."""

    prefixes: dict[str, WorkerPrefix]
    """By server; those with nothing are left out."""
    workers: Collection[WorkerState] | None
    """All that it knows; None if it was not asked, because no chunk is full."""


class FleetChains:
    """The engines' published namings, by server. Used on one thread."""

    def __init__(self, silent_after_s: float = 30.0) -> None:
        """`silent_after_s`: a server that has not told for so long may have been reset."""
        self._silent_after_s = silent_after_s
        self._servers: dict[str, tuple[tuple[PublishedChain, ...], float]] = {}
        self._groups: list[EngineGroup] | None = None
        """None after a change, until they are asked for."""
        self.asleep = set[str]()
        """The servers that sleep."""

    def told(self, server: str, engines: Sequence[PublishedChain], now_s: float) -> None:
        """Replace what is known of a server; no engines: it did not tell."""
        before, _ = self._servers.get(server, ((), 0.0))
        if before != tuple(engines):
            self._groups = None
        self._servers[server] = tuple(engines), now_s

    def note_sleep(self, server: str, *, is_asleep: bool) -> None:
        """Remember if a server sleeps. One that has left is not remembered."""
        if is_asleep and server in self._servers:
            self.asleep.add(server)
        else:
            self.asleep.discard(server)

    def forget(self, server: str) -> None:
        """Drop a server that has left."""
        self._servers.pop(server, None)
        self._groups = None
        self.asleep.discard(server)

    @property
    def servers(self) -> set[str]:
        """The names of the servers that have told, or were asked in vain."""
        return set(self._servers)

    def instances(self, server: str) -> frozenset[str]:
        """Return what tells the server's running engines from those after a restart."""
        engines, _ = self._servers.get(server, ((), 0.0))
        return frozenset(x.instance for x in engines)

    def engines(self) -> list[_Engine]:
        """Return all engines of all servers."""
        return [_Engine(name, x) for name, (engines, _) in self._servers.items() for x in engines]

    def groups(self) -> list[EngineGroup]:
        """Return all engines of all servers, by how they name chains."""
        if self._groups is None:
            groups: list[EngineGroup] = []
            for server, published in self.engines():
                naming = replace(published, worker="", instance="")
                group = next((x for x in groups if x.published == naming), None)
                if group is None:
                    group = EngineGroup(naming, [])
                    groups.append(group)
                group.members.append((server, published.worker))
            self._groups = groups
        return self._groups

    def reasons(self, now_s: float, stock: Collection[str] = ()) -> set[Reason]:
        """Return what is wrong with the fleet as a whole. `stock`: servers known otherwise."""
        found = {Reason.SLEEPING} if self.asleep else set[Reason]()
        for name, (engines, told_s) in self._servers.items():
            if name in stock:
                continue
            if not engines or now_s - told_s > self._silent_after_s:
                found.add(Reason.SERVER_SILENT)
        published = [x.published for x in self.groups()]
        if not all(x.is_shared for x in published):
            found.add(Reason.RESET_ALONE)
        if len({(x.root, x.chunk_tokens) for x in published if x.is_shared}) > 1:
            found.add(Reason.MIXED)
        return found


class PrefixViews:
    """Finds out which servers have state of a request's prompts."""

    def __init__(
        self,
        identity: PromptIdentity,
        fleet: FleetChains,
        trust: Trust,
        directory: Directory | None,
        deadline_s: float = 0.25,
        stock: StockWorkers | None = None,
        naming_s: float = 2.0,
    ) -> None:
        """`directory`: None if the fleet has none. `deadline_s`: for its answer. `stock`: None if
        no KV events are read. `naming_s`: seconds in which a prompt is to be named.
        """
        self._naming_s = naming_s
        self.stock = stock or StockWorkers(lambda server: [])
        self.identity = identity
        self.fleet = fleet
        self.trust = trust
        self.unlisted = frozenset[str]()
        """The servers of which an engine was not live in the directory when it answered last."""
        self._live, self._listed_s = set[str](), -math.inf
        """The names of the live workers, and when the directory's answer was read for them."""
        self._directory = directory
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker()
        self._threads = ThreadPoolExecutor(_THREADS, "router-identity")
        self._lookups = ThreadPoolExecutor(_THREADS, "router-directory")

    @property
    def is_answered(self) -> bool:
        """False if the directory did not answer when asked last."""
        return not self._breaker.is_open

    async def find(self, path: str, body: object, now_s: float) -> PromptView:
        """Return the view of a request, by its longest prompt. Never raises for a client's body.

        The other prompts count as tokens that no server has.

        `body`: the decoded JSON. Tokens are made on another thread.
        """
        loop = asyncio.get_running_loop()
        groups = self.fleet.groups()
        until_s = time.monotonic() + self._naming_s
        naming = loop.run_in_executor(self._threads, self._name, path, body, groups, until_s)
        try:
            done, _ = await asyncio.wait([naming], timeout=self._naming_s)
        finally:
            naming.cancel()  # if it is late, or the client has left, and it has not begun
        if not done:
            return PromptView(0, {}, Certainty.BLIND, (Reason.PROMPT_LATE,))
        try:
            prompt, chains, named, by_events, doubts = naming.result()
        except TimeoutError:
            return PromptView(0, {}, Certainty.BLIND, (Reason.PROMPT_LATE,))
        except Exception:  # a bug: the request is served all the same
            _log.exception("a prompt could not be named")
            return PromptView(0, {}, Certainty.BLIND, (Reason.NO_PROMPT,))
        if prompt is None:
            return PromptView(0, {}, Certainty.BLIND, (Reason.NO_PROMPT,))
        stock = set(self.stock.servers)
        reasons: set[str] = {
            *doubts,
            *self.fleet.reasons(now_s, stock),
            *self.stock.reasons(now_s),
        }
        servers = {*stock, *(server for group in groups for server, _ in group.members)}
        kind = Kind.of(path, prompt)
        told = {self.trust.reason(x, kind) for x in servers}
        if prompt.tokens is None:
            reasons |= self._tokenizer_reasons(groups)
        else:  # the tokens are what they are
            told.discard(Reason.UNCHECKED)
        reasons |= {x for x in told if x is not None}
        if not groups and not stock:
            reasons.add(Reason.NO_CHAINS)
        num_tokens = max((x.num_tokens + prompt.unread for x in chains.values()), default=0)
        others = prompt.others if chains else 0
        own = {naming: chain for naming, chain in chains.items() if naming in named}
        found = await self._look_up(own, named) if own else None
        prefixes = {x: tokens for x, tokens in by_events.items() if x not in self.fleet.asleep}
        knows_anything = bool(stock)
        if isinstance(found, Reason):
            reasons.add(found)
        elif found is not None:
            prefixes |= found.prefixes
            if found.workers is None:
                knows_anything = True
            else:
                knows_anything |= self._note_listed(groups, found.workers, now_s)
                reasons |= {Reason.NOT_IN_DIRECTORY} if self.unlisted else set()
        sure = certainty(reasons, knows_anything=knows_anything)
        why = tuple(sorted(reasons))
        return PromptView(num_tokens + others, prefixes, sure, why, chains, kind, others)

    def _note_listed(
        self, groups: Sequence[EngineGroup], workers: Collection[WorkerState], now_s: float
    ) -> bool:
        """Find out which servers the directory lacks; return False if it lacks all engines."""
        members = {member for group in groups for member in group.members}
        is_lacking = any(name not in self._live for _, name in members)
        keep_s = _LACKING_S if is_lacking else _LIVE_S
        if now_s - self._listed_s >= keep_s:  # decoding all workers takes a while
            self._live = {x.name for x in workers if x.status is EpochStatus.LIVE}
            self._listed_s = now_s
        unlisted = {x for x in members if x[1] not in self._live}
        self.unlisted = frozenset(server for server, _ in unlisted)
        return unlisted != members

    def close(self) -> None:
        """End the threads; an answer of the directory that is late is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def _name(
        self, path: str, body: object, groups: Sequence[EngineGroup], until_s: float
    ) -> _Named:
        """Return the prompt, and its chains by each naming of the fleet. Raises TimeoutError."""
        found = self.identity.read(path, body)
        if not found:
            return _Named(None, {}, {}, {}, set())
        prompt = found[0]
        doubts, chains = set[str](prompt.doubts), dict[ChainNaming, PromptChain]()
        by_naming: dict[ChainNaming, list[EngineGroup]] = {}
        for group in groups:
            naming = group.published.naming(prompt)
            if naming is None:
                doubts.add(Reason.ADAPTER_UNKNOWN)
            else:
                by_naming.setdefault(naming, []).append(group)
        for naming in self.stock.namings(prompt) | by_naming.keys():
            named = self.identity.name(prompt, naming, until_s)
            doubts |= set(named.doubts)
            if named.chain is not None:
                chains[naming] = named.chain
        by_events = self.stock.prefixes(prompt, chains)
        return _Named(prompt, chains, by_naming, by_events, doubts)

    def _tokenizer_reasons(self, groups: Sequence[EngineGroup]) -> set[Reason]:
        tokenizer = self.identity.tokenizer
        own = tokenizer.digest if tokenizer is not None else b""
        differs = own and any(x.published.tokenizer != own for x in groups)
        return {Reason.TOKENIZER_DIFFERS} if differs else set()

    async def _look_up(
        self,
        chains: Mapping[ChainNaming, PromptChain],
        groups: Mapping[ChainNaming, Sequence[EngineGroup]],
    ) -> _Found | Reason:
        """Return each server's prefix, by one call for all chains; or why there is no answer."""
        directory = self._directory
        if directory is None:
            return Reason.NO_DIRECTORY
        keys = [key for chain in chains.values() for key in chain.keys]
        if not keys:
            return _Found({}, None)
        if self._breaker.admit():
            return Reason.DIRECTORY_LATE
        began_s = time.monotonic()

        def ask() -> _Found:
            view = directory.lookup(keys)
            return _Found(_prefixes(view, chains, groups), view.workers.values())

        asked = self._lookups.submit(ask)
        asked.add_done_callback(partial(self._on_answer, began_s=began_s))
        answer = asyncio.wrap_future(asked)
        try:
            done, _ = await asyncio.wait([answer], timeout=self._deadline_s)
        finally:
            answer.cancel()  # if it is late, or the client has left: else asyncio logs its error
        if not done:
            self._breaker.on_failure(began_s)
            return Reason.DIRECTORY_LATE
        try:
            return answer.result()
        except DirectoryError:
            return Reason.DIRECTORY_FAILED

    def _on_answer(self, answer: Future[_Found], began_s: float) -> None:
        """Open or close the circuit. Called on the thread that asked."""
        if answer.cancelled():
            return
        if answer.exception() is not None:
            self._breaker.on_failure(began_s)
        elif time.monotonic() <= began_s + self._deadline_s:
            self._breaker.on_success()


def _prefixes(
    view: ChainView,
    chains: Mapping[ChainNaming, PromptChain],
    groups: Mapping[ChainNaming, Sequence[EngineGroup]],
) -> dict[str, WorkerPrefix]:
    """Return the longest prefix of any engine of each server."""
    found: dict[str, WorkerPrefix] = {}
    start = 0
    for naming, chain in chains.items():
        part = view
        if len(chains) > 1:
            chunks = view.chunks[start : start + len(chain.keys)]
            part = ChainView(chunks, view.workers, view.now_s)
        start += len(chain.keys)
        for published, members in groups[naming]:
            by_worker = worker_prefixes(part, published.model, chain.ends)
            for server, worker in members:
                prefix = by_worker.get(worker)
                if prefix is not None:
                    before = found.get(server, WorkerPrefix())
                    found[server] = max(before, prefix, key=lambda x: x.local_tokens)
    return found
