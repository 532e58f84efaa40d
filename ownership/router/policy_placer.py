"""Places requests by a scheduling policy: by who has a prompt's state, and what is under way.

The view says how much of the prompt each worker has, the ledger how busy each is; the policy
compares. One worker may compute the prompt and another decode. When the view is not exact, the
placer counts on what the ledger knows: where a session was served last, and how much of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hetero_connector.session_ids import SESSION_HEADERS, session_of
from ownership.decisions.records import DecisionRecord
from ownership.router.answer import answer_id
from ownership.router.decision_log import DecisionLog
from ownership.router.doors import Refusal
from ownership.router.figures import WorkerFigures
from ownership.router.handoffs import can_hand_off, decode_body, prefill_body
from ownership.router.identity import PromptChain
from ownership.router.peers import Peers
from ownership.router.placer import Candidates, Forecast, LeastLoaded, Placed, Prefill
from ownership.router.reports import LoadReport
from ownership.router.requests import RouterRequest
from ownership.router.shared_ledger import SharedLedger
from ownership.router.view import Certainty, PrefixViews, PromptView, PublishedChain
from ownership.router.workers import Worker
from ownership.scheduling import (
    Ledger,
    LedgerLimits,
    Placement,
    PlacementAction,
    PlacementDecision,
    PlacementTerms,
    SchedulingPolicy,
    Step,
    Work,
    WorkerPrefix,
)
from ownership.scheduling.decision import whole
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import without_remote_prefills

OnAnswer = Callable[[str, str, PromptView, str], None]
"""Gets the worker, the path, what was known of the prompt, and the answer's id."""
PLACED = frozenset({"chat", "completions", "responses", "messages"})
"""The doors whose requests have a prompt. Others go to the worker with the fewest requests."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields that limit the tokens of an answer."""
_SESSION_HEADERS = [(name, name.encode()) for name in SESSION_HEADERS]
_BYTES_PER_TOKEN = 4
"""A guess, for a body whose tokens are not known."""
_MEDIA = (b";base64,", b'"data":"', b'"data": "')
"""The begins of media in a body, up to the next quote. To look for them costs less than a parse."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Planned(Placed):
    """A request that the policy has placed."""

    step: Step
    placement: Placement
    view: PromptView
    decision: PlacementDecision | None
    """None once it is sent: it keeps the view of the whole fleet."""
    terms: PlacementTerms
    """The price that was predicted for it."""
    record: DecisionRecord | None = None
    """The line for the decision log; None without one."""
    decoded: Mapping[str, Any] | None = None
    """The client's body until the prefill has ended; None without one."""
    sent_s: float = 0.0
    first_byte_s: float | None = None
    first_token: asyncio.TimerHandle | None = None
    """For an answer that is not streamed: its first token, at the time that was predicted."""

    def forecast(self) -> Forecast | None:
        decision = self.decision
        if decision is None:
            return None
        route, prompt_tokens = decision.route_of(self.placement), self.step.prompt_tokens
        return Forecast(
            prompt_tokens,
            min(prompt_tokens, decision.pricing.resume_tokens(route)),
            self.step.prefixes,
            self.terms.ttft_s,
            self.terms._asdict(),
        )

    def work(self) -> Work:
        """Return the work that it is where it is placed."""
        work = Work.of(self.step, self.placement)
        return work._replace(other_tokens=self.view.other_tokens)

    def move(self, worker: Worker) -> None:
        self.worker, self.prefill = worker, None
        self.placement = Placement(PlacementAction.COLOCATED_PREFILL, worker.name, worker.name)
        self.action = self.placement.action


class PolicyPlacer:
    """A `Placer`. Used on the event loop."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        views: PrefixViews,
        figures: WorkerFigures,
        log: DecisionLog | None = None,
        peers: Peers | None = None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """`log`: None if decisions are not written. `peers`: None if no other router is heard.
        `on_answer`: called when an answer has ended; None if answers are not compared.
        """
        self._policy, self._views, self._figures, self._log = policy, views, figures, log
        self._peers, self._on_answer = peers, on_answer
        self._whole_policy = without_remote_prefills(policy)
        self._limits = LedgerLimits()
        self._ledger: Ledger | None = None
        """None until there is a worker."""
        self._roles: dict[str, Role] = {}
        """The role of each worker."""
        self._accepting = frozenset[str]()
        """The workers that the ledger takes to accept requests: the candidates of the last one."""
        self._candidates: Sequence[Worker] = ()
        """The candidates of the last request; empty if the workers have changed since."""
        self._by_name: dict[str, Worker] = {}
        """These, by name."""
        self._groups: Mapping[str, int] = {}
        """Workers with the same number name chains alike and share them, so they can read each
        other's state. Those that have not told how, or share nothing, have no number."""
        self._is_one_group = False
        """True if all workers are of one group."""
        self._others = LeastLoaded()

    @property
    def ledger(self) -> Ledger | None:
        return self._ledger

    def set_workers(self, roles: Mapping[str, Role], now_s: float) -> None:
        """Make these the workers, with the figures and the model that they have told by now."""
        if not roles:
            return
        self._roles = dict(roles)
        engines = self._views.fleet.engines()
        self._groups = _groups(engines)
        is_one = len({*self._groups.values()}) == 1 and self._roles.keys() <= self._groups.keys()
        self._is_one_group = len(self._roles) > 1 and is_one
        fleet = self._figures.fleet(self._roles, [x.published for x in engines])
        if self._ledger is None:
            make = Ledger if self._peers is None else self._peers.open_ledger
            self._ledger = make(fleet, self._limits)
        else:
            self._ledger.set_fleet(fleet, now_s)
        self._accepting, self._candidates = frozenset(self._roles), ()
        for name in self._roles:
            self._ledger.accepts(name, True)

    def on_report(self, report: LoadReport) -> None:
        """A worker has told its load. The requests of this router are known better."""
        ledger, name = self._ledger, report.worker
        self._views.fleet.note_sleep(name, is_asleep=report.is_asleep)
        if ledger is None or name not in ledger.workers:
            return
        changed_s, age_s = ledger.changed_s(name), ledger.report_age_s(name, report.told_s)
        if changed_s >= report.asked_s and age_s < 0.5 * self._limits.trust_s:
            return  # it cannot be told which of its requests are others'
        load = report.load._replace(accepting=name in self._accepting)
        ledger.reported(name, load, report.told_s)

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        if request.door.name not in PLACED:
            return await self._others.place(request, candidates)
        body = _decoded(request.body)
        path = request.target.partition("?")[0]
        view = await self._views.find(path, body, time.monotonic())
        return self._decide(request, body, view, candidates(), time.monotonic())

    def on_sent(self, placed: Placed, now_s: float) -> None:
        if isinstance(placed, _Planned) and self._ledger is not None:
            placed.sent_s, placed.decision = now_s, None
            self._ledger.sent(placed, placed.work(), now_s)
            if placed.prefill is None:
                self._expect_first_token(placed, self._ledger)

    def on_prefilled(self, placed: Placed, answer: bytes, problem: str, now_s: float) -> None:
        if not isinstance(placed, _Planned) or self._ledger is None or placed.decoded is None:
            return
        was_computed = not problem
        if was_computed:
            try:
                placed.body = decode_body(placed.decoded, answer)
            except ValueError as error:
                problem = str(error)
        placed.decoded = None
        since_s = 0.0
        if problem:  # the worker that decodes computes the prompt, from what it has of it
            self._ledger.failed(placed, now_s, was_computed=was_computed)
            placed.placement = whole(placed.placement)
            placed.action = placed.placement.action
            # One that has left the fleet only ends what it has begun, and counts no more.
            if placed.placement.prefill_worker in self._ledger.workers:
                self._ledger.sent(placed, placed.work(), now_s)
        else:
            self._ledger.handed_off(placed, now_s)
            since_s = now_s - placed.sent_s
            if placed.prefill is not None:
                self._compare(placed, placed.prefill.worker, answer_id(answer))
        self._expect_first_token(placed, self._ledger, since_s)
        if placed.record is not None:
            placed.record.prefill_s = now_s - placed.sent_s
            placed.record.prefill_problem = problem or None

    def on_first_byte(self, placed: Placed, now_s: float) -> None:
        if isinstance(placed, _Planned) and self._ledger is not None:
            placed.first_byte_s = now_s
            self._ledger.first_token(placed, now_s)

    def on_ended(self, placed: Placed, num_events: int, now_s: float) -> None:
        if not isinstance(placed, _Planned) or self._ledger is None:
            return
        _stop_expecting(placed)
        is_stream = placed.request.is_stream  # else its tokens are not known
        if placed.first_byte_s is None:  # a first token that was only predicted tells nothing
            self._ledger.failed(placed, now_s)
        else:
            self._ledger.ended(placed, num_events if is_stream else 0, now_s)
        self._compare(placed, placed.worker, placed.answer_id)
        self._write(placed, now_s, num_events if is_stream else None)

    def on_failed(self, placed: Placed, now_s: float) -> None:
        if isinstance(placed, _Planned) and self._ledger is not None:
            _stop_expecting(placed)
            self._ledger.failed(placed, now_s)
            self._write(placed, now_s, None, has_failed=True)

    def _expect_first_token(self, placed: _Planned, ledger: Ledger, since_s: float = 0.0) -> None:
        """Count an answer that is not streamed as begun when that is predicted.

        Its first byte comes at its end, so the prompt would count as queued for all of the decode.
        `since_s`: the seconds of the prediction that are over.
        """
        ttft_s = placed.predicted_ttft_s
        if not placed.request.is_stream and ttft_s is not None and math.isfinite(ttft_s):
            placed.first_token = asyncio.get_running_loop().call_later(
                max(0.0, ttft_s - since_s), lambda: ledger.first_token(placed, time.monotonic())
            )

    def _decide(
        self,
        request: RouterRequest,
        body: object,
        view: PromptView,
        candidates: Sequence[Worker],
        now_s: float,
    ) -> Placed:
        """Choose a worker. Nothing here waits, so the ledger is as `on_sent` will find it."""
        if candidates != self._candidates:  # seldom, and a comparison costs less than names
            self._set_candidates(candidates, now_s)
        ledger, by_name = self._ledger, self._by_name
        assert ledger is not None  # there is a candidate
        session_id = _session_id(request, body)
        groups = self._present_groups()
        view, step = self._step(request, body, session_id, view, ledger, groups)
        if isinstance(ledger, SharedLedger):
            view = view.with_doubts(ledger.doubts(now_s))
        is_whole = request.is_whole or not self._can_share(groups) or not can_hand_off(body)
        policy = self._whole_policy if is_whole else self._policy
        fleet = ledger.view(now_s)
        fleet.groups = groups
        decision = policy.decide(step, fleet)
        placement = whole(decision.placement) if is_whole else decision.placement
        if decision.refusal is not None:  # it fits no worker: one of them says so, in its own words
            least = min(candidates, key=lambda worker: worker.in_flight).name
            placement = Placement(PlacementAction.COLOCATED_PREFILL, least, least)
        record = None
        if self._log is not None:
            record = self._record(request, view, decision, placement)
            record.handoffs = not is_whole
            self._log.note_fleet(fleet, record)
        prefill, decoded = None, None
        if placement.prefill_worker != placement.decode_worker:
            assert isinstance(body, Mapping)  # or it could not be handed off
            decoded = body
            at = by_name[placement.prefill_worker]
            prefill = Prefill(at, prefill_body(request.door.name, body))
        terms = decision.terms_of(placement)
        return _Planned(
            request,
            by_name[placement.decode_worker],
            prefill,
            certainty=view.certainty,
            reasons=view.reasons,
            action=placement.action,
            predicted_ttft_s=terms.ttft_s,
            prompt_tokens=sum(chain.num_tokens for chain in view.chains.values()),
            tokenized=sum(chain.tokenized for chain in view.chains.values()),
            session_id=session_id,
            step=step,
            placement=placement,
            decision=decision,
            terms=terms,
            record=record,
            view=view,
            decoded=decoded,
        )

    def _set_candidates(self, candidates: Sequence[Worker], now_s: float) -> None:
        """Make these the workers that accept requests."""
        by_name = {worker.name: worker for worker in candidates}
        if self._ledger is None or not by_name.keys() <= self._roles.keys():
            roles = self._roles | {name: x.address.role for name, x in by_name.items()}
            self.set_workers(roles, now_s)
        assert self._ledger is not None  # there is a candidate
        for name in self._accepting ^ by_name.keys():
            self._ledger.accepts(name, name in by_name)
        self._accepting = frozenset(by_name)
        self._candidates, self._by_name = list(candidates), by_name

    def _present_groups(self) -> Mapping[str, int] | None:
        """Return `FleetView.groups`. Workers that the directory lacks are of no group, and none is
        while it is silent."""
        if not self._views.is_answered:
            return {}
        if gone := self._views.unlisted:
            return {x: n for x, n in self._groups.items() if x not in gone}
        return None if self._is_one_group else self._groups

    def _can_share(self, groups: Mapping[str, int] | None) -> bool:
        """Return True if all candidates read each other's state: prompts are handed off only among
        these, so no other worker matters. `groups`: `FleetView.groups`."""
        if groups is None:
            return True
        found = {groups.get(name) for name in self._by_name}
        return len(found) == 1 and None not in found

    def _step(
        self,
        request: RouterRequest,
        body: object,
        session_id: str,
        view: PromptView,
        ledger: Ledger,
        groups: Mapping[str, int] | None,
    ) -> tuple[PromptView, Step]:
        """Return the request as a step.

        A view that is not exact gets what the session's last turn has left, if that is more: in
        DRAM if others can read it there (by `FleetView.groups`), else in the engine's pages.
        """
        last = ledger.sessions.last_turn(session_id)
        prompt_tokens = view.prompt_tokens or _guessed_tokens(request.body)
        boundary = 0 if last is None else min(last.tokens, prompt_tokens)
        if (
            view.certainty is not Certainty.EXACT
            and last is not None
            and last.worker in self._roles
        ):
            known = view.prefixes.get(last.worker, WorkerPrefix())
            if known.local_tokens < boundary:
                left = WorkerPrefix(boundary, known.dram_tokens, boundary)
                if groups is None or last.worker in groups:
                    left = WorkerPrefix(known.hbm_tokens, boundary, boundary)
                prefixes = {**view.prefixes, last.worker: left}
                view = replace(view, prefixes=prefixes, certainty=Certainty.DEGRADED)
        owner = ledger.sessions.owner(session_id)
        forked = ledger.sessions.has_sibling(session_id, boundary)
        output_tokens = min(ledger.output_tokens, _most_output_tokens(body))
        step = Step(
            prompt_tokens, view.prefixes, session_id, owner, boundary, output_tokens, forked=forked
        )
        return view, step

    def _record(
        self,
        request: RouterRequest,
        view: PromptView,
        decision: PlacementDecision,
        placement: Placement,
    ) -> DecisionRecord:
        """Return what is known of a decision when it is made, but for the fleet's figures."""
        record = DecisionRecord.of(
            decision, placement, self._policy.name, request.door.name, time.time()
        )
        record.model, record.certainty, record.reasons = request.model, view.certainty, view.reasons
        record.costs = self._figures.costs_of(placement.decode_worker)
        return record

    def _compare(self, placed: _Planned, worker: Worker, answer_id: str) -> None:
        """Have the router's chain of a prompt compared with what the worker reports of it."""
        if self._on_answer is not None and answer_id:
            path = placed.request.target.partition("?")[0]
            self._on_answer(worker.name, path, placed.view, answer_id)

    def _write(
        self, placed: _Planned, now_s: float, events: int | None, *, has_failed: bool = False
    ) -> None:
        record = placed.record
        if self._log is None or record is None:
            return
        if placed.first_byte_s is not None:
            record.first_byte_s = placed.first_byte_s - placed.sent_s
        record.total_s = now_s - placed.sent_s
        record.events, record.failed = events, has_failed
        self._log.write(record, _longest(placed.view))


def _groups(engines: Iterable[tuple[str, PublishedChain]]) -> Mapping[str, int]:
    """Return a number for each server by how its engines, all alike, name what they share."""
    found = dict[str, set[tuple[bytes, int] | None]]()
    for server, x in engines:
        is_shared = x.is_shared and x.worker
        found.setdefault(server, set()).add((x.root, x.chunk_tokens) if is_shared else None)
    numbers = dict[tuple[bytes, int] | None, int]()
    return {
        server: numbers.setdefault(naming, len(numbers))
        for server, (naming, *others) in found.items()
        if naming is not None and not others
    }


def _stop_expecting(placed: _Planned) -> None:
    if placed.first_token is not None:
        placed.first_token.cancel()


def _decoded(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # the worker says what is wrong


def _session_id(request: RouterRequest, body: object) -> str:
    """Return a digest of the session that the request names, apart from other clients' ones."""
    values = dict(request.headers)
    headers = {x: values[raw].decode("latin-1") for x, raw in _SESSION_HEADERS if raw in values}
    given = session_of(headers, body if isinstance(body, Mapping) else {})
    if not given:
        return ""
    name = f"{request.caller}/{given}"
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()


def _most_output_tokens(body: object) -> float:
    """Return the tokens to which the request limits its answer; infinite if it does not."""
    limits = [body.get(name) for name in _LIMITS] if isinstance(body, Mapping) else []
    return min((x for x in limits if isinstance(x, int) and x > 0), default=math.inf)


def _longest(view: PromptView) -> PromptChain | None:
    return max(view.chains.values(), key=lambda chain: chain.num_tokens, default=None)


def _guessed_tokens(body: bytes) -> int:
    """Guess the tokens of a body's text. Media count as nothing."""
    num_bytes = len(body)
    for marker in _MEDIA:
        at = body.find(marker)
        while at >= 0:
            start = at + len(marker)
            end = body.find(b'"', start)
            if end < 0:
                break
            if not body.startswith(b"data:", start):  # else it has a `;base64,` of its own
                num_bytes -= end - start
            at = body.find(marker, end)
    return max(1, num_bytes // _BYTES_PER_TOKEN)
