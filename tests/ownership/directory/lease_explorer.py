"""An explorer that visits every state of the lease model.

Time in the model is relative and sequence numbers are kept by rank: so the states are finite
and the search ends by itself, with nothing cut off but what `Bounds` says.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from tests.ownership.directory.lease_model import (
    HELD,
    NONE,
    STALE,
    Believer,
    Call,
    Model,
    Rules,
    State,
    ViolationError,
    numbers_of,
)


def explore(model: Model, max_states: int) -> int:
    """Visit every reachable state, nearest first; return their number.

    Raises ViolationError with the shortest way to it (workers of a way may change places), and
    ValueError if there are over `max_states`.
    """
    came_from: dict[State, tuple[State, str] | None] = {model.start: None}
    waiting = deque([model.start])
    while waiting:
        state = waiting.popleft()
        try:
            model.check(state)
            found = [(label, plain(after, model.rules)) for label, after in model.steps(state)]
        except ViolationError as violation:
            way = " → ".join(_way_to(state, came_from))
            raise ViolationError(f"{violation}: {way}") from None
        for label, after in found:
            if after not in came_from:
                came_from[after] = (state, label)
                waiting.append(after)
        if len(came_from) > max_states:
            raise ValueError(f"more than {max_states} states")
    return len(came_from)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    labels = []
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]


@lru_cache(maxsize=1 << 16)  # two of three successors are one that was found a little earlier
def plain(state: State, rules: Rules) -> State:
    """Return one state for all states that continue in the same way."""
    needed = ("ended_stays_ended", "stale_claims_are_refused", "counts_from_asking")
    if all(getattr(rules, name) for name in needed):
        state = without_the_dead(state)
    return ordered(ranked(state))


def without_the_dead(state: State) -> State:
    """Return the state without the remains of an ended epoch that cannot matter.

    Nothing that names an ended epoch does anything at the directory, and its worker, once it
    does not act, can only be told so. While the worker still acts all of it stays.
    """
    alive = {r.epoch for r in state.registered}
    none = (NONE,) * len(state.owners)
    forgotten = Believer(NONE, 0, none, none, None)

    def buried(worker: Believer) -> Believer:
        call = worker.call
        if call is not None and call.kind == "register":
            known = call.reply is None or call.reply in alive or call.left > 0
            return worker if known else forgotten
        if worker.epoch not in alive and not worker.acts:
            return forgotten
        if call is not None and call.epoch not in alive:
            return worker._replace(call=Call(call.worker, "renew", call.epoch, reply=STALE))
        return worker

    return state._replace(
        workers=tuple(map(buried, state.workers)),
        late=tuple(c for c in state.late if c.kind == "register" or c.epoch in alive),
        owners=tuple(o if o[0] in alive else (NONE, NONE) for o in state.owners),
    )


def ordered(state: State) -> State:
    """Return the state with its workers, which are interchangeable, in a canonical order."""

    def beliefs(index: int) -> tuple[object, ...]:
        worker = state.workers[index]
        call = worker.call
        pending = () if call is None else (*call[1:-1], -3 if call.reply is None else call.reply)
        return (*worker[:-1], pending)

    order = sorted(range(len(state.workers)), key=beliefs)
    if order == list(range(len(order))):
        return state
    place = {old: new for new, old in enumerate(order)}

    def moved(worker: Believer) -> Believer:
        call = worker.call
        return worker._replace(call=call and call._replace(worker=place[call.worker]))

    return state._replace(
        workers=tuple(moved(state.workers[old]) for old in order),
        late=tuple(sorted(c._replace(worker=place[c.worker]) for c in state.late)),
        registered=tuple(r._replace(worker=place[r.worker]) for r in state.registered),
    )


def ranked(state: State) -> State:
    """Return the state with its sequence numbers replaced by their ranks."""
    numbers = sorted(numbers_of(state))
    if not numbers or numbers[-1] == len(numbers):
        return state
    rank = {n: i for i, n in enumerate(numbers, 1)} | {NONE: NONE, STALE: STALE, HELD: HELD}

    def call(c: Call) -> Call:
        reply = None if c.reply is None else rank[c.reply]
        return c._replace(epoch=rank[c.epoch], token=rank[c.token], reply=reply)

    return State(
        tuple(
            Believer(
                rank[w.epoch],
                w.left,
                tuple(rank[n] for n in w.owned),
                tuple(rank[n] for n in w.releasing),
                w.call and call(w.call),
            )
            for w in state.workers
        ),
        tuple(map(call, state.late)),
        tuple(r._replace(epoch=rank[r.epoch]) for r in state.registered),
        tuple((rank[e], rank[t]) for e, t in state.owners),
        (rank[state.answer[0]], rank[state.answer[1]]),
        rank[state.seen],
    )
