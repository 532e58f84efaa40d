"""The code behaves as the model that was explored: both give the same answers on random walks."""

import random

import pytest

from hetero_connector.errors import StaleEpochError
from ownership.directory import NO_EPOCH, NO_TOKEN, Epoch, GrantOutcome, Token, Worker
from ownership.directory.memory import MemoryDirectory
from tests.ownership.directory.lease_model import (
    HELD,
    NONE,
    STALE,
    Bounds,
    Call,
    Model,
    Rules,
    State,
)
from tests.ownership.fleet_bench import artifact, claim_of

pytestmark = pytest.mark.long

BOUNDS = Bounds(workers=2, artifacts=2, lease_ticks=4, epochs=3, late=2)


class Twin:
    """The real directory, led along a walk of the model."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.directory = MemoryDirectory(lambda: self.now_s)
        self.real = {NONE: NONE}
        """Real epochs and tokens, by the model's."""
        self.num_stale = self.num_held = self.num_owned = 0

    def act(self, call: Call) -> int:
        """Return the real answer in the model's terms; a new number stays as it is."""
        epoch = Epoch(self.real[call.epoch])
        what = artifact("twin", call.artifact)
        try:
            if call.kind == "register":
                name = f"worker {call.worker}"
                return self.directory.register(Worker(name), float(BOUNDS.lease_ticks)).epoch
            if call.kind == "renew":
                self.directory.renew_lease(epoch)
            elif call.kind == "release":
                self.directory.release(epoch, {what: Token(self.real[call.token])})
            else:
                [grant] = self.directory.claim_owner(epoch, [claim_of(what)])
                return HELD if grant.outcome is GrantOutcome.FOREIGN else grant.token
        except StaleEpochError:
            return STALE
        return 0

    def compare(self, call: Call, model_reply: int) -> None:
        reply = self.act(call)
        if model_reply > 0:
            known = self.real.get(model_reply)
            assert reply > 0, f"the code refuses what the model grants: {call}"
            assert known is None or known == reply or reply > max(self.real.values())
            self.real[model_reply] = reply
        else:
            assert reply == model_reply, call
        self.num_stale += reply == STALE
        self.num_held += reply == HELD
        self.num_owned += call.kind == "claim" and reply > 0

    def same_owners(self, state: State) -> None:
        for index, (epoch, token) in enumerate(state.owners):
            what = artifact("twin", index)
            record = self.directory.lookup([what.chunk]).chunks[0].get(what.state_type)
            found = (NO_EPOCH, NO_TOKEN) if record is None else (record.owner, record.token)
            assert found == (self.real[epoch], self.real[token])


class Recorder(Model):
    """Records the directory's calls and answers on the way to each step."""

    acted: tuple[Call, int] | None = None

    def _act(self, state: State, call: Call) -> tuple[State, int]:
        after, reply = super()._act(state, call)
        self.acted = (call, reply)
        return after, reply


def _weight(label: str) -> float:
    """Prefers calls that are answered before the lease has ended: the normal case."""
    rare = {"crashes": 0.05, "tick": 0.3, "times out": 0.2, "on its way": 0.5}
    return min((w for word, w in rare.items() if word in label), default=1.0)


@pytest.mark.parametrize("seed", range(4))
def test_the_directory_answers_as_the_model(seed: int) -> None:
    rng = random.Random(seed)
    stale = held = owned = 0
    for _ in range(250):
        model, twin = Recorder(BOUNDS, Rules()), Twin()
        state = model.start
        for _ in range(150):
            steps = []
            for label, after in model.steps(state):
                steps.append((label, after, model.acted if "arrives" in label else None))
            weights = [0.2 if "crash" in label else 1.0 for label, _, _ in steps]
            [(label, state, acted)] = rng.choices(steps, weights)
            if label == "tick":
                twin.now_s += 1.0
            if acted is not None:
                twin.compare(*acted)
            twin.same_owners(state)
        stale, held, owned = stale + twin.num_stale, held + twin.num_held, owned + twin.num_owned
    assert min(stale, held, owned) > 20, "the walks met every answer"
