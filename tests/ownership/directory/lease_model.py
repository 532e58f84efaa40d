"""The lease protocol as a small model: every step that a fleet can take.

Workers, their calls, messages that arrive after the caller has given up, the directory and one
reader. `Rules` holds every rule that safety rests on; `lease_explorer` visits all states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

TIMED = ("register", "renew")
"""Calls whose time of sending matters."""
NONE = 0
STALE = -1
HELD = -2


@dataclass(frozen=True)
class Rules:
    """The protocol's rules. With all of them on it is the real protocol."""

    ended_stays_ended: bool = True
    """A renewal after the lease's end is refused."""
    retired_keeps_its_lease: bool = True
    """Artifacts of an epoch that was retired are free only when its lease has ended."""
    release_names_the_token: bool = True
    """A release with another token than the record's does nothing."""
    stale_claims_are_refused: bool = True
    """Only a live epoch may claim."""
    tokens_outlive_records: bool = True
    """A forgotten record's tokens are not handed out again."""
    counts_from_asking: bool = True
    """A worker's lease counts from its request, not from the answer."""
    waits_for_release: bool = True
    """A release that was not answered is repeated before claiming again."""
    reader_has_fence: bool = True
    """A reader refuses a smaller token than it has seen."""
    steady_clock: bool = True
    """The directory's clock does not jump ahead."""


@dataclass(frozen=True)
class Bounds:
    """The size of the explored fleet."""

    workers: int = 2
    artifacts: int = 1
    lease_ticks: int = 1
    epochs: int = 1
    """Unended epochs of one worker: it registers again only when there are fewer."""
    late: int = 0
    """Messages that are under way at one time and that no worker waits for."""
    reader: bool = False
    renews: bool = True


class Call(NamedTuple):
    """A call that a worker waits for, or no longer waits for."""

    worker: int
    kind: str
    epoch: int
    artifact: int = 0
    token: int = NONE
    left: int = 0
    """Ticks of a lease that are left, counted from when it was sent."""
    reply: int | None = None
    """None until the directory has acted on it: a token, an epoch, 0, HELD or STALE."""


class Believer(NamedTuple):
    """A worker's beliefs."""

    epoch: int
    left: int
    """Ticks of its lease that are left, by its own count: at none it no longer acts."""
    owned: tuple[int, ...]
    """Its token of each artifact; `NONE`: not its own."""
    releasing: tuple[int, ...]
    """Tokens whose release has not been answered."""
    call: Call | None

    @property
    def acts(self) -> bool:
        return self.epoch != NONE and self.left > 0


class Registered(NamedTuple):
    epoch: int
    worker: int
    ticks_left: int
    retired: bool


class State(NamedTuple):
    workers: tuple[Believer, ...]
    late: tuple[Call, ...]
    """Messages that no worker waits for. They arrive at some time or never."""
    registered: tuple[Registered, ...]
    owners: tuple[tuple[int, int], ...]
    """(epoch, token) of each artifact's record; (NONE, NONE): no record."""
    answer: tuple[int, int]
    """(epoch, token) that a lookup of artifact 0 returned and the reader has not used yet."""
    seen: int
    """The greatest token that the reader has accepted or seen."""


class ViolationError(Exception):
    """A forbidden state, and the steps that led to it."""


class Model:
    """Returns all steps from a state under the given rules."""

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self.rules = rules
        self.bounds = bounds
        none = (NONE,) * bounds.artifacts
        idle = Believer(NONE, 0, none, none, None)
        records = ((NONE, NONE),) * bounds.artifacts
        self.start = State((idle,) * bounds.workers, (), (), records, (NONE, NONE), NONE)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield "tick", self._tick(state)
        for index, worker in enumerate(state.workers):
            if worker.call is None:
                yield from self._calls(state, index, worker)
            else:
                yield from self._goes_on(state, index, worker, worker.call)
            if worker.epoch != NONE or worker.call is not None:
                yield from self._give_up(state, index, "crashes", self._forgotten())
        for call in state.late:
            left = list(state.late)
            left.remove(call)
            after, _ = self._act(state._replace(late=tuple(left)), call)
            yield f"late {call.kind} of worker {call.worker} arrives", after
        if not self.rules.steady_clock and state.registered:
            yield "the directory's clock jumps ahead", state._replace(registered=())
        if self.bounds.reader:
            yield from self._read(state)

    def _forgotten(self) -> Believer:
        return self.start.workers[0]

    def _tick(self, state: State) -> State:
        def older(call: Call) -> Call:
            return call._replace(left=max(0, call.left - 1))

        workers = tuple(
            w._replace(left=max(0, w.left - 1), call=w.call and older(w.call))
            for w in state.workers
        )
        registered = tuple(
            r._replace(ticks_left=r.ticks_left - 1) for r in state.registered if r.ticks_left > 1
        )
        return state._replace(workers=workers, registered=registered)

    def _calls(self, state: State, index: int, worker: Believer) -> Iterator[tuple[str, State]]:
        def calling(kind: str, after: Believer, artifact: int = 0, token: int = NONE) -> State:
            left = self.bounds.lease_ticks if kind in TIMED else 0
            call = Call(index, kind, after.epoch, artifact, token, left)
            return self._with(state, index, after._replace(call=call))

        epochs = sum(r.worker == index for r in state.registered)
        if not worker.acts and epochs < self.bounds.epochs:
            yield f"{index} registers", calling("register", self._forgotten())
        if worker.epoch == NONE:
            return
        if self.bounds.renews:
            yield f"{index} renews", calling("renew", worker)
        for artifact in range(self.bounds.artifacts):
            owned, releasing = worker.owned[artifact], worker.releasing[artifact]
            if owned != NONE or releasing != NONE:
                token = owned or releasing
                after = worker._replace(
                    owned=_set(worker.owned, artifact, NONE),
                    releasing=_set(worker.releasing, artifact, token),
                )
                yield f"{index} releases {artifact}", calling("release", after, artifact, token)
            if owned == NONE and not (releasing and self.rules.waits_for_release):
                yield f"{index} claims {artifact}", calling("claim", worker, artifact)

    def _goes_on(
        self, state: State, index: int, worker: Believer, call: Call
    ) -> Iterator[tuple[str, State]]:
        if call.reply is None:
            after, reply = self._act(state, call)
            answered = call._replace(reply=reply)
            waiting = worker._replace(call=answered)
            if call.kind == "release":  # when it is answered makes no difference
                waiting = self._told(worker._replace(call=None), answered)
            yield f"{call.kind} of {index} arrives", self._with(after, index, waiting)
            if call.kind == "release":
                lost = worker._replace(call=None)
                yield f"release of {index} arrives, unanswered", self._with(after, index, lost)
        else:
            told = self._told(worker._replace(call=None), call)
            yield f"{index} is told {call.reply}", self._with(state, index, told)
        yield from self._give_up(state, index, "times out", worker._replace(call=None))

    def _give_up(
        self, state: State, index: int, how: str, after: Believer
    ) -> Iterator[tuple[str, State]]:
        call = state.workers[index].call
        gone = self._with(state, index, after)
        yield f"{index} {how}", gone
        if call is not None and call.reply is None and len(state.late) < self.bounds.late:
            late = tuple(sorted([*state.late, call._replace(left=0)]))
            yield f"{index} {how}, its {call.kind} is on its way", gone._replace(late=late)

    def _told(self, worker: Believer, call: Call) -> Believer:
        """Return a worker's beliefs after the answer to its latest call."""
        reply = call.reply
        assert reply is not None
        none = (NONE,) * self.bounds.artifacts
        left = call.left if self.rules.counts_from_asking else self.bounds.lease_ticks
        if call.kind == "register":
            return Believer(reply, left, none, none, None)
        if reply == STALE:
            return self._forgotten()
        if call.kind == "renew":
            return worker._replace(left=max(left, worker.left))
        if call.kind == "release":
            return worker._replace(releasing=_set(worker.releasing, call.artifact, NONE))
        if reply == HELD:
            return worker
        return worker._replace(
            owned=_set(worker.owned, call.artifact, reply),
            releasing=_set(worker.releasing, call.artifact, NONE),
        )

    def _act(self, state: State, call: Call) -> tuple[State, int]:
        """Return the state after the directory has acted on a call, and its answer."""
        if call.kind == "register":
            return self._register(state, call.worker)
        found = next((r for r in state.registered if r.epoch == call.epoch), None)
        is_live = found is not None and not found.retired
        if call.kind == "renew":
            if found is None and not self.rules.ended_stays_ended:
                found = Registered(call.epoch, call.worker, self.bounds.lease_ticks, False)
                return state._replace(registered=(*state.registered, found)), 0
            if not is_live:
                return state, STALE
            renewed = tuple(
                r._replace(ticks_left=self.bounds.lease_ticks) if r is found else r
                for r in state.registered
            )
            return state._replace(registered=renewed), 0
        if not is_live and (call.kind == "release" or self.rules.stale_claims_are_refused):
            return state, STALE
        after, reply = self._change_owner(state, call)
        if not is_live and after != state:
            raise ViolationError(f"a stale epoch changed something by {call.kind}")
        return after, reply

    def _register(self, state: State, worker: int) -> tuple[State, int]:
        epoch = self._next(state)
        kept = tuple(
            r._replace(retired=True) if r.worker == worker else r
            for r in state.registered
            if r.worker != worker or self.rules.retired_keeps_its_lease
        )
        new = Registered(epoch, worker, self.bounds.lease_ticks, False)
        return state._replace(registered=(*kept, new)), epoch

    def _change_owner(self, state: State, call: Call) -> tuple[State, int]:
        owner, token = state.owners[call.artifact]
        if call.kind == "release":
            if owner == call.epoch and (
                token == call.token or not self.rules.release_names_the_token
            ):
                owners = _set(state.owners, call.artifact, (NONE, NONE))
                return state._replace(owners=owners), 0
            return state, 0
        if owner == call.epoch:
            return state, token
        if owner != NONE and any(r.epoch == owner for r in state.registered):
            return state, HELD
        # Otherwise the next after the record's: a forgotten record begins below all others.
        new = self._next(state) if self.rules.tokens_outlive_records else token + 0.5
        owners = _set(state.owners, call.artifact, (call.epoch, new))
        return state._replace(owners=owners), new

    def _read(self, state: State) -> Iterator[tuple[str, State]]:
        epoch, token = state.owners[0]
        if any(r.epoch == epoch and not r.retired for r in state.registered):
            yield "the reader asks", state._replace(answer=(epoch, token))
            if token > state.seen:
                yield "the reader hears of the owner", state._replace(seen=token)
        told = state.answer[1]
        if told == NONE:
            return
        if self.rules.reader_has_fence and told < state.seen:
            if state.answer == state.owners[0]:
                raise ViolationError("a reader refused the present owner")
            return
        if told < state.seen:
            raise ViolationError("a reader used a copy of an owner whose successor it had seen")
        yield "the reader uses the answer", state._replace(seen=told, answer=(0, 0))

    def _next(self, state: State) -> int:
        """Return a greater number than any in the state."""
        return 1 + max(numbers_of(state), default=0)

    @staticmethod
    def _with(state: State, index: int, worker: Believer) -> State:
        return state._replace(workers=_set(state.workers, index, worker))

    def check(self, state: State) -> None:
        """Raise ViolationError if two workers act as owners of one artifact."""
        for artifact in range(self.bounds.artifacts):
            acting = [w for w in state.workers if w.acts and w.owned[artifact] != NONE]
            if len(acting) > 1:
                raise ViolationError(f"two workers act as owners of artifact {artifact}")


def _set(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def numbers_of(state: State) -> set[int]:
    calls = [*state.late, *(w.call for w in state.workers if w.call is not None)]
    numbers = {state.seen, *state.answer}
    for worker in state.workers:
        numbers |= {worker.epoch, *worker.owned, *worker.releasing}
    for call in calls:
        numbers |= {call.epoch, call.token, call.reply or NONE}
    numbers |= {r.epoch for r in state.registered}
    numbers |= {n for pair in state.owners for n in pair}
    return {n for n in numbers if n > NONE}
